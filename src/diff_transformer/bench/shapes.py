"""The sizes at which the operator is timed, and the memory they take."""

import re
from dataclasses import dataclass

import torch

from diff_transformer.bench.record import free_memory
from diff_transformer.durable import human_bytes

SHORTER = 555  # length at which the gate compares gradients: the reference materialises the maps
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
TOKENS = 16384  # per batch on a GPU, unless one sequence is longer
HEADS = {64: 16, 96: 8, 128: 12}  # differential heads: d_model 2048, 1536 (830M) and 3072 (3B)


@dataclass(frozen=True)
class Shape:
    """q1, q2, k1, k2 [batch, heads, length, width]; v is twice as wide. The baseline has 2 * heads of this width."""

    batch: int
    heads: int
    length: int
    width: int
    causal: bool = True

    @property
    def unit(self) -> float:
        """u of the cost model: h N^2 d multiply-adds for the batch. Masked pairs do not count."""
        pairs = self.length * (self.length + 1) / 2 if self.causal else self.length**2
        return self.batch * self.heads * pairs * self.width

    def __str__(self) -> str:
        return f"{self.batch}x{self.heads}x{self.length}x{self.width}{'' if self.causal else 'n'}"


SHORT_GRID = [
    Shape(16, 4, 128, 16),
    Shape(4, 4, 512, 32),
    Shape(1, 4, 1024, 128),
    Shape(1, 4, 2048, 32),
    Shape(1, 4, 2048, 64),
]
FULL_GRID = [
    Shape(16, 4, 128, 16),
    Shape(16, 4, 256, 32),
    *(
        Shape(batch, heads, length, width)
        for batch, heads, length in ((4, 4, 512), (2, 4, 1024), (1, 4, 2048), (1, 2, 4096), (1, 1, 8192))
        for width in (32, 64, 128)
    ),
]


def gpu_shape(length: int, width: int, causal: bool = True) -> Shape:
    """A batch of ``TOKENS`` tokens with the number of heads of the model that has this head width."""
    return Shape(max(1, TOKENS // length), HEADS[width], length, width, causal)


GPU_SHORT_GRID = [gpu_shape(length, width) for length in (4096, 2048) for width in (128, 64, 96)]
GPU_FULL_GRID = [
    gpu_shape(length, width, causal) for causal in (True, False) for width in (128, 64, 96) for length in LENGTHS
]


def default_grid(device: str, full: bool) -> list[Shape]:
    """The shapes that ``bench attention`` times by default."""
    if device.startswith("cuda"):
        return GPU_FULL_GRID if full else GPU_SHORT_GRID
    return FULL_GRID if full else SHORT_GRID


def parse_shapes(text: str) -> list[Shape]:
    """Shapes from "BxhxNxd,BxhxNxd,..."; a final n makes a shape non-causal.

    Raises:
        ValueError: for any other text, and for sizes of 0.
    """
    shapes = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)x(\d+)x(\d+)x(\d+)(n?)", part.strip())
        if found is None or "0" in found.groups():
            raise ValueError(
                f"{part.strip()!r} is not a shape; give batch x heads x length x width, for example 4x12x4096x128, "
                "with a final n for attention without the causal mask, and commas between shapes"
            )
        batch, heads, length, width = (int(size) for size in found.groups()[:4])
        shapes.append(Shape(batch, heads, length, width, causal=not found[5]))
    return shapes


_MAPS = 9  # N x N maps that the fp64 reference holds at once with its gradients; measured


def bytes_needed(shape: Shape, dtype: torch.dtype, functions: int) -> int:
    """Estimated peak memory of timing ``functions`` functions, including softmax attention.

    It is the inputs of both forms plus the larger of two sums. Timing holds the output of each function with its
    gradient and the input gradients of one. The gate holds the maps of the reference at its shorter length, and at the
    full length keys and values in fp64.
    """
    output = 2 * shape.batch * shape.heads * shape.length * shape.width
    inputs = 3 * output  # q1, q2, k1, k2, v; q, k, v of the baseline are as many numbers
    timed = (2 * functions * output + inputs) * dtype.itemsize
    maps = _MAPS * 8 * shape.batch * shape.heads * min(shape.length, SHORTER) ** 2
    doubles = 2 * output * 8 + output * dtype.itemsize
    return 2 * inputs * dtype.itemsize + max(timed, maps, doubles)


def too_large_reason(shape: Shape, dtype: torch.dtype, functions: int, device: str) -> str | None:
    """Why ``functions`` functions do not fit the free memory at this shape; None if they do."""
    needed, free = bytes_needed(shape, dtype, functions), free_memory(device)
    if needed <= free:
        return None
    return (
        f"{shape} in {str(dtype).removeprefix('torch.')} takes about {human_bytes(needed)} for the inputs, outputs and "
        f"gradients of {functions} functions, and {human_bytes(free)} are free on {device}; give a smaller batch, "
        "fewer heads or a shorter length"
    )
