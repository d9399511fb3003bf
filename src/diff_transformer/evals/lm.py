"""The only place where an experiment meets a model.

An experiment uses the methods of ``LanguageModel`` it needs and no others, so that it runs unchanged on the pair, on
any Hugging Face causal LM, and on a ten-line fake. What looks inside a model is in ``evals/inside.py``.
"""

from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from diff_transformer.checks import require_positive
from diff_transformer.data.tokenizer import encode_all
from diff_transformer.evals.inside import AttentionCall, tapped_attention

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CHUNK = 2048  # tokens of a prompt in one forward pass
BATCH_TOKENS = 1 << 17  # tokens in one batch
_LOGITS = 1 << 28  # logits of the vocabulary held at a time


class LanguageModel(Protocol):
    """What an experiment needs of a model; ``CausalLM`` is one.

    ``generate``: for each prompt, what follows it greedily, at most ``max_new_tokens`` tokens, without the prompt.
    ``token_losses``: for rows ``ids`` int64 [B, T], nats of each token but the first given those before it, fp32
    [B, T - 1]. ``last_row_attention``: for each layer, the weights with which the last token of ``ids`` [1, T] attends,
    fp32 [heads, T]; of differential attention the difference of its two maps.
    """

    name: str
    tokenizer: "PreTrainedTokenizerFast"

    def generate(self, prompts: list[str], max_new_tokens: int) -> list[str]: ...

    def token_losses(self, ids: Tensor) -> Tensor: ...

    def last_row_attention(self, ids: Tensor) -> list[Tensor]: ...


