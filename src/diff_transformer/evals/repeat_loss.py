"""Validation loss and its two slices (Table 6): AR-Hit, where recalling the context helps, and Others.

    ... the keeper Hakim saw ... | and so Hakim| saw        the pair "Hakim saw" came before: "saw" is an AR-Hit
    ... it was ... | and it| was                            so did "it was", which is frequent everywhere: Others

A token is an AR-Hit if it ends an n-gram that occurred earlier in the same context and is not frequent in the training
set. A model can memorise the frequent ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from diff_transformer.data.corpus import load_corpus
from diff_transformer.data.documents import take_bytes
from diff_transformer.data.ngrams import ar_hits, frequent_ngrams
from diff_transformer.data.packing import pack_documents
from diff_transformer.evals.lm import CausalLM, check_length, first_of_text, rows_at_once, spread_rows
from diff_transformer.evals.samples import ALL, Samples
from diff_transformer.evals.types import Result
from diff_transformer.settings import PositiveFloat, PositiveInt


@dataclass(frozen=True)
class Settings:
    """Loss by slice."""

    # "python", a text file, JSON lines, parquet or a folder. Rows come from its held-out text, frequent n-grams from
    # its training text, which should be the model's training text or similar to it.
    corpus: str = "python"
    # Tokens in a row: the context in which an n-gram can have occurred.
    length: PositiveInt = 2048
    # Rows, at most, spread evenly over the held-out text.
    samples: PositiveInt = 256
    # n; the recalled token is the last of the n-gram.
    ngram: PositiveInt = 2
    # An n-gram with a larger share of the training text is no AR-Hit.
    frequent_share: PositiveFloat = 6e-5
    # Bytes of training text in which n-grams are counted: whole documents from its start.
    training_bytes: PositiveInt = 8_000_000


QUICK = {"length": 128, "samples": 64, "training_bytes": 1_000_000}


def run(lm: CausalLM, settings: Settings, samples: Samples) -> Result:
    """Loss by slice with ``settings``."""
    check_length(lm, settings.length, "a row")
    data = getattr(lm, "data", None)
    if data is not None:
        corpus, seen = data.corpus, data.counted_tokens()
    else:
        corpus = load_corpus(settings.corpus)
        seen = pack_documents(take_bytes(corpus.train, settings.training_bytes), lm.tokenizer)
    return evaluate_associative_recall(
        lm,
        spread_rows(corpus, lm.tokenizer, settings.length, settings.samples),
        seen,
        n=settings.ngram,
        frequent_share=settings.frequent_share,
        samples=samples,
    )


def evaluate_associative_recall(
    lm: CausalLM,
    ids: Tensor,
    training_tokens: np.ndarray,
    *,
    n: int = Settings.ngram,
    frequent_share: float,
    samples: Samples = ALL,
) -> Result:
    """Mean negative log-likelihood in nats a token over ``ids [rows, T]``: all, AR-Hit, Others. Tokens that the
    tokenizer puts in front of a text have no loss.

    Args:
        training_tokens: the training text, int [N], in which n-grams are counted.
        frequent_share: an n-gram with a larger share of the training text is no AR-Hit.

    Returns:
        A row for each row of text: ``loss``, and the sum and count of each slice. ``about`` has ``frequent_above``, the
        number of occurrences above which an n-gram is frequent.
    """
    vocab_size = 1 + max(int(tokens.max(initial=0)) for tokens in (training_tokens, ids.numpy()))
    threshold = round(frequent_share * len(training_tokens))
    frequent = frequent_ngrams(training_tokens, n, threshold=threshold, vocab_size=vocab_size)

    first = first_of_text(lm, ids)

    def score(batch: Sequence[int]) -> list[dict]:
        part = ids[list(batch)]  # [B, T]
        hits = torch.from_numpy(ar_hits(part.numpy(), frequent, n=n, vocab_size=vocab_size))[:, first:]
        losses = lm.token_losses(part)[:, first - 1 :].double()
        rows = []
        for row, loss, hit in zip(batch, losses, hits, strict=True):
            entry = {"example": row, "loss": loss.mean().item()}
            for name, where in (("ar_hit", hit), ("others", ~hit)):
                entry[f"{name}_sum"], entry[f"{name}_count"] = loss[where].sum().item(), int(where.sum())
            rows.append(entry)
        return rows

    batch_size = rows_at_once(lm, ids.shape[1])
    rows = samples.rows("rows", range(len(ids)), score, batch_size=batch_size)
    about = {"n": n, "frequent_above": threshold, "frequent_share": frequent_share, "frequent_ngrams": len(frequent)}
    return Result("associative_recall", rows, about | {"tokens": len(rows) * ids.shape[1], "length": ids.shape[1]})
