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


def gpu_shape(length: int, width: int, causal: bool = True) -> Shape:
    """A batch of ``TOKENS`` tokens with the number of heads of the model that has this head width."""
    return Shape(max(1, TOKENS // length), HEADS[width], length, width, causal)


def default_grid(device: str, full: bool) -> list[Shape]:
    """The shapes that ``bench attention`` times by default."""
    if device.startswith("cuda"):
        masks, lengths = ((True, False), LENGTHS) if full else ((True,), (4096, 2048))
        return [gpu_shape(length, width, causal) for causal in masks for length in lengths for width in HEADS]
    if not full:
        return parse_shapes("16x4x128x16,4x4x512x32,1x4x1024x128,1x4x2048x32,1x4x2048x64")
    sizes = ((4, 4, 512), (2, 4, 1024), (1, 4, 2048), (1, 2, 4096), (1, 1, 8192))
    return parse_shapes("16x4x128x16,16x4x256x32") + [Shape(*size, width) for size in sizes for width in (32, 64, 128)]


def parse_shapes(text: str) -> list[Shape]:
    """Shapes from "BxhxNxd,BxhxNxd,..."; a final n makes a shape non-causal.

    Raises:
        UserError: for any other text, and for sizes of 0.
    """
    shapes = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)x(\d+)x(\d+)x(\d+)(n?)", part.strip())
        if match is None or 0 in map(int, match.groups()[:4]):
            raise UserError(
                f"{part.strip()!r} is not a shape; give batch x heads x length x width, for example 4x12x4096x128, "
                "with a final n for attention without the causal mask, and commas between shapes"
            )
        batch, heads, length, width = (int(size) for size in match.groups()[:4])
        shapes.append(Shape(batch, heads, length, width, causal=not match[5]))
    return shapes
