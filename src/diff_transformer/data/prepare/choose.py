"""The tokenizer that a preparation uses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from diff_transformer.data.documents import hash_of_name
from diff_transformer.data.prepare.config import PrepareConfig
from diff_transformer.data.prepare.readers import read_pieces
from diff_transformer.data.prepare.sources import Source
from diff_transformer.data.tokenizer import load_tokenizer, tokenizer_hash, train_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

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


def choose_tokenizer(config: PrepareConfig, sources: Sequence[Source]) -> PreTrainedTokenizerFast:
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


def sample(config: PrepareConfig, sources: Sequence[Source]) -> Iterator[str]:
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
