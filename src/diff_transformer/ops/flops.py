"""Multiplications and additions of the operators, for ``torch.utils.flop_counter.FlopCounterMode``.

As PyTorch counts its own attention: without the causal limit. Every kernel is credited with the same work, however it
computes: both maps, and one product of their difference with the values.
"""

from collections.abc import Callable
from typing import Any

from diff_transformer.importing import when_imported


def of_forward(q1, q2, k1, k2, v, *_, **__) -> int:
    """From the shapes of q1, q2, k1 and v."""
    return _of_maps(q1, q2, k1) + _with_values(q1, v)


def of_backward(dout, q1, q2, k1, k2, v, *_, **__) -> int:
    """The maps again, dO v^T and dv, and the gradients of queries and keys."""
    return 3 * _of_maps(q1, q2, k1) + 2 * _with_values(q1, v)


def _of_maps(q1, q2, k1) -> int:
    (B, H, T, D), Hn, S = q1, q2[1], k1[2]
    return 2 * B * (H + Hn) * T * S * D


def _with_values(q1, v) -> int:
    (B, H, T, _), (_, _, S, Dv) = q1, v
    return 2 * B * H * T * S * Dv


def count(formulas: dict[Any, Callable[..., int]]) -> None:
    """Register the formula of each operator when the counter is imported, which imports Triton."""

    def register(counter: Any) -> None:
        for operator, formula in formulas.items():
            counter.register_flop_formula(operator)(formula)

    when_imported("torch.utils.flop_counter", register)
