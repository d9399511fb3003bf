"""The part of a run's configuration that says what it trains on."""

from dataclasses import dataclass, field
from typing import Annotated

from diff_transformer.settings import POSITIVE, PositiveInt, Rule, one_of

NO_CORPUS = "none"  # value of `data.corpus`


def _are_shares(mixture: dict[str, float]) -> bool:
    return any(mixture.values()) and all(share >= 0 for share in mixture.values())


def _all_positive(counts: tuple[int, ...]) -> bool:
    return min(counts, default=0) >= 1


_COUNTS = Rule(_all_positive, "give one or more numbers from 1, such as [1, 2]")
_TOKENS = Rule(lambda tokens: tokens >= 0, "give tokens, or 0 for none")
_SHARES = Rule(_are_shares, 'give shares of 0 or more, at least one above 0, such as {"text": 1.0}')
_WEIGHTS = Rule(
    lambda corpora: all(weight > 0 for weight in corpora.values()),
    "give weights above 0, and leave out what is not wanted",
)


@dataclass
class NeedleConfig:
    """Multi-needle documents in training (source "needles")."""

    # numbers of needles in a document, drawn with equal probability
    counts: Annotated[tuple[int, ...], _COUNTS] = (1, 2, 4)
    queries: Annotated[tuple[int, ...], _COUNTS] = (1, 2)  # numbers of cities that a question asks for
    questions: PositiveInt = 4  # questions at the end of a document, at most
    digits: PositiveInt = 2  # digits of a magic number


@dataclass
class RecallConfig:
    """Key-value recall in noise (source "recall")."""

    pairs: PositiveInt = 8  # key-value pairs in a row
    symbols: PositiveInt = 64  # number of keys, and of values, to draw from
    noise_symbols: int | None = None  # number of noise tokens to draw from; None for all others of the vocabulary
    questions: int = 0  # keys asked for, drawn with replacement; 0 asks for every key once
    distractors: float = 0.0  # share of the noise tokens that are keys of no pair of the row


@dataclass
class DataConfig:
    """The data of a training run."""

    # "python", a file or folder of text, JSON lines or parquet, "hub:NAME", a folder that `diff-transformer prepare`
    # made, or "none" (recall alone)
    corpus: str = "python"
    # several prepared folders with their weights, instead of `corpus`
    corpora: Annotated[dict[str, float], _WEIGHTS] = field(default_factory=dict)
    max_bytes: Annotated[int | None, POSITIVE] = None  # bytes of the corpus, at most; None for all of it
    # "bpe" (trained on the corpus; a prepared folder brings its own), "bytes", "cl100k", or a folder or hub name
    tokenizer: str = "bpe"
    length: PositiveInt = 128  # tokens a row
    # a document of a prepared folder with at least this many tokens is long: rows start at its beginning, and an epoch
    # holds it `upsample_factor` times (section 3.3); 0 for no long documents
    upsample_length: Annotated[int, _TOKENS] = 0
    upsample_factor: PositiveInt = 4  # how often an epoch holds a long document
    # share of the rows of a batch by source: "text", "needles" or "recall"
    mixture: Annotated[dict[str, float], _SHARES] = field(default_factory=lambda: {"text": 1.0})
    # "tokens": mean over all labelled tokens. "sources": mean over each source's tokens, weighted by the source's
    # share; needle documents are then scored on their answers alone, which prose would otherwise outnumber
    loss: Annotated[str, one_of("tokens", "sources")] = "tokens"
    # "joined": a token attends to everything before it in its row. "separate": only to its own document (packed
    # attention, positions from 0 in each document)
    documents: Annotated[str, one_of("joined", "separate")] = "joined"
    needles: NeedleConfig = field(default_factory=NeedleConfig)
    recall: RecallConfig = field(default_factory=RecallConfig)
