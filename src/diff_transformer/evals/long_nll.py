"""Negative log-likelihood by position (section 3.3, Figure 4): does a longer context keep lowering the loss?

    book 0   t1 t2 t3 t4 | t5 ... t8 | t9 ............... t16 | ...      each token predicted from all before it
    NLL          mean of the first 4, 8, 16, ... predictions, over books

Each book is read on its own from its beginning, in chunks over a key/value cache. Only books long enough for the whole
curve count, so that all points are of the same texts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from diff_transformer.data.documents import Document
from diff_transformer.data.evaluation_text import documents_of
from diff_transformer.data.tokenizer import encode, leading_ids
from diff_transformer.errors import UserError
from diff_transformer.evals.likelihood import position_losses
from diff_transformer.evals.lm import CausalLM, check_length, max_positions, measured_split
from diff_transformer.evals.samples import ALL, Samples
from diff_transformer.evals.types import Result
from diff_transformer.settings import PositiveInt

BINS_PER_DOUBLING = 4
LONGEST = 65536  # tokens, as in Figure 4


@dataclass(frozen=True)
class Settings:
    """Negative log-likelihood by position."""

    # "python", a text file, JSON lines, parquet or a folder; its documents are the books.
    corpus: str = "python"
    # Documents to read: "held-out" (of a folder, a tenth), "all", or "auto": held-out for models of this package, which
    # may have been trained on the rest, and all for any other model
    split: str = "auto"
    # Positions to measure, in tokens of the model under test; by default 65,536, or as many as it supports.
    length: PositiveInt | None = None
    # Most books: the first that are long enough, in the corpus's order.
    samples: PositiveInt = 50


QUICK = {"length": 128, "samples": 12}


def amount(settings: Settings, config: Any) -> tuple[int, int]:
    """Books, at most, and their positions."""
    length = settings.length or min(LONGEST, getattr(config, "max_position_embeddings", None) or LONGEST)
    return settings.samples, settings.samples * length


def run(lm: CausalLM, settings: Settings, samples: Samples) -> Result:
    """Negative log-likelihood by position with ``settings``."""
    split = measured_split(lm, settings.split, "all")
    part, documents = next(documents_of(settings.corpus, split))
    result = evaluate_long_nll(lm, documents, settings, samples)
    result.about["part"] = part
    return result


def evaluate_long_nll(
    lm: CausalLM,
    documents: Sequence[Document],
    settings: Settings = Settings(),
    samples: Samples = ALL,
) -> Result:
    """The negative log-likelihood of the first ``length`` positions of books, in nats.

    Position n predicts token n + 1 of a book from the n before it; token n, if the tokenizer puts tokens in front.

    Returns:
        A row for each book and bin of positions (four bins per doubling): ``end``, its last position, and the ``sum``
        and ``count`` of its losses.

    Raises:
        UserError: for a length that the model does not support, or no book of that length.
    """
    length = settings.length or min(LONGEST, max_positions(lm) or LONGEST)
    check_length(lm, length, "length")
    edges = bin_edges(length)
    skipped = max(0, len(leading_ids(lm.tokenizer)) - 1)  # losses of tokens that are not the book's
    chosen = _long_enough(lm, documents, length + skipped, settings.samples)

    def score(books: Sequence[tuple[str, list[int]]]) -> list[dict]:
        rows = []
        for name, ids in books:
            losses = position_losses(lm, ids)[skipped:].double()
            bins = [(high, losses[low:high].sum().item(), high - low) for low, high in pairwise(edges)]
            rows.append({"book": name, "bins": bins})
        return rows

    rows = [
        {"example": book["book"], "end": end, "sum": total, "count": count}
        for book in samples.rows("books", chosen, score)
        for end, total, count in book["bins"]
    ]
    return Result("long_nll", rows, {"length": length, "books": len(chosen), "documents": len(documents)})


def bin_edges(length: int) -> list[int]:
    """Bin edges 0, 1, 2, ... in steps of a quarter of a doubling, with every power of two, up to ``length``."""
    doublings = length.bit_length()
    steps = {round(2 ** (i / BINS_PER_DOUBLING)) for i in range(doublings * BINS_PER_DOUBLING)}
    return [0, *sorted({step for step in steps if step < length} | {length})]


def _long_enough(lm: CausalLM, documents: Sequence[Document], length: int, books: int) -> list[tuple[str, list[int]]]:
    """(name, first ``length + 1`` tokens) of the first ``books`` documents that are long enough."""
    before = leading_ids(lm.tokenizer)
    chosen, longest = [], 0
    for document in documents:
        if len(chosen) == books:
            break
        ids = [*before, *encode(lm.tokenizer, document.text).tolist()]
        longest = max(longest, len(ids))
        if len(ids) > length:
            chosen.append((document.name, ids[: length + 1]))
    if not chosen:
        raise UserError(
            f"none of the {len(documents)} documents has {length + 1} tokens in {lm.name}'s tokenizer, the "
            f"longest {longest}; give a smaller length or a corpus of longer texts (books)"
        )
    return chosen