class CausalLM:
    """``LanguageModel`` over a Hugging Face causal LM and its tokenizer.

    Args:
        model: in any dtype, on any device; used in eval mode.
        tokenizer: any fast tokenizer; it needs no padding token.
        name: how results call the model.
        batch_size: prompts or rows in one forward pass, at most.
    """

    def __init__(self, model, tokenizer, name: str, batch_size: int = 32):
        require_positive(batch_size=batch_size)
        self.model, self.tokenizer, self.name, self.batch_size = model.eval(), tokenizer, name, batch_size

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def positions(self) -> int | None:
        """The positions that the model was made for; None where its configuration does not say."""
        positions = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        return positions if isinstance(positions, int) and positions > 0 else None

    @property
    def prefix(self) -> list[int]:
        """What the tokenizer puts in front of every text: the beginning-of-text token of Llama, nothing for Qwen,
        GPT-2 and this package's tokenizers."""
        ids = self.tokenizer("")["input_ids"]
        return ids[:1] if ids and ids[0] == self.tokenizer.bos_token_id else []

    @torch.inference_mode()
    def generate(self, prompts: list[str], max_new_tokens: int) -> list[str]:
        """Greedy continuations of ``prompts``, without the prompts, in their order.

        Prompts of like length are batched with left padding; long ones are read in chunks.

        Raises:
            ValueError: if a prompt and its continuation need more positions than the model has.
        """
        require_positive(max_new_tokens=max_new_tokens)
        ids = [self.prefix + found.tolist() for found in encode_all(self.tokenizer, prompts)]
        check_length(self, max(map(len, ids), default=0) + max_new_tokens, "the longest prompt and its continuation")
        order = sorted(range(len(ids)), key=lambda i: len(ids[i]), reverse=True)
        texts = [""] * len(ids)
        while order:
            size = rows_at_once(self, len(ids[order[0]]) + max_new_tokens)
            part, order = order[:size], order[size:]
            new = self._continue([ids[i] for i in part], max_new_tokens)
            for i, text in zip(part, self.tokenizer.batch_decode(new, skip_special_tokens=True), strict=True):
                texts[i] = text
        return texts

    @torch.inference_mode()
    def token_losses(self, ids: Tensor) -> Tensor:
        """Negative log-likelihood in nats of ``ids[:, 1:]`` given what comes before: fp32 ``[B, T - 1]``.

        Raises:
            ValueError: if a row is longer than the model's positions.
        """
        check_length(self, ids.shape[1], "a row")
        vocabulary = self.model.config.get_text_config().vocab_size
        size = max(1, min(rows_at_once(self, ids.shape[1]), _LOGITS // (ids.shape[1] * vocabulary)))
        parts = []
        for rows in ids.split(size):
            logits = self.model(input_ids=rows.to(self.device), use_cache=False).logits[:, :-1].float()
            losses = F.cross_entropy(logits.transpose(1, 2), rows[:, 1:].to(self.device), reduction="none")
            parts.append(losses.cpu())
        return torch.cat(parts)

    @torch.inference_mode()
    def last_row_attention(self, ids: Tensor) -> list[Tensor]:
        """For each layer, the attention of the last position of ``ids [1, T]`` to all: fp32 ``[heads, T]``.

        Differential attention gives the difference ``A1 - lambda A2``. What comes before is read in chunks into the
        cache, and only the last row is computed: O(T) memory. A layer with a sliding window gives 0 before it. DINT,
        whose last row is a mean over all queries, reads the prompt in one piece, and its maps in blocks.

        Raises:
            ValueError: if there are more tokens than the model has positions.
        """
        check_length(self, ids.shape[1], "the prompt")
        rows: list[Tensor] = []

        def keep(call: AttentionCall):
            last = call.q1.shape[2] - 1
            row = call.attention(slice(last, last + 1))[0, :, -1].float().cpu()
            rows.append(F.pad(row, (ids.shape[1] - row.shape[-1], 0)))

        ids = ids.to(self.device)
        whole = getattr(self.model.config, "attention", None) == "dint"
        cache = None if whole else self.read(ids[:, :-1])
        with tapped_attention(self.model, keep):
            self.model.base_model(input_ids=ids if whole else ids[:, -1:], past_key_values=cache, use_cache=not whole)
        return rows

    @torch.inference_mode()
    def read(self, ids: Tensor, *, chunk: int | None = None) -> Any:
        """The model's cache after ``ids [B, T]``, read in chunks (of 2048 tokens if ``chunk`` is None); None after no
        tokens. No logits are computed.

        Raises:
            ValueError: for a model that gives no cache.
        """
        require_positive(chunk=chunk)
        cache = None
        for part in ids.split(chunk or CHUNK, dim=1) if ids.shape[1] else ():
            out = self.model.base_model(input_ids=part.to(self.device), past_key_values=cache, use_cache=True)
            cache = getattr(out, "past_key_values", None)
            if cache is None:
                raise ValueError(f"{type(self.model).__name__} gives no cache, which reading in chunks needs")
        return cache

    def _continue(self, ids: list[list[int]], max_new_tokens: int) -> Tensor:
        """Greedy continuations of one batch: int64 ``[B, new]``."""
        longest = max(map(len, ids))
        pad = next((i for i in (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id) if i is not None), 0)
        inputs = torch.tensor([[pad] * (longest - len(row)) + row for row in ids], device=self.device)
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in ids], device=self.device)
        out = self.model.generate(
            input_ids=inputs, attention_mask=mask, max_new_tokens=max_new_tokens, do_sample=False, num_beams=1,
            repetition_penalty=1.0, no_repeat_ngram_size=0, temperature=None, top_p=None, top_k=None, pad_token_id=pad,
            prefill_chunk_size=CHUNK if longest > CHUNK else None,
        )  # fmt: skip
        return out[:, longest:]


def check_length(lm: Any, tokens: int, what: str) -> None:
    """Raise ValueError if ``what`` has more tokens than the model has positions (where it says how many it has)."""
    positions = getattr(lm, "positions", None)
    if positions is not None and tokens > positions:
        raise ValueError(
            f"{what} has {tokens} tokens, more than the {positions} positions of {lm.name} "
            "(config.max_position_embeddings); set a smaller length or take a model for longer texts"
        )


def rows_at_once(lm: Any, length: int) -> int:
    """Rows of ``length`` tokens in one batch: the model's batch size, or what fits in 131,072 tokens; at least one."""
    return max(1, min(getattr(lm, "batch_size", 32), BATCH_TOKENS // max(1, length)))


def settings_of_lm(lm: Any) -> dict:
    """What a result's provenance says of the model: class, kind of attention (where it says), dtype, positions."""
    model = getattr(lm, "model", None)
    if model is None:
        return {}
    found = {"class": type(model).__name__, "dtype": str(model.dtype).removeprefix("torch."), "positions": lm.positions}
    attention = getattr(model.config, "attention", None)
    return {**found, "attention": attention} if isinstance(attention, str) else found
