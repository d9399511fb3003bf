"""From a run's configuration to the rows that it trains on: tokenizer, mixture of sources, batches prepared ahead."""

import hashlib
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from diff_transformer.data.cache import cached, fingerprint
from diff_transformer.data.corpus import load_corpus
from diff_transformer.data.documents import Corpus, Document
from diff_transformer.data.filler import Filler
from diff_transformer.data.kv_recall_task import (
    RecallSource,
    RecallTask,
    answer_labels,
    make_recall_batch,
    recall_vocabulary,
)
from diff_transformer.data.mixture import Mixture
from diff_transformer.data.needle_source import NeedleSource
from diff_transformer.data.needles import needle_texts
from diff_transformer.data.packing import PackedCorpus, pack_documents
from diff_transformer.data.seeding import evaluation_rng
from diff_transformer.data.sources import SPLITS
from diff_transformer.data.tokenizer import ids_in_rows, load_tokenizer, tokenizer_hash, tokenizer_of, train_tokenizer
from diff_transformer.data.tokens import Shards, decoded_corpus, is_prepared, load_prepared_tokenizer
from diff_transformer.errors import UserError
from diff_transformer.train.config import NO_CORPUS, DataConfig, RunConfig
from diff_transformer.train.plan import vocabulary_size

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_TOKENIZER_BYTES = 5_000_000  # of the corpus, to train the tokenizer on
_TOKENIZER_NEEDLES = 20_000
_TOKENS_COUNTED = 20_000_000
_AHEAD = 2  # batches


@dataclass(frozen=True)
class TrainingData:
    """Everything that training reads."""

    corpus: Corpus  # documents; of a prepared folder the first ones
    tokenizer: "PreTrainedTokenizerFast"
    text: PackedCorpus | None  # rows of text, and its tokens; None for the corpus "none"
    mixture: Mixture
    validation: Tensor  # held-out rows of text, or of recall if there is no text, int64 [rows, length]
    validation_labels: Tensor  # their labels: every token of text, the answers of recall
    # held-out rows of needles and recall, if the mixture has them, and their labels: those of the answers
    questions: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def first_rows(self) -> Tensor:
        """The rows of the first batch, int64 ``[batch, length]``."""
        return torch.from_numpy(self.mixture.batch(0)["input_ids"])

    def counted_tokens(self) -> np.ndarray:
        """Training tokens of text [N] to count n-grams in: the first 20 million."""
        assert self.text is not None
        return np.asarray(self.text.tokens[:_TOKENS_COUNTED])

    def digest(self) -> str:
        """A digest of the first batch and of the held-out rows: another text or tokenizer gives another one."""
        arrays = [self.mixture.batch(0)["input_ids"], self.validation.numpy()]
        arrays += [ids.numpy() for ids, _ in self.questions.values()]
        return hashlib.blake2b(b"".join(array.tobytes() for array in arrays), digest_size=8).hexdigest()


class Rows(NamedTuple):
    """This process's rows of a batch."""

    ids: Tensor  # int64 [b, T]
    labels: Tensor  # int64 [b, T], -100 for none
    source: Tensor  # int64 [b], index of each row's source in the mixture


@dataclass(frozen=True)
class BatchPart:
    """This process's part of each batch: part ``rank`` of ``size``. Tensor parallel processes have the same rows."""

    rank: int = 0
    size: int = 1

    def of(self, rows):
        """This process's rows of an array or tensor [rows, ...]; ``size`` divides the number of rows."""
        each = len(rows) // self.size
        return rows[self.rank * each : (self.rank + 1) * each]


