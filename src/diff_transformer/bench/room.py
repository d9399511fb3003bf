"""Whether a shape of the operator's benchmark fits the memory of a device."""

import torch

from diff_transformer.bench.gates import SHORTER
from diff_transformer.bench.machine import free_memory
from diff_transformer.bench.shapes import Shape
from diff_transformer.durable import size

_MAPS = 9  # of the reference in fp64, which its gradients hold at once; measured


def bytes_needed(shape: Shape, dtype: torch.dtype, functions: int) -> int:
    """About what ``functions`` take, softmax attention among them: the inputs of both forms, and beside them the most
    of what is there at a time.

    When they are timed: the output of each and its gradient, and the gradients of the inputs of one. In the gate: the
    maps of the reference at its shorter length, and at the full one keys and values in fp64.
    """
    output = 2 * shape.batch * shape.heads * shape.length * shape.width
    inputs = 3 * output  # q1, q2, k1, k2, v; q, k, v of the baseline are as many numbers
    timed = (2 * functions * output + inputs) * dtype.itemsize
    maps = _MAPS * 8 * shape.batch * shape.heads * min(shape.length, SHORTER) ** 2
    doubles = 2 * output * 8 + output * dtype.itemsize
    return 2 * inputs * dtype.itemsize + max(timed, maps, doubles)


def why_too_large(shape: Shape, dtype: torch.dtype, functions: int, device: str) -> str | None:
    """Why ``functions`` cannot be timed at a shape: they take more memory than is free. None if they can."""
    needed, free = bytes_needed(shape, dtype, functions), free_memory(device)
    if needed <= free:
        return None
    return (
        f"{shape} in {str(dtype).removeprefix('torch.')} takes about {size(needed)} for the inputs, outputs and "
        f"gradients of {functions} functions, and {size(free)} are free on {device}; give a smaller batch, fewer "
        "heads or a shorter length"
    )
