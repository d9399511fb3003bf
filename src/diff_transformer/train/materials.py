"""From a run's configuration to what the loop consumes: tokenizer, mixture of rows, held-out rows, model."""

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from diff_transformer.data.corpus import load_corpus
from diff_transformer.data.documents import Corpus
from diff_transformer.data.filler import Filler
from diff_transformer.data.mixture import Batch, Mixture, Source
from diff_transformer.data.needle_source import NeedleSource
from diff_transformer.data.needles import needle_texts
from diff_transformer.data.packing import PackedCorpus
from diff_transformer.data.recall import RecallSource
from diff_transformer.data.tokenizer import load_tokenizer, train_tokenizer
from diff_transformer.train.config import DataConfig, RunConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SOURCES = ("text", "needles", "recall")
_TOKENIZER_BYTES = 5_000_000
_TOKENIZER_NEEDLES = 20_000


@dataclass(frozen=True)
class Materials:
    """``validation``: held-out rows of the corpus, int64 [rows, length]."""

    corpus: Corpus
    tokenizer: "PreTrainedTokenizerFast"
    packed: PackedCorpus
    mixture: Mixture
    validation: Tensor


def load_materials(config: RunConfig) -> Materials:
    """Everything that training reads. The same configuration gives the same materials on every machine with the same
    corpus.

    Raises:
        ValueError, FileNotFoundError: for a corpus, tokenizer or mixture that cannot be had.
    """
    data, seed = config.data, config.train.seed
    unknown = sorted(set(data.mixture) - set(SOURCES))
    if unknown:
        raise ValueError(f"data.mixture names {', '.join(unknown)}; the sources are {', '.join(SOURCES)}")
    weights = mixture_shares(config)
    corpus = load_corpus(data.corpus, max_bytes=data.max_bytes)
    tokenizer = make_tokenizer(data, corpus, config.model["vocab_size"])
    packed = PackedCorpus.from_documents(corpus.train, tokenizer, data.length, seed=seed)
    held_out = PackedCorpus.from_documents(corpus.validation, tokenizer, data.length, shuffle=False)
    sources: dict[str, Source] = {"text": packed}
    if "needles" in weights:
        sources["needles"] = NeedleSource(
            Filler(corpus.train),
            tokenizer,
            length=data.length,
            seed=seed,
            needles=data.needles.counts,
            queries=data.needles.queries,
            digits=data.needles.digits,
            questions_per_document=data.needles.questions,
            answer_loss_only=data.loss == "sources",
        )
    if "recall" in weights:
        recall = data.recall
        sources["recall"] = RecallSource(
            tokenizer, length=data.length, pairs=recall.pairs, seed=seed, num_symbols=recall.symbols
        )
    mixture = Mixture({name: sources[name] for name in weights}, weights, config.train.batch_size, seed)
    rows = min(config.train.validation_rows, held_out.num_windows)
    return Materials(corpus, tokenizer, packed, mixture, spread_rows(held_out, rows))


def mixture_shares(config: RunConfig) -> dict[str, float]:
    """The sources that are used, with their weights, in the order of the batch's source numbers."""
    return {name: share for name, share in config.data.mixture.items() if share > 0}


def loss_weights(batch: Batch, shares: dict[str, float], loss: str) -> np.ndarray:
    """Weight of each predicted token in the loss of a step: float32 [B, T - 1], 0 where there is no label, sum 1.

    Args:
        shares: weight of each source, in the order of the batch's source numbers.
        loss: ``data.loss`` of the configuration.
    """
    counted = batch["labels"][:, 1:] != -100
    if loss == "tokens":
        return (counted / counted.sum()).astype(np.float32)
    total, weights = sum(shares.values()), np.zeros(counted.shape, np.float32)
    for number, share in enumerate(shares.values()):
        mine = counted & (batch["source"] == number)[:, None]
        weights[mine] = share / total / max(1, mine.sum())
    return weights


def model_inputs(ids: Tensor, documents: str, end: int) -> dict:
    """What the model is called with for rows ``ids [B, T]``, by ``data.documents`` of the configuration."""
    if documents == "joined":
        return {"input_ids": ids}
    from diff_transformer.model.documents import split_documents

    split = split_documents(ids, end)
    return {"input_ids": ids, "cu_seq_lens_q": split.cu_seqlens, "max_length_q": split.longest}


def without_first_tokens(labels: np.ndarray, ids: np.ndarray, end: int) -> np.ndarray:
    """Labels [B, T] with -100 for the first token of each document, which nothing of its own document predicts."""
    labels = labels.copy()
    labels[:, 1:][ids[:, :-1] == end] = -100
    return labels


def spread_rows(packed: PackedCorpus, count: int) -> Tensor:
    """``count`` windows spread evenly over a corpus, int64 [count, length]."""
    indices = [packed.num_windows * i // count for i in range(count)]
    return torch.cat([torch.from_numpy(packed.rows(index, 1)[0]) for index in indices])


def make_tokenizer(data: DataConfig, corpus: Corpus, vocab_size: int):
    """The tokenizer that ``data.tokenizer`` asks for; "bpe" is trained on the corpus and, where they are part of the
    mixture, on needle sentences.

    Raises:
        ValueError: if it has more tokens than the model's vocabulary.
    """
    if data.tokenizer == "bpe":
        size, texts = 0, []
        for document in corpus.train:
            texts.append(document.text)
            size += document.num_bytes
            if size > _TOKENIZER_BYTES:
                break
        needles = needle_texts(_TOKENIZER_NEEDLES) if data.mixture.get("needles") else ()
        return train_tokenizer(chain(texts, needles), vocab_size)
    tokenizer = load_tokenizer(data.tokenizer)
    if len(tokenizer) > vocab_size:
        raise ValueError(
            f"the tokenizer {data.tokenizer!r} has {len(tokenizer)} tokens, model.vocab_size is {vocab_size}; "
            f"set model.vocab_size to at least {len(tokenizer)}"
        )
    return tokenizer


def build_model(config: RunConfig, tokenizer):
    """The model of a run, initialised from ``train.seed``.

    Every parameter that a DIFF Transformer shares with its matched Transformer starts with the same values in both:
    they are drawn, in the baseline's order, before lambda and the head norm.
    """
    from diff_transformer.model.config import DiffTransformerConfig, matched_baseline
    from diff_transformer.model.modeling import DiffTransformerForCausalLM

    special = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    settings = DiffTransformerConfig(**{**special, **config.model})
    if settings.max_position_embeddings < config.data.length:
        raise ValueError(
            f"data.length is {config.data.length}, more than model.max_position_embeddings "
            f"{settings.max_position_embeddings}; raise the latter"
        )
    torch.manual_seed(config.train.seed)
    baseline = DiffTransformerForCausalLM(matched_baseline(settings))
    if settings.attention == "softmax":
        return baseline
    model = DiffTransformerForCausalLM(settings)
    model.load_state_dict(baseline.state_dict(), strict=False)
    return model