def load_training_data(config: RunConfig) -> TrainingData:
    """The data of a run: the same on every machine that has the same corpus.

    Raises:
        UserError: for a corpus or tokenizer that cannot be loaded, or that does not fit the model or the mixture.
    """
    data, seed = config.data, config.train.seed
    shares, vocab_size, rows = data.shares, vocabulary_size(config), config.train.validation_rows
    text, held_text, corpus, sources, questions = None, None, Corpus([], []), {}, {}
    if data.corpus != NO_CORPUS:
        corpus, tokenizer, text, held_text = load_text(data, seed, vocab_size)
        sources["text"] = text
    elif [*shares] == ["recall"] and data.tokenizer != "bpe":
        tokenizer = make_tokenizer(data, corpus, vocab_size)
    else:
        raise UserError(
            f"data.corpus is {NO_CORPUS!r}, and data.mixture {data.mixture} or data.tokenizer {data.tokenizer!r} "
            'needs text; give a corpus, or data.mixture={"recall": 1.0} and data.tokenizer=bytes'
        )
    size = ids_in_rows(tokenizer)
    if size > vocab_size:
        raise UserError(
            f"texts in the tokenizer of this run have ids up to {size - 1}, model.vocab_size is {vocab_size}; set "
            f"model.vocab_size to at least {size}, or give the tokenizer of train.initial_model"
        )
    if "needles" in shares:
        filler = Filler(corpus.train)
        sources["needles"] = _needle_source(config, filler, tokenizer)
        questions["needles"] = _needle_source(config, filler, tokenizer, held_out=True).rows(0, rows)
    if "recall" in shares:
        sources["recall"] = source = recall_source(config, tokenizer)
        rng = evaluation_rng(config.evaluation.seed, "recall", "validation")
        drawn = make_recall_batch(rng, source.vocabulary, source.task, rows)
        questions["recall"] = drawn.ids, answer_labels(drawn.ids, drawn.answers)
    mixture = Mixture({name: sources[name] for name in shares}, shares, config.train.batch_size, seed)
    held_out = {name: (torch.from_numpy(ids), torch.from_numpy(labels)) for name, (ids, labels) in questions.items()}
    if held_text is not None:
        validation = labels = torch.from_numpy(held_text.spread(rows))
    else:
        validation, labels = held_out["recall"]  # recall is the only source
    return TrainingData(corpus, tokenizer, text, mixture, validation, labels, held_out)


def load_text(
    data: DataConfig, seed: int, vocab_size: int
) -> tuple[Corpus, "PreTrainedTokenizerFast", PackedCorpus, PackedCorpus]:
    """Corpus, tokenizer, rows to train on and held-out rows of ``data.corpus``.

    Text is tokenised in memory; a prepared folder stays on the disk.

    Raises:
        UserError: for text or a tokenizer that cannot be loaded.
    """
    name, length = data.corpus, data.length
    if not is_prepared(name):
        corpus = load_corpus(name, max_bytes=data.max_bytes)
        tokenizer = make_tokenizer(data, corpus, vocab_size)
        train, validation = (_tokens(side, tokenizer) for side in (corpus.train, corpus.validation))
    else:
        corpus, tokenizer = decoded_corpus(name), load_prepared_tokenizer(name)
        train, validation = (Shards(name, side) for side in SPLITS)
    rows = PackedCorpus(train, length, seed=seed)
    held_out = PackedCorpus(validation, length, shuffle=False, name="the held-out side of the corpus")
    return corpus, tokenizer, rows, held_out


def _tokens(documents: list[Document], tokenizer: "PreTrainedTokenizerFast") -> np.ndarray:
    texts = (document.text for document in documents)
    key = fingerprint(texts, "tokens", tokenizer_hash(tokenizer), tokenizer.eos_token_id)
    return cached(key, lambda: pack_documents(documents, tokenizer))


def _needle_source(config: RunConfig, filler: Filler, tokenizer, *, held_out: bool = False) -> NeedleSource:
    data = config.data
    return NeedleSource(
        filler,
        tokenizer,
        length=data.length,
        seed=config.evaluation.seed if held_out else config.train.seed,
        needles=data.needles.counts,
        queries=data.needles.queries,
        digits=data.needles.digits,
        questions_per_document=data.needles.questions,
        answer_loss_only=held_out or data.loss == "sources",
        held_out=held_out,
    )


