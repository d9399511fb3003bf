"""The settings of a prepared folder, which determine it to the byte, and its tokenizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from diff_transformer.checks import require_known, require_positive
from diff_transformer.data.documents import hash_of_name
from diff_transformer.data.prepare.readers import read_pieces
from diff_transformer.data.prepare.sources import TextSource
from diff_transformer.data.tokenizer import ids_of, load_tokenizer, tokenizer_hash, train_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

DEFAULT_VOCAB_SIZE = 32_768
DEFAULT_SHARE = 0.01
# datatrove's classes, by the name of the work that published the rules
FILTERS = {
    "gopher": ("GopherRepetitionFilter", "GopherQualityFilter"),
    "c4": ("C4QualityFilter",),
    "fineweb": ("FineWebQualityFilter",),
}
DEDUP = ("minhash",)
TOKENIZERS = ("bpe", "bytes", "cl100k")  # by name; others by their place
_MIN_FILE_BYTES = 65_536  # of each file in the sample


@dataclass(frozen=True)
class PrepareConfig:
    """Settings of ``prepare``."""

    sources: tuple[str, ...]  # texts to read, in this order (`sources.find_sources`)
    # "bpe" (byte-level, trained on a sample of the sources), "bytes", "cl100k", a file of tiktoken ranks (.tiktoken), a
    # folder written by `save_pretrained`, or a name on the Hugging Face hub
    tokenizer: str = "bpe"
    vocab_size: int = DEFAULT_VOCAB_SIZE  # of "bpe", special tokens included
    sample_bytes: int = 10_000_000  # text that "bpe" is trained on: an equal share from the beginning of each file
    field: str = "text"  # field of JSON lines, or column of parquet, that holds the text
    validation: float = DEFAULT_SHARE  # share of the documents that is held out, by a hash
    shard_bytes: int = 32_000_000  # UTF-8 text of a shard
    skip_invalid: bool = False  # count and leave out rows without a text, instead of stopping
    tasks: int = 0  # with an engine: task i of n reads files i, i + n, ... and writes shards of its own; 0 without
    filters: tuple[str, ...] = ()  # with an engine: quality filters, names of `FILTERS`, in this order
    dedup: str | None = None  # with an engine: "minhash" drops documents that are nearly equal to another

    def validate(self) -> PrepareConfig:
        """Raise ValueError for sizes not above 0, a share outside 0 to 1, and unknown names; return the config."""
        require_positive(vocab_size=self.vocab_size, sample_bytes=self.sample_bytes, shard_bytes=self.shard_bytes)
        require_positive(tasks=self.tasks or None)
        for name in self.filters:
            require_known("filter", name, FILTERS)
        if self.dedup is not None:
            require_known("deduplication", self.dedup, DEDUP)
        if not 0 < self.validation < 1:
            raise ValueError(f"validation is {self.validation}; give a share between 0 and 1, such as {DEFAULT_SHARE}")
        return self

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it; the settings of engines only where they are set."""
        values = {**dataclasses.asdict(self), "sources": list(self.sources), "filters": list(self.filters)}
        return {key: value for key, value in values.items() if value or key not in ("tasks", "filters", "dedup")}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> PrepareConfig:
        fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        return cls(**fields)


@dataclass(frozen=True)
class TokenizerFacts:
    """What the shards depend on of a tokenizer."""

    hash: str
    size: int  # one more than the largest id
    end_of_text: int  # id
    dtype: str  # of the tokens in a shard, as NumPy writes it: "<u2" or "<u4"
    state: str  # the tokenizer as JSON


def choose_tokenizer(config: PrepareConfig, sources: Sequence[TextSource]) -> PreTrainedTokenizerFast:
    """The tokenizer that ``config`` asks for; "bpe" is trained on the training side of a sample of the sources.

    Raises:
        ValueError: for a tokenizer that cannot be loaded, or a sample without text.
    """
    if config.tokenizer != "bpe":
        return load_tokenizer(config.tokenizer)
    return train_tokenizer(sample(config, sources), config.vocab_size)


def facts_of(tokenizer: PreTrainedTokenizerFast) -> TokenizerFacts:
    """The facts of a tokenizer; raises ValueError if it has no end-of-text token."""
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no eos_token to put between documents; set tokenizer.eos_token")
    size = ids_of(tokenizer)
    return TokenizerFacts(
        tokenizer_hash(tokenizer),
        size,
        tokenizer.eos_token_id,
        "<u2" if size <= 1 << 16 else "<u4",
        tokenizer.backend_tokenizer.to_str(),
    )


def sample(config: PrepareConfig, sources: Sequence[TextSource]) -> Iterator[str]:
    """About ``sample_bytes`` of training text: an equal share from the beginning of each file.

    The files come in the order of a hash of their names.
    """
    files = [replace(source, items=(item,)) for source in sources for item in source.items if source.kind == "files"]
    whole = [source for source in sources if source.kind != "files"]
    parts = sorted(files, key=lambda part: hash_of_name(part.items[0].name)) + whole
    share, left = max(_MIN_FILE_BYTES, config.sample_bytes // len(parts)), config.sample_bytes
    for part in parts:
        quota = min(share if part in files else max(share, left), left)
        pieces = read_pieces([part], field=config.field, share=config.validation, skip_invalid=config.skip_invalid)
        for text in _bounded((piece.text for piece in pieces if piece.split == "train"), quota):
            left -= len(text)
            yield text
        if left <= 0:
            return


def _bounded(texts: Iterator[str], limit: int) -> Iterator[str]:
    for text in texts:
        yield text[:limit]
        limit -= len(text)
        if limit <= 0:
            return
