"""From a run's configuration to what the loop consumes: tokenizer, mixture of rows, held-out rows, model."""

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from diff_transformer.data.cache import fingerprint, kept_text
from diff_transformer.data.documents import Corpus
from diff_transformer.data.filler import Filler
from diff_transformer.data.mixture import Mixture, Source
from diff_transformer.data.needle_source import NeedleSource
from diff_transformer.data.needles import needle_texts
from diff_transformer.data.packing import PackedCorpus
from diff_transformer.data.recall import RecallSource
from diff_transformer.data.tokenizer import load_tokenizer, tokenizer_of, train_tokenizer
from diff_transformer.train.config import DataConfig, RunConfig, checked_model
from diff_transformer.train.draws import Start
from diff_transformer.train.initial import load_initial_model, model_folder, vocabulary_size
from diff_transformer.train.text import Text, load_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SOURCES = ("text", "needles", "recall")
_TOKENIZER_BYTES = 5_000_000
_TOKENIZER_NEEDLES = 20_000


@dataclass(frozen=True)
class Materials:
    """``corpus``: documents, of prepared folders the first ones; ``text``: what the rows of text come from;
    ``validation``: held-out rows of it, int64 [rows, length]."""

    corpus: Corpus
    tokenizer: "PreTrainedTokenizerFast"
    text: Text
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
    vocab_size = vocabulary_size(config)
    text = load_text(data, seed, lambda corpus: make_tokenizer(data, corpus, vocab_size), vocab_size)
    corpus, tokenizer = text.corpus, text.tokenizer
    sources: dict[str, Source] = {"text": text.source}
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
    validation = torch.from_numpy(text.validation_rows(config.train.validation_rows))
    return Materials(corpus, tokenizer, text, mixture, validation)


def mixture_shares(config: RunConfig) -> dict[str, float]:
    """The sources that are used, with their weights, in the order of the batch's source numbers."""
    return {name: share for name, share in config.data.mixture.items() if share > 0}


def model_inputs(ids: Tensor, documents: str, end: int) -> dict:
    """What the model is called with for rows ``ids [B, T]``, by ``data.documents`` of the configuration."""
    if documents == "joined":
        return {"input_ids": ids}
    from diff_transformer.model.inputs import split_documents

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
        key = fingerprint(texts, "tokenizer", vocab_size, bool(needles))
        state = kept_text(key, lambda: train_tokenizer(chain(texts, needles), vocab_size).backend_tokenizer.to_str())
        return tokenizer_of(state)
    tokenizer = load_tokenizer(data.tokenizer)
    if len(tokenizer) > vocab_size:
        raise ValueError(
            f"the tokenizer {data.tokenizer!r} has {len(tokenizer)} tokens, model.vocab_size is {vocab_size}; "
            f"set model.vocab_size to at least {len(tokenizer)}"
        )
    return tokenizer


def check_model(config: RunConfig) -> None:
    """Check that the model of a run, and its matched Transformer, can be made; takes no memory for weights.

    Raises:
        ValueError: for fields that do not exist, are of another kind or do not fit together, or another library's model
            in ``train.initial_model``.
        FileNotFoundError: if there is no model in it.
    """
    from diff_transformer.model.config import DiffTransformerConfig, matched_baseline
    from diff_transformer.model.modeling import DiffTransformerForCausalLM

    checked_model(config.model)
    vocabulary_size(config)
    if config.train.initial_model is not None:
        model_folder(config)
        return
    settings = DiffTransformerConfig(**config.model)
    _check_length(settings, config)
    with torch.device("meta"):
        for each in (settings, matched_baseline(settings)):
            DiffTransformerForCausalLM(each)


def _check_length(settings, config: RunConfig) -> None:
    if settings.max_position_embeddings < config.data.length:
        raise ValueError(
            f"data.length is {config.data.length}, more than model.max_position_embeddings "
            f"{settings.max_position_embeddings}; raise the latter"
        )


def build_model(config: RunConfig, tokenizer):
    """The model of a run, initialised from ``train.seed``, or ``train.initial_model`` where there is one.

    Every parameter that a DIFF Transformer (or a relative) shares with its matched Transformer, by name and shape,
    starts with the same values in both: they are drawn, in the baseline's order, before all others. Only one of the two
    is in memory at a time.
    """
    from diff_transformer.model.config import DiffTransformerConfig, matched_baseline
    from diff_transformer.model.modeling import DiffTransformerForCausalLM

    initial = None if config.train.initial_model is None else load_initial_model(config, tokenizer)
    special = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    settings = DiffTransformerConfig(**{**special, **config.model}) if initial is None else initial.config
    _check_length(settings, config)
    if initial is not None:
        return initial
    torch.manual_seed(config.train.seed)
    if settings.attention == "softmax":  # with or without a head norm, whose weights are not drawn
        return DiffTransformerForCausalLM(settings)
    start = Start(lambda: DiffTransformerForCausalLM(matched_baseline(settings)))
    model = DiffTransformerForCausalLM(settings)
    start.give(model)
    return model
