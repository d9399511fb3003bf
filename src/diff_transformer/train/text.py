"""The text that a run trains on: a corpus that is tokenised in memory, or prepared folders that stay on the disk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from diff_transformer.data.cache import cached, fingerprint
from diff_transformer.data.corpus import load_corpus
from diff_transformer.data.documents import Corpus, Document
from diff_transformer.data.mixture import RowSource, WeightedCorpora, apportion
from diff_transformer.data.packing import PackedCorpus, pack_documents
from diff_transformer.data.tokenizer import ids_in_rows, tokenizer_hash
from diff_transformer.data.tokens import (
    LongDocuments,
    PreparedCorpus,
    Shards,
    decoded_corpus,
    is_prepared,
    load_prepared_tokenizer,
    read_plan,
)
from diff_transformer.errors import UserError
from diff_transformer.train.data_config import DataConfig
from diff_transformer.train.ranks import is_first

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_TOKENS_COUNTED = 20_000_000


@dataclass(frozen=True)
class Text:
    """The text of a run, as documents and as rows of tokens."""

    corpus: Corpus  # documents; of prepared folders the first ones
    tokenizer: PreTrainedTokenizerFast
    source: RowSource  # rows to train on
    parts: dict[str, PackedCorpus]  # training rows by corpus
    held_out: dict[str, PackedCorpus]  # held-out rows by corpus
    weights: dict[str, float]  # by corpus

    def validation_rows(self, count: int) -> np.ndarray:
        """At most ``count`` held-out rows, spread evenly over each corpus: int64 [rows, length]."""
        shares = apportion(self.weights, count)
        return np.concatenate([packed.spread(shares[name]) for name, packed in self.held_out.items() if shares[name]])

    def tokens(self, limit: int = _TOKENS_COUNTED) -> np.ndarray:
        """Training tokens [N] to count n-grams in.

        All tokens of a corpus in memory; of prepared folders the first ``limit``, apportioned by weight.
        """
        if all(isinstance(packed.tokens, np.ndarray) for packed in self.parts.values()):
            return np.concatenate([np.asarray(packed.tokens) for packed in self.parts.values()])
        shares = apportion(self.weights, limit)
        return np.concatenate([packed.tokens[: shares[name]] for name, packed in self.parts.items()])


def load_text(data: DataConfig, seed: int, make_tokenizer: Callable[[Corpus], PreTrainedTokenizerFast]) -> Text:
    """The text that ``data.corpus`` or ``data.corpora`` names.

    Args:
        seed: of the order of the rows.
        make_tokenizer: called with a corpus in memory; prepared folders have their own tokenizer.

    Raises:
        UserError: for text or a tokenizer that cannot be loaded, or folders and settings that do not fit together.
    """
    folders = data.corpora or ({data.corpus: 1.0} if is_prepared(data.corpus) else {})
    if folders:
        return _prepared(data, folders, seed)
    if data.upsample_length:
        raise UserError(
            f"data.upsample_length needs a prepared folder, and data.corpus is {data.corpus!r}; make one with "
            f"`diff-transformer prepare {data.corpus} --out FOLDER`"
        )
    corpus = load_corpus(data.corpus, max_bytes=data.max_bytes)
    tokenizer = make_tokenizer(corpus)
    packed = PackedCorpus(_tokens(corpus.train, tokenizer), data.length, seed=seed)
    held_out = PackedCorpus(_tokens(corpus.validation, tokenizer), data.length, shuffle=False)
    name = data.corpus
    return Text(corpus, tokenizer, packed, {name: packed}, {name: held_out}, {name: 1.0})


def prepared_vocabulary(data: DataConfig) -> int | None:
    """The vocabulary of the prepared folders that ``data`` names, or None if it names none."""
    folders = [folder for folder in (*data.corpora, data.corpus) if is_prepared(folder)]
    return ids_in_rows(load_prepared_tokenizer(folders[0])) if folders else None


def _tokens(documents: list[Document], tokenizer: PreTrainedTokenizerFast) -> np.ndarray:
    texts = (document.text for document in documents)
    key = fingerprint(texts, "tokens", tokenizer_hash(tokenizer), tokenizer.eos_token_id)
    return cached(key, lambda: pack_documents(documents, tokenizer))


def _prepared(data: DataConfig, folders: dict[str, float], seed: int) -> Text:
    tokenizers = [read_plan(name)["tokenizer"] for name in folders]
    if different := [name for name, about in zip(folders, tokenizers, strict=True) if about != tokenizers[0]]:
        first, *_ = folders
        raise UserError(
            f"{different[0]} was prepared with another tokenizer than {first}; prepare all with one, say "
            f"`--tokenizer {first}/tokenizer`"
        )
    parts: dict[str, PackedCorpus] = {}
    held_out: dict[str, PackedCorpus] = {}
    documents: tuple[list[Document], list[Document]] = ([], [])
    for name in folders:
        shards, validation = (Shards(name, side, check=is_first()) for side in ("train", "validation"))
        if len(validation) < data.length:
            raise UserError(
                f"the validation side of {name} has {len(validation)} tokens, less than one row of {data.length}; "
                "prepare with a larger --validation, or set a smaller data.length"
            )
        held_out[name] = PackedCorpus(validation, data.length, shuffle=False)
        if data.upsample_length:
            parts[name] = LongDocuments(
                shards, data.length, threshold=data.upsample_length, factor=data.upsample_factor, seed=seed
            )
        else:
            parts[name] = PreparedCorpus(shards, data.length, seed=seed)
        decoded = decoded_corpus(name)
        documents[0].extend(decoded.train)
        documents[1].extend(decoded.validation)
    source = next(iter(parts.values())) if len(parts) == 1 else WeightedCorpora(parts, folders, seed)
    corpus = Corpus(", ".join(folders), *documents, "as prepared")
    return Text(corpus, load_prepared_tokenizer(next(iter(folders))), source, parts, held_out, dict(folders))
