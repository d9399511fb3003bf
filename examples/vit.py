"""A vision transformer with ``DiffAttention`` (not causal, no rotary embedding) beside one with softmax attention.

    python examples/vit.py

Digits, drawn here: turned, scaled, moved, under noise; 28 x 28 pixels in 16 patches of 7 x 7. Half a minute on one CPU
core; chance is 10 %.
"""

import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diff_transformer import DiffAttention

SIZE, PATCH, WIDTH, HEADS, LAYERS, BATCH = 28, 7, 64, 8, 2, 64
ROWS = ["75557", "26227", "71747", "71717", "55711", "74717", "74757", "71122", "75757", "75717"]


def glyphs() -> Tensor:
    """The ten digits, [10, 5, 3]: each row of a digit is three bits."""
    rows = torch.tensor([[int(row) for row in digit] for digit in ROWS])  # [10, 5]
    return (rows[..., None] >> torch.tensor([2, 1, 0]) & 1).float()


def draw(number: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Images [number, 1, 28, 28] of digits turned, scaled, moved and under noise, and the digits [number]."""
    digits = torch.randint(10, (number,), generator=generator)
    turn, scale, *shift = (torch.rand(4, number, generator=generator) - 0.5).unbind()
    zoom, turn = 1.3 + 0.8 * scale, 0.5 * turn
    place = torch.stack([
        zoom * turn.cos() * 5 / 3, -zoom * turn.sin() * 5 / 3, shift[0],
        zoom * turn.sin(), zoom * turn.cos(), shift[1],
    ], dim=-1).view(number, 2, 3)  # fmt: skip
    grid = F.affine_grid(place, [number, 1, SIZE, SIZE], align_corners=False)
    images = F.grid_sample(glyphs()[digits][:, None], grid, align_corners=False)
    return images + 0.2 * torch.randn(images.shape, generator=generator), digits


class Block(nn.Module):
    def __init__(self, kind: str, layer: int):
        super().__init__()
        if kind == "diff":  # the same parameters as 8 heads of softmax attention, and 48 more
            self.attention = DiffAttention(WIDTH, HEADS, layer_index=layer, head_norm_init=0.1)
        else:
            self.attention = nn.MultiheadAttention(WIDTH, HEADS, bias=False, batch_first=True)
        self.kind, self.norms = kind, nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        x = x + (self.attention(y)[0] if self.kind == "diff" else self.attention(y, y, y, need_weights=False)[0])
        return x + self.mlp(self.norms[1](x))


class ViT(nn.Module):
    def __init__(self, kind: str):
        super().__init__()
        self.patches = nn.Conv2d(1, WIDTH, PATCH, stride=PATCH)
        self.positions = nn.Parameter(0.02 * torch.randn((SIZE // PATCH) ** 2, WIDTH))
        self.blocks = nn.Sequential(*(Block(kind, layer) for layer in range(LAYERS)))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10))

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions  # [B, 16, 64]
        return self.head(self.blocks(x).mean(1))  # [B, 10]


def train(kind: str, steps: int, seed: int = 0) -> dict:
    torch.manual_seed(seed)
    model, generator = ViT(kind), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    start = time.perf_counter()
    for _ in range(steps):
        images, digits = draw(BATCH, generator)
        loss = F.cross_entropy(model(images), digits)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    images, digits = draw(1000, torch.Generator().manual_seed(seed + 10**6))
    with torch.no_grad():
        accuracy = (model.eval()(images).argmax(-1) == digits).float().mean().item()
    return {"accuracy": accuracy, "loss": loss.item(), "seconds": time.perf_counter() - start,
            "parameters": sum(p.numel() for p in model.parameters())}  # fmt: skip


def main(steps: int = 500) -> dict[str, dict]:
    results = {}
    for kind in ("softmax", "diff"):
        results[kind] = result = train(kind, steps)
        size = f"{result['parameters']:,} parameters"
        print(f"{kind:8} accuracy {result['accuracy']:.3f}  {size}  {result['seconds']:.0f} s")
    return results


if __name__ == "__main__":
    main()
