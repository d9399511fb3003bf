"""Text of a corpus to measure a model on: rows of tokens, and words to hide needles in."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from diff_transformer.checks import require_positive
from diff_transformer.data.corpus import load_corpus
from diff_transformer.data.filler import Filler
from diff_transformer.data.packing import PackedCorpus, pack_documents
from diff_transformer.data.seeding import evaluation_rng

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def load_rows(
    source: str, tokenizer: "PreTrainedTokenizerFast", length: int, count: int, *, seed: int = 0
) -> tuple[Tensor, str]:
    """``count`` windows of a corpus, int64 ``[count, length]``, none overlapping another, and which side they are from:
    "validation", or "all" where that side has too few.

    Args:
        source: as for ``load_corpus``: "python", a text file, a folder or an archive.
        seed: which windows, where there are more.

    Raises:
        ValueError: if the whole corpus has fewer windows.
    """
    require_positive(length=length, count=count)
    corpus = load_corpus(source)
    tokens, side = pack_documents(corpus.validation, tokenizer), "validation"
    if len(tokens) // length < count:
        tokens, side = pack_documents([*corpus.validation, *corpus.train], tokenizer), "all"
    if len(tokens) // length < count:
        raise ValueError(
            f"the corpus {source!r} has {len(tokens)} tokens, {count} rows of {length} need {count * length}; give "
            "more text, fewer samples or a smaller length"
        )
    packed = PackedCorpus(tokens, length, shuffle=False)
    chosen = evaluation_rng(seed, "rows").choice(packed.num_windows, count, replace=False)
    return torch.cat([torch.from_numpy(packed.rows(int(index), 1)[0]) for index in sorted(chosen)]), side


SPARE = 2  # so many times the longest prompt, so that prompts differ in their text


def load_haystack(source: str, tokenizer: "PreTrainedTokenizerFast", length: int) -> tuple[Filler, str]:
    """The words of a corpus and which side of it they are from: "validation", or "all" where that side is too short.

    Args:
        source: as for ``load_corpus``: "python", a text file, a folder or an archive.
        length: tokens of the longest prompt.

    Raises:
        ValueError: if the whole corpus has fewer tokens than ``length``.
    """
    corpus = load_corpus(source)
    filler = Filler(corpus.validation)
    if filler.tokens(tokenizer).starts[-1] >= SPARE * length:
        return filler, "validation"
    filler = Filler([*corpus.validation, *corpus.train])
    tokens = int(filler.tokens(tokenizer).starts[-1])
    if tokens < length:
        raise ValueError(
            f"the corpus {source!r} has {tokens} tokens of filler, prompts need {length}; give more text or a smaller "
            "length"
        )
    return filler, "all"
