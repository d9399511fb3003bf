"""The sizes at which the operator is timed, and the memory they take."""

import re
from dataclasses import dataclass

from diff_transformer.errors import UserError

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
            raise UserError(
                f"{part.strip()!r} is not a shape; give batch x heads x length x width, for example 4x12x4096x128, "
                "with a final n for attention without the causal mask, and commas between shapes"
            )
        batch, heads, length, width = (int(size) for size in found.groups()[:4])
        shapes.append(Shape(batch, heads, length, width, causal=not found[5]))
    return shapes
