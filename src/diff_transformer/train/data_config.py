"""The part of a run's configuration that says what it trains on."""

from dataclasses import field
from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from pydantic.dataclasses import dataclass

from diff_transformer.settings import STRICT, PositiveInt

NO_CORPUS = "none"  # value of `data.corpus`
SOURCES = ("text", "needles", "recall")


def _shares(mixture: dict[str, float]) -> dict[str, float]:
    if unknown := sorted({*mixture} - {*SOURCES}):
        raise ValueError(f"no source is called {unknown[0]!r}; the sources are {', '.join(SOURCES)}")
    if not any(mixture.values()):
        raise ValueError('give at least one share above 0, such as {"text": 1.0}')
    return mixture


Counts = Annotated[tuple[PositiveInt, ...], Field(min_length=1)]
Share = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(config=STRICT)
class NeedleConfig:
    """Multi-needle documents in training (source "needles")."""

    # numbers of needles in a document, drawn with equal probability
    counts: Counts = (1, 2, 4)
    queries: Counts = (1, 2)  # numbers of cities that a question asks for
    questions: PositiveInt = 4  # questions at the end of a document, at most
    digits: PositiveInt = 2  # digits of a magic number


@dataclass(config=STRICT)
class RecallConfig:
    """Key-value recall in noise (source "recall")."""

    pairs: PositiveInt = 8  # key-value pairs in a row
    symbols: PositiveInt = 64  # number of keys, and of values, to draw from
    noise_symbols: int | None = None  # number of noise tokens to draw from; None for all others of the vocabulary
    questions: int = 0  # keys asked for, drawn with replacement; 0 asks for every key once
    distractors: float = 0.0  # share of the noise tokens that are keys of no pair of the row


@dataclass(config=STRICT)
class DataConfig:
    """The data of a training run."""

    # "python", a file or folder of text, JSON lines or parquet, "hub:NAME", a folder that `diff-transformer prepare`
    # made, or "none" (recall alone)
    corpus: str = "python"
    max_bytes: PositiveInt | None = None  # bytes of the corpus, at most; None for all of it
    # "bpe" (trained on the corpus; a prepared folder brings its own), "bytes", or a folder or hub name
    tokenizer: str = "bpe"
    length: PositiveInt = 128  # tokens a row
    # share of the rows of a batch by source: "text", "needles" or "recall"
    mixture: Annotated[dict[str, Share], AfterValidator(_shares)] = field(default_factory=lambda: {"text": 1.0})
    # "tokens": mean over all labelled tokens. "sources": mean over each source's tokens, weighted by the source's
    # share; needle documents are then scored on their answers alone, which prose would otherwise outnumber
    loss: Literal["tokens", "sources"] = "tokens"
    # "joined": a token attends to everything before it in its row. "separate": only to its own document (packed
    # attention, positions from 0 in each document)
    documents: Literal["joined", "separate"] = "joined"
    needles: NeedleConfig = field(default_factory=NeedleConfig)
    recall: RecallConfig = field(default_factory=RecallConfig)

    @property
    def shares(self) -> dict[str, float]:
        """The sources that are used, with their shares; the order is that of ``Rows.source``."""
        return {name: share for name, share in self.mixture.items() if share > 0}
