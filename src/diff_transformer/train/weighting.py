"""What each predicted token weighs in the loss of a step."""

import torch
from torch import Tensor

from diff_transformer.train.cross_entropy import IGNORED


def predicted(labels: Tensor) -> Tensor:
    """Which of the tokens 1 to T - 1 of each row are predicted: bool [B, T - 1] for labels [B, T]."""
    return labels[:, 1:] != IGNORED


def count_by_source(labels: Tensor, source: Tensor, sources: int) -> Tensor:
    """Predicted tokens of each source, fp32 [sources] (exact up to 2^24), for rows of ``source`` int64 [B]."""
    counts = torch.zeros(sources, device=labels.device)
    return counts.index_add_(0, source, predicted(labels).sum(1).to(counts))


def token_weights(labels: Tensor, source: Tensor, counts: Tensor, shares: list[float], loss: str) -> Tensor:
    """Weight of each predicted token, fp32 [B, T - 1], 0 where there is no label; over the whole batch the sum is 1.

    Args:
        labels, source: int64 [B, T] and [B], of the whole batch or of a process's part of it.
        counts: predicted tokens of each source [sources] in the whole batch.
        shares: weight of each source in the mixture.
        loss: ``data.loss``: "tokens" weighs all tokens alike; "sources" gives each source its share.
    """
    if loss == "tokens":
        each = (1 / counts.sum()).expand_as(counts)
    else:
        each = torch.tensor(shares, device=counts.device) / sum(shares) / counts.clamp(min=1)
    return predicted(labels) * each[source][:, None]
