"""The part of a run's configuration that says what it trains on."""

from dataclasses import dataclass, field

NO_CORPUS = "none"  # value of `data.corpus`


@dataclass
class NeedleConfig:
    """Multi-needle documents in training (source "needles")."""

    counts: tuple[int, ...] = (1, 2, 4)  # numbers of needles in a document, drawn with equal probability
    queries: tuple[int, ...] = (1, 2)  # numbers of cities that a question asks for
    questions: int = 4  # questions at the end of a document, at most
    digits: int = 2  # digits of a magic number


@dataclass
class RecallConfig:
    """Key-value recall in noise (source "recall")."""

    pairs: int = 8  # key-value pairs in a row
    symbols: int = 64  # number of keys, and of values, to draw from
    noise_symbols: int | None = None  # number of noise tokens to draw from; None for all others of the vocabulary
    questions: int = 0  # keys asked for, drawn with replacement; 0 asks for every key once
    distractors: float = 0.0  # share of the noise tokens that are keys of no pair of the row
    unanswerable: float = 0.0  # share of the questions about such keys; their answer is one token that says so
    shots: tuple[int, ...] = (1,)  # pairs of each key, which are then labelled examples; drawn for each row
    forms: int = 1  # tokens that stand for a key


@dataclass
class ShotConfig:
    """Labelled examples whose class names are dealt anew in each row (source "shots")."""

    data: str = "python"  # a labelled set, as for the experiment many_shot; only its training texts are used
    classes: tuple[int, ...] = (2, 3)  # numbers of classes in a row, drawn with equal probability


@dataclass
class DataConfig:
    """What a run trains on."""

    # "python", a file, a folder, an archive, a folder that `diff-transformer prepare` made, or "none" (recall alone)
    corpus: str = "python"
    # several prepared folders with their weights, instead of `corpus`
    corpora: dict[str, float] = field(default_factory=dict)
    max_bytes: int | None = None  # bytes of the corpus, at most; None for all of it
    # "bpe" (trained on the corpus; a prepared folder brings its own), "bytes", "cl100k", or a folder or hub name
    tokenizer: str = "bpe"
    length: int = 128  # tokens a row
    # a document of a prepared folder with at least this many tokens is long: rows start at its beginning, and an epoch
    # holds it `upsample_factor` times (section 3.3); 0 for no long documents
    upsample_length: int = 0
    upsample_factor: int = 4  # how often an epoch holds a long document
    # share of the rows of a batch by source: "text", "needles", "recall", "shots", or rows that lead up to needles:
    # "copies" (text that occurs twice), "pairs" ("Rome 4.") and "clauses" ("Rome is 4.")
    mixture: dict[str, float] = field(default_factory=lambda: {"text": 1.0})
    # steps and shares of what is trained on before `mixture`, in order: [[600, {"copies": 1.0}], ...]
    phases: tuple[tuple[int, dict[str, float]], ...] = ()
    # "tokens": mean over all labelled tokens. "sources": mean over each source's tokens, weighted by the source's
    # share; needle documents are then scored on their answers alone, which prose would otherwise outnumber
    loss: str = "tokens"
    # "joined": a token attends to everything before it in its row. "separate": only to its own document (packed
    # attention, positions from 0 in each document)
    documents: str = "joined"
    needles: NeedleConfig = field(default_factory=NeedleConfig)
    recall: RecallConfig = field(default_factory=RecallConfig)
    shots: ShotConfig = field(default_factory=ShotConfig)
