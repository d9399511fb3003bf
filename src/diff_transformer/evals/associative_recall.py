"""Validation loss and its two slices (Table 6): AR-Hit, where recalling the context helps, and Others.

A token is an AR-Hit if it ends an n-gram that occurred earlier in the same context and that is not frequent in the
training set; the frequent ones a model can know by heart.
"""

import numpy as np
import torch
from torch import Tensor

from diff_transformer.data.ngrams import ar_hits
from diff_transformer.evals.lm import LanguageModel
from diff_transformer.evals.provenance import provenance
from diff_transformer.evals.types import Result


def evaluate_associative_recall(
    lm: LanguageModel, ids: Tensor, frequent: np.ndarray, *, n: int, vocab_size: int, threshold: int
) -> Result:
    """Mean negative log-likelihood in nats a token over ``ids [rows, T]``: all, AR-Hit, Others.

    Args:
        frequent: keys of the n-grams that occur more than ``threshold`` times in the training set (``data.ngrams``).
    """
    hits = torch.from_numpy(ar_hits(ids.numpy(), frequent, n=n, vocab_size=vocab_size))[:, 1:]
    losses = lm.token_losses(ids).double()
    total = losses.mean().item()
    metrics = {"validation": total, "perplexity": float(np.exp(total)), "ar_hit_share": hits.double().mean().item()}
    for name, where in (("ar_hit", hits), ("others", ~hits)):
        if where.any():
            metrics[name] = losses[where].mean().item()
    rows = []
    for row, (loss, hit) in enumerate(zip(losses, hits, strict=True)):
        entry = {"row": row, "loss": loss.mean().item()}
        for name, where in (("ar_hit", hit), ("others", ~hit)):
            entry[f"{name}_sum"], entry[f"{name}_count"] = loss[where].sum().item(), int(where.sum())
        rows.append(entry)
    settings = {"n": n, "frequent_above": threshold, "tokens": ids.numel(), "length": ids.shape[1]}
    return Result("loss", lm.name, metrics, rows, provenance(**settings))
