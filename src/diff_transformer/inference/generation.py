"""Generate text with any causal LM: streaming, or in batches of prompts."""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor
from transformers import TextStreamer

from diff_transformer.checks import LOWEST_TEMPERATURE
from diff_transformer.errors import UserError
from diff_transformer.model.loading import padding_token, plain_defaults
from diff_transformer.settings import NonNegativeFloat, PositiveInt, Seed, validate


@dataclass(frozen=True)
class GenerationSettings:
    """How to generate.

    Attributes:
        max_new_tokens: the largest number of new tokens; fewer if the model ends the text.
        temperature: 0, or less than 1e-5, takes the likeliest token (greedy); above, tokens are sampled.
        top_p: sample from the likeliest tokens that together have this probability.
        seed: seed of the sampling; None for a new one each time.

    Raises:
        UserError: for values of another type or outside their range, or settings that exclude one another.
    """

    max_new_tokens: PositiveInt = 64
    temperature: NonNegativeFloat = 0.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    seed: Seed | None = None

    def __post_init__(self):
        for field in fields(self):
            validate(field.type, getattr(self, field.name), field.name)
        if self.temperature == 0 and (self.top_p < 1 or self.seed is not None):
            raise UserError("top_p and seed are for drawing tokens, but temperature is 0; give a temperature above 0")


def generate(
    model,
    tokenizer,
    prompts: Sequence[str],
    settings: GenerationSettings | None = None,
    *,
    on_text: Callable[[str], None] | None = None,
) -> list[str]:
    """Continue ``prompts`` in one batch with left padding; return the continuations without the prompts.

    Only the special tokens of the model's ``generation_config`` are used; ``settings`` determines the rest.

    Args:
        model: a causal LM of transformers, on its device, in eval mode.
        tokenizer: its tokenizer; it needs no padding token.
        settings: the defaults of ``GenerationSettings`` if None.
        on_text: called with each piece of the continuation as soon as it is known; for a single prompt.

    Raises:
        UserError: for an empty prompt, or more tokens than the model has positions.
    """
    settings = settings or GenerationSettings()
    if isinstance(prompts, str) or not prompts:
        raise UserError(f"prompts is {prompts!r}; give a list of at least one prompt")
    if on_text is not None and len(prompts) > 1:
        raise UserError(f"{len(prompts)} prompts cannot stream into one text; leave out on_text or give one prompt")
    ids = [_encode(tokenizer, prompt) for prompt in prompts]
    _check_length(model, max(map(len, ids)) + settings.max_new_tokens)
    ends, pad = _ends(model), padding_token(model, tokenizer)
    inputs, mask = left_padded(ids, pad, model.device)
    streamer = None if on_text is None else TextPieces(tokenizer, on_text, ids[0])
    with torch.inference_mode(), _seeded(settings.seed, model.device), plain_defaults(model):
        out = model.generate(
            input_ids=inputs, attention_mask=mask, pad_token_id=pad, streamer=streamer, **_options(settings)
        )
    new = out[:, inputs.shape[1] :].tolist()
    return [_continuation(tokenizer, prompt, _ended(row, ends)) for prompt, row in zip(ids, new, strict=True)]


def _continuation(tokenizer, prompt: list[int], new: list[int]) -> str:
    """The text of ``new`` after ``prompt``; alone, some tokenizers (Llama 2, Mistral 7B) drop its first space."""
    before, whole = (tokenizer.decode(ids, skip_special_tokens=True) for ids in (prompt, [*prompt, *new]))
    return whole[len(before) :] if whole.startswith(before) else tokenizer.decode(new, skip_special_tokens=True)


def left_padded(ids: Sequence[Sequence[int]], pad: int, device: Any) -> tuple[Tensor, Tensor]:
    """Pad rows on the left: ``input_ids`` and ``attention_mask``, int64 ``[B, T]``; T is the longest row's length."""
    longest = max(map(len, ids))
    inputs = torch.tensor([[pad] * (longest - len(row)) + list(row) for row in ids], device=device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in ids], device=device)
    return inputs, mask


class TextPieces(TextStreamer):
    """Streamer of ``generate`` for one prompt: ``on_text`` gets each piece of text once its words are complete."""

    def __init__(self, tokenizer, on_text: Callable[[str], None], prompt: list[int]):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.on_text = on_text
        self._decode_after(prompt)

    def put(self, value: Tensor) -> None:
        super().put(value)
        if not self.token_cache:  # which a new line empties
            self._decode_after(value.flatten().tolist())

    def _decode_after(self, ids: list[int]) -> None:
        """Decode the next word after the last of ``ids``, see ``_continuation``."""
        self.token_cache = ids[-1:]
        self.print_len = len(self.tokenizer.decode(self.token_cache, skip_special_tokens=True))

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text:
            self.on_text(text)


def _options(settings: GenerationSettings) -> dict[str, Any]:
    """``settings`` as arguments of transformers' ``generate``."""
    drawn = settings.temperature >= LOWEST_TEMPERATURE
    options: dict[str, Any] = {"max_new_tokens": settings.max_new_tokens, "do_sample": drawn}
    if drawn:
        options |= {"temperature": settings.temperature, "top_p": settings.top_p, "top_k": 0}
    return options


def _ends(model) -> list[int]:
    """The tokens with which the model ends a text."""
    own = model.generation_config.eos_token_id
    return own if isinstance(own, list) else [] if own is None else [own]


def _ended(row: list[int], ends: Sequence[int]) -> list[int]:
    """``row`` up to its first end; what follows pads the batch."""
    return row[: next((i + 1 for i, token in enumerate(row) if token in ends), len(row))]


def _encode(tokenizer, prompt: str) -> list[int]:
    ids = tokenizer(prompt)["input_ids"]
    if ids:
        return ids
    for begin in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if begin is not None:
            return [begin]
    raise UserError("the prompt is empty and the tokenizer has no token that begins a text; give some text")


def _check_length(model, tokens: int) -> None:
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if isinstance(positions, int) and tokens > positions:
        raise UserError(
            f"the prompt and its continuation have up to {tokens} tokens, more than the {positions} positions of the "
            "model (config.max_position_embeddings); give a shorter prompt or fewer new tokens"
        )


@contextmanager
def _seeded(seed: int | None, device: torch.device) -> Generator[None]:
    """Context manager that seeds the generators of the CPU and of ``device`` and restores them afterwards."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
