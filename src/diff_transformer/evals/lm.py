"""The only interface between an experiment and a model.

An experiment calls only the methods of ``CausalLM`` that it needs. It therefore runs unchanged on the pair, on any
Hugging Face causal LM, and on a ten-line fake. ``evals/attention_tap.py`` looks inside the attention of a model.
"""

import inspect
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from diff_transformer.checks import require_known, require_positive
from diff_transformer.data.corpus import Corpus
from diff_transformer.data.evaluation_text import SPLITS, led, load_haystack, load_rows, text_length
from diff_transformer.data.filler import Filler
from diff_transformer.data.packing import PackedCorpus, pack_documents
from diff_transformer.data.tokenizer import encode_all, leading_ids
from diff_transformer.errors import UserError
from diff_transformer.evals.attention_call import AttentionCall
from diff_transformer.evals.attention_tap import tapped_attention
from diff_transformer.model.loading import fingerprint, padding_token, plain_defaults

CHUNK = 2048  # tokens of a prompt per forward pass
BATCH_TOKENS = 1 << 17  # tokens per batch
_LOGITS = 1 << 27  # logits over the vocabulary held at a time
_LOSSES = 1 << 24  # of these, in fp32 for their losses


# The layers of a ``DynamicCache`` that hold keys and values alone.
KEYS_AND_VALUES = (DynamicLayer, DynamicSlidingWindowLayer)


def extend(model: Any, cache: Any, ids: Tensor, **options: Any) -> tuple[Any, Any]:
    """Let ``model`` read ``ids [B, T]`` after what ``cache`` holds (None: nothing); its output, and the longer cache.

    Raises:
        ValueError: for a model without a cache of keys and values.
    """
    known = inspect.signature(getattr(model, "forward", model)).parameters
    name = "cache" if "cache" in known else "past_key_values"  # the older name, before transformers 5.24
    out = model(input_ids=ids, **{name: cache}, use_cache=True, **options)
    outputs = (getattr(out, key, None) for key in (name, "past_key_values"))
    longer = next((one for one in outputs if one is not None), None)
    if longer is None or all(getattr(longer, "is_linear", None) or [False]):
        raise UserError(f"{type(model).__name__} returns no cache, which reading a text in parts needs")
    return out, longer


