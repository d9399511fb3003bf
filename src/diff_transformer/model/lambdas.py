"""lambda: the weight of the second map. It is computed here and nowhere else (section 2.1, equation 2)."""

import math

import torch
from torch import Tensor, nn

HALF_PRECISION = (torch.float16, torch.bfloat16)


def lambda_init(layer_index: int) -> float:
    """The constant part of lambda in a layer: ``0.8 - 0.6 exp(-0.3 i)`` with ``i`` counted from 0 (section 2.1).

    The paper counts layers from 1 and writes ``exp(-0.3 (l - 1))``: the same number.
    """
    if layer_index < 0:
        raise ValueError(f"layer_index is {layer_index}; layers are counted from 0")
    return 0.8 - 0.6 * math.exp(-0.3 * layer_index)


class LearnedLambda(nn.Module):
    """``exp(q1 . k1) - exp(q2 . k2) + lambda_init``, one fp32 scalar for all heads of a layer.

    The four vectors have width ``head_dim``, are drawn from N(0, ``std``) and stay in fp32 when the model around
    them is cast to half precision: rounding the exponentials to bf16 would quantise lambda to steps of 0.008.

    Args:
        head_dim: width d of a head's queries.
        initial: the constant ``lambda_init``, kept as a Python float.
        std: standard deviation of the vectors at initialisation (the reference code has 0.1).
    """

    def __init__(self, head_dim: int, initial: float, std: float = 0.1):
        super().__init__()
        self.initial, self.std = initial, std
        self.lambda_q1 = nn.Parameter(torch.empty(head_dim, dtype=torch.float32))
        self.lambda_k1 = nn.Parameter(torch.empty(head_dim, dtype=torch.float32))
        self.lambda_q2 = nn.Parameter(torch.empty(head_dim, dtype=torch.float32))
        self.lambda_k2 = nn.Parameter(torch.empty(head_dim, dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self):
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=self.std)

    def forward(self) -> Tensor:
        first = torch.dot(self.lambda_q1, self.lambda_k1).exp()
        second = torch.dot(self.lambda_q2, self.lambda_k2).exp()
        return first - second + self.initial

    def _apply(self, fn, recurse=True):
        def keep_precision(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return tensor.to(moved.device) if moved.dtype in HALF_PRECISION else moved

        return super()._apply(keep_precision, recurse)

    def extra_repr(self) -> str:
        return f"head_dim={self.lambda_q1.numel()}, initial={self.initial:.4f}"
