"""Cutting a document so that the prompt around it fits a model."""

from collections.abc import Callable
from dataclasses import dataclass

from diff_transformer.data.tokenizer import require_fast

SMALLEST = 16  # tokens of a document below which a prompt says nothing about it


@dataclass(frozen=True)
class Fitted:
    """A prompt that fits. ``tokens`` is the whole document's length, ``kept`` that of the part in the prompt."""

    prompt: str
    document: str
    tokens: int
    kept: int

    @property
    def truncated(self) -> bool:
        return self.kept < self.tokens


def fit_document(tokenizer, document: str, frame: Callable[[str], str], limit: int | None) -> Fitted:
    """``frame(document)``, with the document cut at its end as far as needed for at most ``limit`` tokens.

    Raises:
        ValueError: where less than 16 tokens of the document would remain, or the tokenizer has no fast backend.
    """
    require_fast(tokenizer)
    total = _length(tokenizer, document)
    prompt = frame(document)
    if limit is None or _length(tokenizer, prompt) <= limit:
        return Fitted(prompt, document, total, total)
    room = limit - _length(tokenizer, frame(""))
    ends = [
        end for _, end in tokenizer(document, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    ]
    while room >= min(SMALLEST, total):
        kept = document[: ends[min(room, total) - 1]]
        prompt = frame(kept)
        over = _length(tokenizer, prompt) - limit
        if over <= 0:
            return Fitted(prompt, kept, total, _length(tokenizer, kept))
        room -= over
    raise ValueError(
        f"{limit} tokens leave {max(room, 0)} for a document of {total}, below the least of {min(SMALLEST, total)}; "
        "give a model with more positions, fewer new tokens, or another length"
    )


def _length(tokenizer, text: str) -> int:
    return len(tokenizer(text, add_special_tokens=False)["input_ids"])
