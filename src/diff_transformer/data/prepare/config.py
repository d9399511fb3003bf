"""What determines a prepared folder, to the byte."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from diff_transformer.checks import require_positive

DEFAULT_VOCAB_SIZE = 32_768
DEFAULT_SHARE = 0.01


@dataclass(frozen=True)
class PrepareConfig:
    """Settings of ``prepare``.

    Attributes:
        sources: texts to read, in this order (:func:`~diff_transformer.data.prepare.sources.find_sources`).
        tokenizer: "bpe" (byte-level, trained on a sample of the sources), "bytes", "cl100k", a file of tiktoken ranks
            (.tiktoken), a folder written by ``save_pretrained``, or a name on the Hugging Face hub.
        vocab_size: tokens of "bpe", special ones included.
        sample_bytes: text that "bpe" is trained on, an equal share from the beginning of each file.
        field: field of JSON lines, column of parquet, that holds the text.
        validation: share of the documents that is held out, by a hash.
        shard_bytes: text of a shard, in bytes of UTF-8.
        skip_invalid: count and leave out rows that hold no text, instead of stopping.
    """

    sources: tuple[str, ...]
    tokenizer: str = "bpe"
    vocab_size: int = DEFAULT_VOCAB_SIZE
    sample_bytes: int = 10_000_000
    field: str = "text"
    validation: float = DEFAULT_SHARE
    shard_bytes: int = 32_000_000
    skip_invalid: bool = False

    def validate(self) -> "PrepareConfig":
        require_positive(vocab_size=self.vocab_size, sample_bytes=self.sample_bytes, shard_bytes=self.shard_bytes)
        if not 0 < self.validation < 1:
            raise ValueError(f"validation is {self.validation}; give a share between 0 and 1, such as {DEFAULT_SHARE}")
        return self

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "sources": list(self.sources)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "PrepareConfig":
        rest = {key: value for key, value in values.items() if key != "sources"}
        return cls(tuple(values["sources"]), **rest)
