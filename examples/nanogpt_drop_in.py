"""Ten lines that give a small GPT differential attention.

    python examples/nanogpt_drop_in.py

``CausalSelfAttention`` is the attention of a GPT in the style of nanoGPT; ``DifferentialSelfAttention`` is the same
with ``diff_attention`` in the place of SDPA, ten lines of it new. Both are trained on the bytes of this Python's
documentation topics: half a minute on one CPU core.
"""

import difflib
import inspect
import time
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import nn

from diff_transformer import diff_attention, lambda_init


class CausalSelfAttention(nn.Module):
    def __init__(self, width, heads, layer):
        super().__init__()
        self.heads, self.d = heads, width // heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.qkv(x).split(C, dim=-1)
        q, k, v = (y.view(B, T, self.heads, self.d).transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(B, T, C))


class DifferentialSelfAttention(nn.Module):
    def __init__(self, width, heads, layer):
        super().__init__()
        self.heads, self.d = heads, width // heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.vectors = nn.Parameter(0.1 * torch.randn(2, 2, self.d))
        self.start = lambda_init(layer)
        self.norm = nn.RMSNorm(2 * self.d, eps=1e-5)
        nn.init.constant_(self.norm.weight, 0.1)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.qkv(x).split(C, dim=-1)
        q, k = (y.view(B, T, self.heads, self.d).transpose(1, 2) for y in (q, k))
        v = v.view(B, T, self.heads // 2, 2 * self.d).transpose(1, 2)
        first, second = self.vectors.prod(1).sum(-1).exp()
        pairs = q[:, 0::2], q[:, 1::2], k[:, 0::2], k[:, 1::2]
        y = diff_attention(*pairs, v, first - second + self.start, is_causal=True)
        y = self.norm(y) * (1 - self.start)
        return self.out(y.transpose(1, 2).reshape(B, T, C))


def new_lines() -> list[str]:
    """The lines of ``DifferentialSelfAttention`` that ``CausalSelfAttention`` does not have."""
    ours, theirs = (inspect.getsource(x).splitlines()[1:] for x in (DifferentialSelfAttention, CausalSelfAttention))
    return [line[2:] for line in difflib.ndiff(theirs, ours) if line.startswith("+ ")]


class Block(nn.Module):
    def __init__(self, attention: type[nn.Module], width: int, heads: int, layer: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = attention(width, heads, layer)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Bytes in, logits of the next byte out: [B, T] -> [B, T, 256]."""

    def __init__(self, attention: type[nn.Module], width=64, heads=8, layers=2, length=64):
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(attention, width, heads, layer) for layer in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, ids):
        x = self.bytes(ids) + self.places.weight[: ids.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def train(attention: type[nn.Module], steps: int, length: int = 64, batch: int = 32) -> dict:
    text = torch.tensor(list("\n".join(topics[name] for name in sorted(topics)).encode()))
    torch.manual_seed(0)
    model = GPT(attention, length=length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    start, losses = time.perf_counter(), []
    for _ in range(steps):
        at = torch.randint(len(text) - length - 1, (batch, 1)) + torch.arange(length + 1)
        rows = text[at]
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    last = losses[-20:]
    return {"first": losses[0], "last": sum(last) / len(last), "seconds": time.perf_counter() - start,
            "parameters": sum(p.numel() for p in model.parameters())}  # fmt: skip


def main(steps: int = 300, batch: int = 32) -> dict[str, dict]:
    print(f"{len(new_lines())} lines differ:", *new_lines(), sep="\n")
    results = {}
    for name, attention in (("softmax", CausalSelfAttention), ("diff", DifferentialSelfAttention)):
        results[name] = result = train(attention, steps, batch=batch)
        print(f"{name:8} loss {result['first']:.2f} -> {result['last']:.3f}  {result['seconds']:.0f} s")
    return results


if __name__ == "__main__":
    main()
