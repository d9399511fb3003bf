"""Text to hide needles in, long enough for the longest prompt."""

from typing import TYPE_CHECKING

from diff_transformer.data.corpus import load_corpus
from diff_transformer.data.filler import Filler

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

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
