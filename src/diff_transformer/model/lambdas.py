"""lambda, the weight of the second map; computed only in this file (section 2.1, equation 2)."""

import math

import torch
from torch import Tensor, nn

from diff_transformer.errors import UserError
from diff_transformer.model.layers import keeping_precision
from diff_transformer.ops.arguments import active_transform


def lambda_init(layer_index: int, depth_offset: int = 0) -> float:
    """The constant part of lambda in a layer: ``0.8 - 0.6 exp(-0.3 i)`` with ``i`` counted from 0 (section 2.1).

    The paper counts layers from 1 and writes ``exp(-0.3 (l - 1))``: the same number. ``depth_offset`` is added to i.
    Some published checkpoints have -1; then layer 0 starts below 0, at -0.0099.

    Raises:
        UserError: for a ``layer_index`` below 0.
    """
    if layer_index < 0:
        raise UserError(f"layer_index is {layer_index}; layers are counted from 0")
    return 0.8 - 0.6 * math.exp(-0.3 * (layer_index + depth_offset))


class LearnedLambda(nn.Module):
    """``exp(q1 . k1) - exp(q2 . k2) + lambda_init``, one fp32 scalar for all heads of a layer.

    The four vectors have width ``head_dim`` and are drawn from N(0, ``std``). They stay in fp32 when the model is cast
    to half precision: rounding the exponentials to bf16 would quantise lambda to steps of 0.008.

    Args:
        head_dim: width d of a head's queries.
        initial: the constant ``lambda_init``, a Python float.
        std: standard deviation of the vectors at initialisation (0.1 in the authors' code).
    """

    def __init__(self, head_dim: int, initial: float, std: float = 0.1):
        super().__init__()
        self.initial, self.std = initial, std
        self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2 = (
            nn.Parameter(torch.empty(head_dim, dtype=torch.float32)) for _ in range(4)
        )
        for vector in self.parameters():
            nn.init.normal_(vector, std=std)

    def forward(self, hidden_states: Tensor | None = None) -> Tensor:
        """The layer's lambda, a scalar in the vectors' dtype; the input is not used."""
        first = torch.dot(self.lambda_q1, self.lambda_k1).exp()
        second = torch.dot(self.lambda_q2, self.lambda_k2).exp()
        return first - second + self.initial

    def _apply(self, fn, recurse=True):
        return super()._apply(keeping_precision(fn), recurse)


class FixedLambda(nn.Module):
    """A constant lambda, ``lambda_init``: an exact Python float that is not learned."""

    def __init__(self, initial: float):
        super().__init__()
        self.initial = initial

    def forward(self, hidden_states: Tensor | None = None) -> float:
        return self.initial


class TokenLambda(nn.Module):
    """``sigmoid(X W)``: lambda of the second version, one for each token and head, fp32 ``[B, h, T, 1]``.

    With ``columns=2``, a gate and lambda of each head, whose columns in W are adjacent: ``[B, h, T, 2]``. The
    projection is computed in the dtype of the hidden states, the sigmoid in fp32. ``offset`` is added to lambda's
    logits.

    ``mean`` (not saved) is the mean lambda of the last call in training mode, outside of ``torch.func``, for telemetry;
    None without ``telemetry``.
    """

    initial = 0.0
    mean: Tensor

    def __init__(
        self, hidden_size: int, num_heads: int, columns: int = 1, *, offset: float = 0.0, telemetry: bool = True
    ):
        super().__init__()
        self.columns, self.offset = columns, offset
        self.proj = nn.Linear(hidden_size, columns * num_heads, bias=False)
        self.register_buffer("mean", torch.full((), 0.5) if telemetry else None, persistent=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """``[B, h, T, columns]`` in fp32 or wider for ``hidden_states [B, T, width]``."""
        logits = self.proj(hidden_states)  # [B, T, h * columns]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        logits = logits.view(*logits.shape[:2], logits.shape[2] // self.columns, self.columns)
        if self.offset:
            logits = torch.cat((logits[..., :-1], logits[..., -1:] + self.offset), -1)
        weights = logits.sigmoid()
        if self.training and self.mean is not None and active_transform() is None:  # which forbid the assignment
            self.mean.copy_(weights[..., -1].detach().mean())
        return weights.transpose(1, 2)


LAMBDAS = (LearnedLambda, FixedLambda, TokenLambda)


@torch.no_grad()
def present_lambda(module: LearnedLambda | FixedLambda | TokenLambda) -> float:
    """The current value of a lambda module, for telemetry; for ``TokenLambda`` the mean of the last call."""
    return float(module.mean if isinstance(module, TokenLambda) else module())