def recall_source(config: RunConfig, tokenizer: "PreTrainedTokenizerFast") -> RecallSource:
    """The rows of recall that a run of ``config`` trains on."""
    recall = config.data.recall
    vocabulary = recall_vocabulary(tokenizer, recall.symbols, recall.noise_symbols)
    task = RecallTask(config.data.length, recall.pairs, recall.questions, recall.distractors)
    return RecallSource(vocabulary, task, config.train.seed)


def make_tokenizer(data: DataConfig, corpus: Corpus, vocab_size: int) -> "PreTrainedTokenizerFast":
    """The tokenizer that ``data.tokenizer`` asks for.

    "bpe" is trained on the corpus and, if the mixture has needles, on needle sentences.
    """
    if data.tokenizer != "bpe":
        return load_tokenizer(data.tokenizer)
    size, texts = 0, []
    for document in corpus.train:
        texts.append(document.text[:_TOKENIZER_BYTES])
        size += document.num_bytes
        if size > _TOKENIZER_BYTES:
            break
    needles, first = (), None
    if "needles" in data.shares:
        needles, first = needle_texts(_TOKENIZER_NEEDLES), next(needle_texts(1))  # which stands for their wording

    def trained() -> np.ndarray:
        state = train_tokenizer(chain(texts, needles), vocab_size).backend_tokenizer.to_str()
        return np.frombuffer(state.encode(), np.uint8)

    state = cached(fingerprint(texts, "tokenizer", vocab_size, first), trained)
    return tokenizer_of(state.tobytes().decode())


def make_rows(data: TrainingData, config: RunConfig, part: BatchPart, step: int) -> Rows:
    """This process's part of the batch of ``step``: a pure function of its arguments. Pinned if there is a GPU."""
    batch, eos_id = data.mixture.batch(step, part.rank, part.size), data.tokenizer.eos_token_id
    if config.data.documents == "separate":
        batch["labels"] = without_first_tokens(batch["labels"], batch["input_ids"], eos_id)
    rows = Rows(*(torch.from_numpy(batch[name]) for name in ("input_ids", "labels", "source")))
    return Rows(*(tensor.pin_memory() for tensor in rows)) if torch.cuda.is_available() else rows


def without_first_tokens(labels: np.ndarray, ids: np.ndarray, eos_id: int) -> np.ndarray:
    """Labels [B, T] with -100 for the first token of each document, which no token of that document predicts."""
    labels = labels.copy()
    labels[:, 1:][ids[:, :-1] == eos_id] = -100
    return labels


def model_inputs(ids: Tensor, documents: str, eos_id: int) -> dict:
    """The keyword arguments of the model for rows ``ids [B, T]``, by ``data.documents`` of the configuration."""
    if documents == "joined":
        return {"input_ids": ids}
    from diff_transformer.model.inputs import split_documents

    split = split_documents(ids, eos_id)
    return {"input_ids": ids, "cu_seq_lens_q": split.cu_seqlens, "max_length_q": split.longest}


T = TypeVar("T")


@contextmanager
def prefetched(prepare: Callable[[int], T], first: int, last: int) -> Generator[Iterator[T]]:
    """Iterate over ``prepare(first), ..., prepare(last - 1)``, made up to two steps early in a thread.

    ``prepare`` must depend on the step alone, so that running ahead changes no batch. An exception of ``prepare`` is
    raised where its batch is asked for. Leaving the context ends the thread.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="prefetch") as thread:
        ready = deque(thread.submit(prepare, step) for step in range(first, min(first + _AHEAD, last)))

        def batches() -> Iterator[T]:
            for step in range(first + _AHEAD, last + _AHEAD):
                batch = ready.popleft().result()
                if step < last:
                    ready.append(thread.submit(prepare, step))
                yield batch

        try:
            yield batches()
        finally:
            thread.shutdown(cancel_futures=True)