class CausalLM:
    """A Hugging Face causal LM and its tokenizer.

    Args:
        model: in any dtype, on any device; switched to eval mode.
        tokenizer: any fast tokenizer; it needs no padding token.
        name: the model's name in results.
        batch_size: most prompts or rows per forward pass.
        path: the folder or the name on the hub that the model was read from; "" if it was not read.
        data: the ``TrainingData`` of the run that trained it: experiments read its held-out text, not ``corpus``.
    """

    def __init__(self, model, tokenizer, name: str, batch_size: int = 32, path: str = "", data: Any = None):
        require_positive(batch_size=batch_size)
        self.path, self.data = path, data
        self.model, self.tokenizer, self.name, self.batch_size = model.eval(), tokenizer, name, batch_size

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def positions(self) -> int | None:
        """The longest sequence the model supports (``config.max_position_embeddings``); None if it does not say."""
        positions = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        return positions if isinstance(positions, int) and positions > 0 else None

    @property
    def prefix(self) -> list[int]:
        """``leading_ids`` of its tokenizer."""
        return leading_ids(self.tokenizer)

    @cached_property
    def in_parts(self) -> bool:
        """True if the model can read a text in several passes over one cache, as it reads it in one.

        The cache must hold keys and values alone. A pass of several tokens over the recurrent state of a hybrid model
        is not always what one pass over the whole text gives (Jamba, MiniMax), so such models read texts whole.
        """
        token = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        try:
            with torch.inference_mode():
                cache = extend(self.model, None, token)[1]
        except ValueError:
            return False
        return type(cache) is DynamicCache and all(type(layer) in KEYS_AND_VALUES for layer in cache.layers)

    @torch.inference_mode()
    def generate(self, prompts: list[str], max_new_tokens: int, templated: bool = False) -> list[str]:
        """Greedy continuations of ``prompts``, without the prompts, in their order.

        With ``templated``, the prompts are those of a chat template: special tokens are spelled out, and none is added.
        Prompts of similar length share a batch with left padding. Long prompts are read in chunks.

        Raises:
            ValueError: if a prompt with its continuation is longer than the model supports.
        """
        require_positive(max_new_tokens=max_new_tokens)
        before = [] if templated else self.prefix
        ids = [before + row.tolist() for row in encode_all(self.tokenizer, prompts, special=templated)]
        check_length(self, max(map(len, ids), default=0) + max_new_tokens, "the longest prompt and its continuation")
        order = sorted(range(len(ids)), key=lambda i: len(ids[i]), reverse=True)
        texts = [""] * len(ids)
        while order:
            size = rows_at_once(self, len(ids[order[0]]) + max_new_tokens)
            part, order = order[:size], order[size:]
            new = self.continued([ids[i] for i in part], max_new_tokens)
            for i, text in zip(part, self.tokenizer.batch_decode(new, skip_special_tokens=True), strict=True):
                texts[i] = text
        return texts

    @torch.inference_mode()
    def token_losses(self, ids: Tensor) -> Tensor:
        """Negative log-likelihood in nats of ``ids[:, 1:]``, each given all tokens before it: fp32 ``[B, T - 1]``.

        Raises:
            ValueError: if a row is longer than the model supports.
        """
        check_length(self, ids.shape[1], "a row")
        vocabulary = self.model.config.get_text_config().vocab_size
        size = max(1, min(rows_at_once(self, ids.shape[1]), _LOGITS // (ids.shape[1] * vocabulary)))
        parts = []
        for rows in ids.split(size):
            logits = self.model(input_ids=rows.to(self.device), use_cache=False).logits
            for row, labels in zip(logits, rows[:, 1:].to(self.device), strict=True):
                blocks = zip(*(x.split(max(1, _LOSSES // vocabulary)) for x in (row[:-1], labels)), strict=True)
                losses = [F.cross_entropy(block.float(), label, reduction="none") for block, label in blocks]
                parts.append(torch.cat(losses).cpu())
        return torch.stack(parts)

    @torch.inference_mode()
    def predictions(self, ids: Tensor) -> Tensor:
        """The most probable next token at every position but the last, int64 ``[B, T - 1]``, for ``ids [B, T]``.

        Raises:
            ValueError: if a row is longer than the model supports.
        """
        check_length(self, ids.shape[1], "a row")
        parts = ids.split(rows_at_once(self, ids.shape[1]))
        logits = (self.model(input_ids=rows.to(self.device), use_cache=False).logits for rows in parts)
        return torch.cat([rows[:, :-1].argmax(-1).cpu() for rows in logits])

    @torch.inference_mode()
    def last_row_attention(self, ids: Tensor) -> list[Tensor]:
        """For each layer, the attention of the last position of ``ids [1, T]`` to all positions: fp32 ``[heads, T]``.

        Differential attention gives the difference ``A1 - lambda A2``. The prompt is read into the cache in chunks and
        only the last row is computed, which takes O(T) memory. Keys outside a layer's sliding window get 0. DINT, whose
        last row is a mean over all queries, reads the prompt in one pass and its maps in blocks.

        Raises:
            ValueError: if there are more tokens than the model supports.
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
            if whole:
                self.model.base_model(input_ids=ids, use_cache=False)
            else:
                extend(self.model.base_model, cache, ids[:, -1:])
        return rows

    @torch.inference_mode()
    def read(self, ids: Tensor) -> Any:
        """The model's cache after reading ``ids [B, T]`` in chunks; None if there are no tokens. Computes no logits.

        Raises:
            ValueError: for a model without a cache.
        """
        cache, chunk = None, CHUNK if self.in_parts else ids.shape[1]
        for part in ids.split(chunk, dim=1) if ids.shape[1] else ():
            cache = extend(self.model.base_model, cache, part.to(self.device))[1]
        return cache

    def continued(self, ids: list[list[int]], max_new_tokens: int) -> Tensor:
        """Greedy continuations of one batch: int64 ``[B, new]``."""
        longest = max(map(len, ids))
        pad = padding_token(self.model, self.tokenizer)
        inputs = torch.tensor([[pad] * (longest - len(row)) + row for row in ids], device=self.device)
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in ids], device=self.device)
        with plain_defaults(self.model):
            out = self.model.generate(
                input_ids=inputs, attention_mask=mask, max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=pad,
                prefill_chunk_size=CHUNK if longest > CHUNK and self.in_parts else None,
            )  # fmt: skip
        return out[:, longest:]


def first_of_text(lm: Any, ids: Tensor) -> int:
    """Index of the first token of ``ids [B, T]`` that has a loss: 1, or the number of tokens that the tokenizer puts in
    front of every text, if all rows begin with them and there are more."""
    before = list(getattr(lm, "prefix", ()))
    led = len(before) < ids.shape[1] and bool((ids[:, : len(before)] == torch.tensor(before, dtype=ids.dtype)).all())
    return max(1, len(before)) if led else 1


def max_positions(lm: Any) -> int | None:
    """The longest sequence that a model supports (``config.max_position_embeddings``); None if it does not say."""
    return getattr(lm, "positions", None)


def check_length(lm: Any, tokens: int, what: str) -> None:
    """Raise ValueError if ``what`` has more tokens than the model supports (where its configuration says)."""
    positions = max_positions(lm)
    if positions is not None and tokens > positions:
        raise UserError(
            f"{what} has {tokens} tokens, more than the {positions} positions of {lm.name} "
            "(config.max_position_embeddings); set a smaller length or use a model with more positions"
        )


def rows_at_once(lm: Any, length: int) -> int:
    """Rows of ``length`` tokens per batch: at most the model's batch size and 131,072 tokens; at least 1."""
    return max(1, min(getattr(lm, "batch_size", 32), BATCH_TOKENS // max(1, length)))


def measured_split(lm: Any, split: str, otherwise: str) -> str:
    """The part of a corpus to measure ``lm`` on: ``split``. "auto" is the held-out part for a model of this package
    (which may have been trained on the rest), and ``otherwise`` for any other model."""
    require_known("split", split, ("auto", *SPLITS))
    if split != "auto":
        return split
    config = getattr(getattr(lm, "model", None), "config", None)
    return "held-out" if getattr(config, "model_type", None) == "diff_transformer" else otherwise


def text_rows(lm: Any, settings: Any, count: int) -> tuple[Tensor, str]:
    """``load_rows`` for an experiment's ``settings``, with fields ``corpus``, ``split``, ``length`` and ``seed``.

    Returns:
        ``count`` rows in the tokens of ``lm``, int64 ``[count, length]``, and their part of the corpus. Each row begins
        with the tokens that the tokenizer puts in front of every text.

    Raises:
        ValueError: if ``lm`` does not support rows so long, or the text has fewer.
    """
    check_length(lm, settings.length, "a row")
    data = getattr(lm, "data", None)
    if data is not None:
        return spread_rows(data.corpus, lm.tokenizer, settings.length, count), "validation"
    split = measured_split(lm, settings.split, "any")
    return load_rows(settings.corpus, lm.tokenizer, settings.length, count, seed=settings.seed, split=split)


def spread_rows(corpus: Corpus, tokenizer: Any, length: int, count: int) -> Tensor:
    """At most ``count`` rows of ``length`` tokens, spread evenly over the held-out text: int64 ``[rows, length]``."""
    tokens = pack_documents(corpus.validation, tokenizer)
    text = PackedCorpus(tokens, text_length(length, tokenizer), shuffle=False)
    return led(torch.from_numpy(text.spread(count)), leading_ids(tokenizer))


def haystack(lm: Any, settings: Any, length: int) -> tuple[Filler, str]:
    """``load_haystack`` for prompts of at most ``length`` tokens, for an experiment's ``corpus`` and ``split``."""
    data = getattr(lm, "data", None)
    if data is not None:
        return Filler(data.corpus.validation), "validation"
    split = measured_split(lm, settings.split, "any")
    return load_haystack(settings.corpus, lm.tokenizer, length, split=split)


def text_details(settings: Any, part: str) -> dict:
    """Facts about the text for a result's provenance: ``part``, and a ``note`` if the held-out text did not suffice and
    training text of the corpus was measured too.

    Args:
        settings: of an experiment, with fields ``corpus`` and ``split``.
        part: as ``load_rows`` and ``load_haystack`` return it.
    """
    if part != "all" or settings.split == "all":
        return {"part": part}
    note = f"the held-out text of {settings.corpus!r} is too small, so training text of the corpus is measured too"
    return {"part": part, "note": f"{note}; --split held-out refuses instead, --split all asks for it"}


def settings_of_lm(lm: Any) -> dict:
    """Facts about the model for a result's provenance: path, fingerprint of the weights, class, dtype, positions, the
    tokens that its tokenizer puts in front of every text, if any, and the kind of attention, if known."""
    model = getattr(lm, "model", None)
    if model is None:
        return {}
    found = {
        "path": getattr(lm, "path", ""), "weights": fingerprint(model), "class": type(model).__name__,
        "dtype": str(model.dtype).removeprefix("torch."), "positions": lm.positions,
    }  # fmt: skip
    found |= {"leading_tokens": list(leading)} if (leading := getattr(lm, "prefix", ())) else {}
    attention = getattr(model.config, "attention", None)
    return {**found, "attention": attention} if isinstance(attention, str) else found


def load_lm(
    name_or_path: str, *, device: str | None = None, dtype: str | None = None, batch_size: int = 32
) -> CausalLM:
    """A causal LM and its tokenizer from a folder, the hub, or a preset (untrained, with a byte tokenizer).

    Args:
        device: "cpu", "cuda", ...; CUDA where there is one if None.
        dtype: "float32", "bfloat16" or "float16"; None as in ``load_model``.

    Raises: as ``load_model``, which reads safetensors only.
    """
    from diff_transformer.model.card import label_of
    from diff_transformer.model.loading import load_model

    model, tokenizer = load_model(name_or_path, device=device, dtype=dtype)
    folder = Path(name_or_path).expanduser()
    path = str(folder.resolve()) if folder.exists() else name_or_path
    return CausalLM(model, tokenizer, label_of(name_or_path), batch_size=batch_size, path=path)
