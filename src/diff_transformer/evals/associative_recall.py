"""Validation loss and its two slices (Table 6): AR-Hit, where recalling the context helps, and Others.

A token is an AR-Hit if it ends an n-gram that occurred earlier in the same context and that is not frequent in the
training set; the frequent ones a model can know by heart.
"""

import numpy as np
import torch
from torch import Tensor

from diff_transformer.checks import require_positive
from diff_transformer.data.ngrams import ar_hits, frequent_ngrams
from diff_transformer.evals.lm import LanguageModel
from diff_transformer.evals.provenance import provenance
from diff_transformer.evals.types import Result


def evaluate_associative_recall(
    lm: LanguageModel, ids: Tensor, training_tokens: np.ndarray, *, vocab_size: int, n: int = 2, frequent_share: float
) -> Result:
    """Mean negative log-likelihood in nats a token over ``ids [rows, T]``: all, AR-Hit, Others.

    Args:
        training_tokens: the training text, int [N], in which n-grams are counted.
        frequent_share: an n-gram that makes up a larger share of the training text is no AR-Hit.
    """
    require_positive(n=n, vocab_size=vocab_size, frequent_share=frequent_share)
    threshold = round(frequent_share * len(training_tokens))
    frequent = frequent_ngrams(training_tokens, n, threshold=threshold, vocab_size=vocab_size)
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
