"""The sizes at which the operator is timed."""

import re
from dataclasses import dataclass

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
TOKENS = 16384  # in a GPU's batch, where a sequence is not longer
HEADS = {64: 16, 96: 8, 128: 12}  # differential heads: d_model 2048, 1536 (830M) and 3072 (3B)


@dataclass(frozen=True)
class Shape:
    """q1, q2, k1, k2 [batch, heads, length, width] and v twice as wide; the baseline has 2 * heads of width."""

    batch: int
    heads: int
    length: int
    width: int
    causal: bool = True

    @property
    def unit(self) -> float:
        """u of the cost model, h N^2 d multiply-adds for the batch; only pairs that the causal limit leaves count."""
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
    """``TOKENS`` tokens of the model that has heads of this width."""
    return Shape(max(1, TOKENS // length), HEADS[width], length, width, causal)


GPU_SHORT_GRID = [gpu_shape(length, width) for length in (4096, 2048) for width in (128, 64, 96)]
GPU_FULL_GRID = [
    gpu_shape(length, width, causal) for causal in (True, False) for width in (128, 64, 96) for length in LENGTHS
]


def default_grid(device: str, full: bool) -> list[Shape]:
    """What ``bench attention`` times where no sizes are given."""
    if device.startswith("cuda"):
        return GPU_FULL_GRID if full else GPU_SHORT_GRID
    return FULL_GRID if full else SHORT_GRID


def parse_shapes(text: str) -> list[Shape]:
    """Shapes from "BxhxNxd,BxhxNxd,..."; an n behind a shape makes it non-causal.

    Raises:
        ValueError: for anything else, and for sizes of 0.
    """
    shapes = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)x(\d+)x(\d+)x(\d+)(n?)", part.strip())
        if found is None or "0" in found.groups():
            raise ValueError(
                f"{part.strip()!r} is no shape; give batch x heads x length x width, for example 4x12x4096x128, "
                "with an n behind it for attention without the causal limit, and commas between shapes"
            )
        batch, heads, length, width = (int(size) for size in found.groups()[:4])
        shapes.append(Shape(batch, heads, length, width, causal=not found[5]))
    return shapes
