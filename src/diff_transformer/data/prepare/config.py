"""The settings of a prepared folder, which determine it to the byte, and its tokenizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from diff_transformer.checks import require_positive
from diff_transformer.data.documents import hash_of_name
from diff_transformer.data.prepare.readers import read_pieces
from diff_transformer.data.prepare.sources import TextSource
from diff_transformer.data.tokenizer import load_tokenizer, tokenizer_hash, train_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

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

    def validate(self) -> PrepareConfig:
        require_positive(vocab_size=self.vocab_size, sample_bytes=self.sample_bytes, shard_bytes=self.shard_bytes)
        if not 0 < self.validation < 1:
            raise ValueError(f"validation is {self.validation}; give a share between 0 and 1, such as {DEFAULT_SHARE}")
        return self

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "sources": list(self.sources)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> PrepareConfig:
        rest = {key: value for key, value in values.items() if key != "sources"}
        return cls(tuple(values["sources"]), **rest)


_LEAST_OF_A_FILE = 65_536


@dataclass(frozen=True)
class TokenizerFacts:
    """What the shards depend on. ``size``: one more than the largest id; ``dtype``: of the tokens, as NumPy writes it;
    ``state``: the tokenizer as JSON."""

    hash: str
    size: int
    end_of_text: int
    dtype: str
    state: str


def choose_tokenizer(config: PrepareConfig, sources: Sequence[TextSource]) -> PreTrainedTokenizerFast:
    """The tokenizer that ``config`` asks for; "bpe" is trained on the training side of a sample of the sources.

    Raises:
        ValueError: for one that cannot be had, or for a sample without text.
    """
    if config.tokenizer != "bpe":
        return load_tokenizer(config.tokenizer)
    return train_tokenizer(sample(config, sources), config.vocab_size)


def facts_of(tokenizer: PreTrainedTokenizerFast) -> TokenizerFacts:
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no eos_token to put between documents; set tokenizer.eos_token")
    size = max(tokenizer.get_vocab().values()) + 1
    return TokenizerFacts(
        tokenizer_hash(tokenizer),
        size,
        tokenizer.eos_token_id,
        "<u2" if size <= 1 << 16 else "<u4",
        tokenizer.backend_tokenizer.to_str(),
    )


def sample(config: PrepareConfig, sources: Sequence[TextSource]) -> Iterator[str]:
    """Training text, about ``sample_bytes`` of it: an equal share from the beginning of each file, in the order of a
    hash of their names."""
    files = [replace(source, items=(item,)) for source in sources for item in source.items if source.kind == "files"]
    whole = [source for source in sources if source.kind != "files"]
    parts = sorted(files, key=lambda part: hash_of_name(part.items[0].name)) + whole
    share, left = max(_LEAST_OF_A_FILE, config.sample_bytes // len(parts)), config.sample_bytes
    for part in parts:
        quota = min(share if part in files else max(share, left), left)
        pieces = read_pieces([part], field=config.field, share=config.validation, skip_invalid=config.skip_invalid)
        for text in _bounded((piece.text for piece in pieces if piece.side == "train"), quota):
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
