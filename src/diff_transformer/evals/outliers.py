"""Largest activations (Table 5): attention logits before softmax, and layer outputs after the residual.

Hooks read the magnitudes and leave the model unchanged. The largest hundred are exact. The median comes from a
histogram whose bins are at most 0.4 % wide.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diff_transformer.evals.attention_call import AttentionCall
from diff_transformer.evals.attention_tap import output_of, tapped_attention
from diff_transformer.evals.lm import CausalLM, check_length, text_details, text_rows
from diff_transformer.evals.samples import ALL, Samples
from diff_transformer.evals.types import Result
from diff_transformer.model.parts import layers_of
from diff_transformer.settings import PositiveInt, Seed

RANKS = (1, 2, 3, 10, 100)
KINDS = ("logits", "hidden")
_CUT = 15  # bits of a float32 that a bin leaves out: 8 of the mantissa's 23 tell bins apart
_BINS = 1 << (31 - _CUT)


@dataclass(frozen=True)
class Settings:
    """Settings of the experiment; the defaults are those of the paper's Table 5 with 0.4M tokens."""

    # Text: "python", a text file, JSON lines, parquet or a folder.
    corpus: str = "python"
    # Text to use: "held-out" (of a folder, a tenth), "all", or "auto": held-out for models of this package; for other
    # models held-out if that suffices, else all
    split: str = "auto"
    # Tokens of a row, in the model's own tokenizer.
    length: PositiveInt = 4096
    # Rows.
    samples: PositiveInt = 100
    # Seed of the choice of rows.
    seed: Seed = 0


QUICK = {"length": 128, "samples": 32}


def run(lm: CausalLM, settings: Settings, samples: Samples) -> Result:
    """``diff-transformer eval outliers``."""
    ids, part = text_rows(lm, settings, settings.samples)
    result = evaluate_outliers(lm, ids, samples)
    result.about.update(text_details(settings, part))
    return result


class Magnitudes:
    """Keeps the 100 largest magnitudes and the median of a stream of numbers."""

    def __init__(self):
        self.top = torch.empty(0)
        self.histogram = torch.zeros(_BINS, dtype=torch.int64)

    def add(self, values: Tensor, allowed: Tensor | None = None) -> None:
        """Add ``values``; with ``allowed``, which broadcasts to them, only those where it is True."""
        magnitudes = values.detach().abs().float()
        left_out = 0
        if allowed is not None:
            magnitudes = magnitudes.masked_fill_(~allowed, 0.0)
            left_out = magnitudes.numel() - int(allowed.expand_as(magnitudes).sum())
        magnitudes = magnitudes.flatten()
        most = min(max(RANKS), magnitudes.numel() - left_out)
        if len(self.top) == max(RANKS):
            top = magnitudes[magnitudes > self.top[-1].item()]  # few
            top = top.topk(min(most, len(top))).values
        else:
            top = magnitudes.topk(most).values
        bins = torch.bincount(magnitudes.view(torch.int32) >> _CUT, minlength=_BINS)  # floats are ordered as integers
        bins[0] -= left_out
        self.take(top.cpu(), bins.cpu())

    def take(self, top: Tensor, histogram: Tensor) -> None:
        """Add the largest and the histogram of other numbers."""
        joined = torch.cat((self.top, top))
        self.top = joined.topk(min(max(RANKS), len(joined))).values
        self.histogram += histogram

    def median(self) -> float:
        total = self.histogram.cumsum(0)
        index = int(torch.searchsorted(total, (total[-1] + 1) // 2))
        return float(torch.tensor((index << _CUT) + (1 << (_CUT - 1)), dtype=torch.int32).view(torch.float32))

    def rows(self, kind: str, layer: int = -1, ranks: Iterable[int] = RANKS) -> list[dict]:
        """The largest by rank, and as rank 0 the median, as rows of ``outliers_top``."""
        ranked = {k: float(self.top[k - 1]) for k in ranks if k <= len(self.top)} | {0: self.median()}
        same = {"experiment": "outliers_top", "kind": kind, "layer": layer}
        return [{**same, "example": f"{kind} {layer} {k}", "k": k, "value": value} for k, value in ranked.items()]


Table = dict[tuple[str, int], Magnitudes]  # (kind, layer) -> magnitudes


def evaluate_outliers(lm: CausalLM, ids: Tensor, samples: Samples = ALL) -> Result:
    """Largest and median magnitudes over the tokens ``ids [rows, T]``.

    Logits are ``q k^T / sqrt(d)`` of every unmasked pair, for differential attention of both maps. They are
    read in blocks, so memory is O(T). Layer outputs are the residual stream after each layer.

    Returns:
        A row for each row of tokens: ``logits_top1``, ``hidden_top1`` and both medians. The table ``outliers_top`` has
        the k-th largest value over all rows for k = 1, 2, 3, 10, 100, and as k = 0 the median, by ``kind``: "logits"
        and "hidden"; and of each ``layer`` the largest and the median (layer -1: of all).

    Raises:
        ValueError: for a model whose attention cannot be read, or rows longer than it supports.
    """
    check_length(lm, ids.shape[1], "a row")
    whole: Table = {}

    def score(numbers: Sequence[int]) -> list[dict]:
        rows = []
        for number in numbers:
            table = measure(lm, ids[number : number + 1])
            for key, values in table.items():
                whole.setdefault(key, Magnitudes()).take(values.top, values.histogram)
            logits, hidden = (_merged(table, kind) for kind in KINDS)
            rows.append({
                "example": number, "logits_top1": float(logits.top[0]), "hidden_top1": float(hidden.top[0]),
                "logits_median": logits.median(), "hidden_median": hidden.median(),
            })  # fmt: skip
        return rows

    rows = samples.rows("rows", range(len(ids)), score)
    about = {"tokens": len(rows) * ids.shape[1], "length": ids.shape[1]}
    return Result("outliers", rows + ranked(whole), about)


def ranked(table: Table) -> list[dict]:
    """The rows of ``outliers_top`` from the magnitudes of each kind and layer."""
    rows = [row for kind in KINDS for row in _merged(table, kind).rows(kind)]
    for layer in sorted({layer for _, layer in table}):
        of_layer = [kind for kind in KINDS if (kind, layer) in table]  # a layer of a hybrid may have no attention
        rows += [row for kind in of_layer for row in table[kind, layer].rows(kind, layer, (1,))]
    return rows


def _merged(table: Table, kind: str) -> Magnitudes:
    merged = Magnitudes()
    for (of, _), magnitudes in table.items():
        if of == kind:
            merged.take(magnitudes.top, magnitudes.histogram)
    return merged


@torch.inference_mode()
def measure(lm: CausalLM, ids: Tensor) -> Table:
    """The magnitudes of one forward pass over ``ids [B, T]``, by kind and layer."""
    table: Table = {}

    def add(kind: str, layer: int, values: Tensor, allowed: Tensor | None = None) -> None:
        table.setdefault((kind, layer), Magnitudes()).add(values, allowed)

    def look(call: AttentionCall) -> None:
        for rows in call.blocks():
            keys = call.reach(rows)
            allowed = call.allowed(rows)[..., keys]
            for logits in call.logits(rows, keys):
                add("logits", call.layer, logits, allowed)

    layers = layers_of(lm.model)
    handles = [
        layer.register_forward_hook(lambda module, args, output, i=i: add("hidden", i, output_of(output)))
        for i, layer in enumerate(layers)
    ]
    try:
        with tapped_attention(lm.model, look):
            lm.model.base_model(input_ids=ids.to(lm.device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return table
