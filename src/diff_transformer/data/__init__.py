"""Text, tokens and synthetic tasks, as NumPy arrays that are pure functions of (seed, row)."""

from diff_transformer.data.corpus import load_corpus
from diff_transformer.data.documents import Corpus, Document
from diff_transformer.data.filler import Filler
from diff_transformer.data.kv_recall_task import RecallSource, RecallTask, make_recall_batch, recall_vocabulary
from diff_transformer.data.mixture import Batch, Mixture, RowSource
from diff_transformer.data.needle_source import NeedleSource
from diff_transformer.data.needles import NeedleExample, make_needle_example, needle_texts, parse_numbers
from diff_transformer.data.ngrams import ar_hits, frequent_ngrams
from diff_transformer.data.packing import PackedCorpus
from diff_transformer.data.seeding import evaluation_rng, training_rng
from diff_transformer.data.tokenizer import byte_tokenizer, load_tokenizer, train_tokenizer

__all__ = [
    "Batch",
    "Corpus",
    "Document",
    "Filler",
    "Mixture",
    "NeedleExample",
    "NeedleSource",
    "PackedCorpus",
    "RecallSource",
    "RecallTask",
    "RowSource",
    "ar_hits",
    "byte_tokenizer",
    "evaluation_rng",
    "frequent_ngrams",
    "load_corpus",
    "load_tokenizer",
    "make_needle_example",
    "make_recall_batch",
    "needle_texts",
    "parse_numbers",
    "recall_vocabulary",
    "train_tokenizer",
    "training_rng",
]
