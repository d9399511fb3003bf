"""What is minimised, as a module around the model: from rows of tokens to the weighted sum of their losses."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from diff_transformer.train.cross_entropy import IGNORED, weighted_cross_entropy


class Objective(nn.Module):
    """``sum_i weights[i] * loss[i]`` over the predicted tokens of a batch.

    It is what training calls, compiles, wraps and shards, so that hidden states become a loss inside the one forward
    in which a sharded output matrix is whole.

    Args:
        model: a causal language model of Hugging Face's form.
        chunk: tokens whose logits are held at a time (``train.loss_chunk``); 0 for all.
    """

    def __init__(self, model: nn.Module, chunk: int = 0):
        super().__init__()
        self.model: Any = model
        self.chunk = chunk

    def forward(self, inputs: dict, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of a batch, a scalar, and each row's sum of nats [B], without gradient.

        Args:
            inputs: what the model's forward takes.
            labels: int64 [B, T], -100 for none.
            weights: fp32 [B, T - 1], of the tokens that labels 1 to T - 1 name; or the same bits as int32, which no
                precision setting of Fabric's rounds on the way.
        """
        weights = weights.view(torch.float32) if weights.dtype == torch.int32 else weights
        hidden = self.model.base_model(**inputs, use_cache=False).last_hidden_state[:, :-1]  # [B, T - 1, D]
        loss, losses = self._losses(hidden.flatten(0, 1), labels[:, 1:].flatten(), weights.flatten())
        return loss, losses.detach().view(len(labels), -1).sum(1)

    def _losses(self, hidden: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """``hidden [N, D]``, ``targets [N]``, ``weights [N]`` -> the weighted sum, and each token's loss [N]."""
        output = self.model.get_output_embeddings()
        head, chunk = output.weight, self.chunk or None
        if isinstance(head, DTensor):  # the vocabulary is split over a group of processes
            part, mesh = head.to_local(), head.device_mesh
            split = {"group": mesh.get_group(), "first": mesh.get_local_rank() * len(part)}
            return weighted_cross_entropy(hidden, part, targets, weights, chunk=chunk, **split)
        if chunk:
            return weighted_cross_entropy(hidden, head, targets, weights, chunk=chunk)
        losses = F.cross_entropy(output(hidden).float(), targets, reduction="none", ignore_index=IGNORED)
        return (losses * weights).sum(), losses
