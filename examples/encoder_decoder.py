"""An encoder-decoder with differential self- and cross-attention beside one with softmax attention.

    python examples/encoder_decoder.py

The task: read 4 to 12 letters, write them backwards. The decoder finds each letter by cross-attention alone; the
padding of shorter rows is hidden from it. About half a minute on one CPU core.
"""

import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diff_transformer import DiffAttention

PAD, START, END, LETTERS, LONGEST = 0, 1, 2, 20, 12
VOCABULARY, WIDTH, HEADS, BATCH = LETTERS + 3, 64, 8, 64


def draw(number: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Rows of letters [number, 12], padded at the end, and START, the same backwards, END, padding [number, 14]."""
    lengths = torch.randint(4, LONGEST + 1, (number, 1), generator=generator)
    place = torch.arange(LONGEST)
    read = torch.randint(3, VOCABULARY, (number, LONGEST), generator=generator).masked_fill(place >= lengths, PAD)
    write = torch.full((number, LONGEST + 2), PAD)
    write[:, 0] = START
    write[:, 1:-1] = read.gather(1, (lengths - 1 - place).clamp_min(0)).masked_fill(place >= lengths, PAD)
    return read, write.scatter(1, lengths + 1, END)


class Attention(nn.Module):
    """Self-attention, or attention to a context whose padding is hidden; ``kind`` says which of the two forms."""

    def __init__(self, kind: str, layer: int, causal: bool = False):
        super().__init__()
        self.kind, self.causal = kind, causal
        if kind == "diff":
            self.inner = DiffAttention(WIDTH, HEADS, layer_index=layer, is_causal=causal, head_norm_init=0.1)
        else:
            self.inner = nn.MultiheadAttention(WIDTH, HEADS, bias=False, batch_first=True)

    def forward(self, x: Tensor, context: Tensor | None = None, seen: Tensor | None = None) -> Tensor:
        """``x [B, T, 64]``, ``context [B, S, 64]``, ``seen [B, S]``: True where there is a letter."""
        if self.kind == "diff":
            return self.inner(x, context, attention_mask=None if seen is None else seen[:, None, None])[0]
        context, hidden = x if context is None else context, None if seen is None else ~seen
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1) if self.causal else None
        return self.inner(x, context, context, key_padding_mask=hidden, attn_mask=later, need_weights=False)[0]


class Block(nn.Module):
    def __init__(self, kind: str, layer: int, decodes: bool):
        super().__init__()
        self.itself = Attention(kind, layer, causal=decodes)
        self.other = Attention(kind, layer) if decodes else None
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))

    def forward(self, x: Tensor, seen: Tensor, context: Tensor | None = None) -> Tensor:
        x = x + self.itself(self.norms[0](x), seen=seen if context is None else None)
        if self.other is not None:
            x = x + self.other(self.norms[1](x), context, seen)
        return x + self.mlp(self.norms[2](x))


class EncoderDecoder(nn.Module):
    def __init__(self, kind: str, layers: int = 2):
        super().__init__()
        self.letters, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LONGEST + 2, WIDTH)
        self.encoder = nn.ModuleList(Block(kind, layer, decodes=False) for layer in range(layers))
        self.decoder = nn.ModuleList(Block(kind, layer, decodes=True) for layer in range(layers))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY))

    def embed(self, ids: Tensor) -> Tensor:
        return self.letters(ids) + self.places.weight[: ids.shape[1]]

    def forward(self, read: Tensor, write: Tensor) -> Tensor:
        """What follows each of ``write [B, T]`` after reading ``read [B, 12]``: logits [B, T, 23]."""
        seen, context, x = read != PAD, self.embed(read), self.embed(write)
        for block in self.encoder:
            context = block(context, seen)
        for block in self.decoder:
            x = block(x, seen, context)
        return self.head(x)

    @torch.no_grad()
    def write(self, read: Tensor) -> Tensor:
        """Greedily: [B, 14]."""
        written = torch.full((len(read), 1), START)
        for _ in range(LONGEST + 1):
            written = torch.cat((written, self(read, written)[:, -1:].argmax(-1)), dim=1)
        return written


def train(kind: str, steps: int, rows: int, seed: int = 0) -> dict:
    torch.manual_seed(seed)
    model, generator = EncoderDecoder(kind), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    start = time.perf_counter()
    for _ in range(steps):
        read, write = draw(BATCH, generator)
        loss = F.cross_entropy(model(read, write[:, :-1]).flatten(0, 1), write[:, 1:].flatten(), ignore_index=PAD)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    read, write = draw(rows, torch.Generator().manual_seed(seed + 10**6))
    written = model.eval().write(read)
    right = ((written == write) | (write == PAD)).all(-1).float().mean().item()
    return {"whole": right, "loss": loss.item(), "seconds": time.perf_counter() - start}


def main(steps: int = 300, rows: int = 500) -> dict[str, dict]:
    """Train both, then let them write ``rows`` rows that they have not seen."""
    results = {}
    for kind in ("softmax", "diff"):
        results[kind] = result = train(kind, steps, rows)
        right = f"{kind:8} rows without a mistake {result['whole']:.3f}"
        print(f"{right}  loss {result['loss']:.4f}  {result['seconds']:.0f} s")
    return results


if __name__ == "__main__":
    main()
