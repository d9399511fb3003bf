"""Text of a corpus to measure a model on: rows of tokens, and words to hide needles in."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from diff_transformer.checks import require_known, require_positive
from diff_transformer.data.corpus import load_corpus
from diff_transformer.data.documents import Document
from diff_transformer.data.filler import Filler
from diff_transformer.data.packing import PackedCorpus, pack_documents
from diff_transformer.data.seeding import evaluation_rng
from diff_transformer.data.tokenizer import leading_ids
from diff_transformer.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SPLITS = ("held-out", "all", "any")  # "any": the held-out text if there is enough of it, else all
SPARE = 2  # "enough" is this many times the longest prompt, so that prompts differ in their text


def load_rows(
    source: str, tokenizer: "PreTrainedTokenizerFast", length: int, count: int, *, seed: int = 0, split="held-out"
) -> tuple[Tensor, str]:
    """``count`` windows of a corpus that do not overlap, int64 ``[count, length]``, and their part of the corpus:
    "validation" or "all". Each begins with the tokens that the tokenizer puts in front of every text.

    Args:
        source: as for ``load_corpus``: "python", a file, a folder or a data set of the hub.
        seed: of the choice of windows.
        split: "held-out", "all", or "any": the held-out text if it suffices, else all.

    Raises:
        UserError: if the text has fewer windows.
    """
    require_positive(length=length, count=count)
    part, tokens, before = "", torch.empty(0).numpy(), leading_ids(tokenizer)
    room = text_length(length, tokenizer)
    for part, documents in documents_of(source, split):  # noqa: B007
        tokens = pack_documents(documents, tokenizer)
        if len(tokens) // room >= count:
            break
    if len(tokens) // room < count:
        raise UserError(
            f"{_text(source, part)} has {len(tokens)} tokens, {count} rows of {length} need {count * room}; give "
            f"more text, fewer samples or a smaller length{_or_all(part)}"
        )
    packed = PackedCorpus(tokens, room, shuffle=False)
    chosen = evaluation_rng(seed, "rows").choice(packed.num_windows, count, replace=False)
    rows = torch.cat([torch.from_numpy(packed.rows(int(index), 1)[0]) for index in sorted(chosen)])
    return led(rows, before), part


def text_length(length: int, tokenizer: "PreTrainedTokenizerFast") -> int:
    """Tokens of text in a row of ``length`` tokens that begins with the tokenizer's own.

    Raises:
        UserError: if fewer than two remain.
    """
    before = len(leading_ids(tokenizer))
    if length < before + 2:
        raise UserError(
            f"rows of {length} tokens have no room: the tokenizer puts {before} in front; give a larger length"
        )
    return length - before


def led(rows: Tensor, before: list[int]) -> Tensor:
    """``rows [B, T]`` with the tokens ``before`` in front of each."""
    return torch.cat([rows.new_tensor(before).expand(len(rows), -1), rows], dim=1) if before else rows


def load_haystack(
    source: str, tokenizer: "PreTrainedTokenizerFast", length: int, *, split: str = "held-out"
) -> tuple[Filler, str]:
    """The words of a corpus as filler, and their part of the corpus: "validation" or "all".

    Args:
        source, split: as for ``load_rows``; held-out text suffices for "any" with twice ``length`` tokens.
        length: tokens of the longest prompt.

    Raises:
        UserError: if the text has fewer tokens than ``length``.
    """
    for part, documents in documents_of(source, split):
        filler = Filler(documents)
        tokens = filler.tokens(tokenizer).size
        if tokens >= (SPARE * length if (part, split) == ("validation", "any") else length):
            return filler, part
    raise UserError(
        f"{_text(source, part)} has {tokens} tokens of filler, prompts need {length}; give more text or a smaller "
        f"length{_or_all(part)}"
    )


def documents_of(source: str, split: str) -> Iterator[tuple[str, list[Document]]]:
    """(part, documents) of a corpus, in the order in which ``split`` tries them; part is "validation" or "all"."""
    require_known("split", split, SPLITS)
    corpus = load_corpus(source)
    if split != "all":
        yield "validation", [*corpus.validation]
    if split != "held-out":
        yield "all", [*corpus.validation, *corpus.train]


def _text(source: str, part: str) -> str:
    return f"the held-out text of the corpus {source!r}" if part == "validation" else f"the corpus {source!r}"


def _or_all(part: str) -> str:
    return "; --split all reads the training text too" if part == "validation" else ""
