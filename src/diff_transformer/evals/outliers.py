"""Largest activations (Table 5): attention logits before softmax, and layer outputs after the residual.

Magnitudes are streamed through hooks that read and never change the model; the top-k are exact, the median comes
from a histogram with bins of 0.5 % width.
"""

import torch
from torch import Tensor

from diff_transformer.checks import require_positive
from diff_transformer.evals.lm import CausalLM, tapped_attention
from diff_transformer.evals.provenance import provenance
from diff_transformer.evals.types import Result

RANKS = (1, 2, 3, 10, 100)
_LOWEST, _HIGHEST, _BINS = -14.0, 14.0, 5600  # of the natural logarithm of a magnitude


class Magnitudes:
    """A stream of numbers, of which the 100 largest magnitudes and the median are kept."""

    def __init__(self):
        self.top = torch.empty(0)
        self.histogram = torch.zeros(_BINS, dtype=torch.float64)

    def add(self, values: Tensor):
        magnitudes = values.detach().abs().float().flatten()
        top = magnitudes.topk(min(max(RANKS), magnitudes.numel())).values.cpu()
        self.top = torch.cat((self.top, top)).topk(min(max(RANKS), len(self.top) + len(top))).values
        logs = magnitudes.clamp_min(1e-12).log().clamp(_LOWEST, _HIGHEST)
        self.histogram += torch.histc(logs, _BINS, _LOWEST, _HIGHEST).double().cpu()

    def median(self) -> float:
        total = self.histogram.cumsum(0)
        index = int(torch.searchsorted(total, total[-1] / 2))
        return float(torch.tensor(_LOWEST + (index + 0.5) * (_HIGHEST - _LOWEST) / _BINS).exp())

    def metrics(self, prefix: str) -> dict[str, float]:
        ranked = {f"{prefix}_top{k}": float(self.top[k - 1]) for k in RANKS if k <= len(self.top)}
        return {**ranked, f"{prefix}_median": self.median()}


def evaluate_outliers(lm: CausalLM, ids: Tensor, *, block: int = 128) -> Result:
    """Largest and median magnitudes over the tokens ``ids [rows, T]``.

    Logits are ``q k^T / sqrt(d)`` of every pair that the causal mask lets through, of both maps for differential
    attention; they are computed in blocks of ``block`` queries, so memory is O(T).
    """
    from diff_transformer.model.modeling import DecoderLayer

    require_positive(block=block)
    logits, hidden = Magnitudes(), Magnitudes()
    batch_top: dict[str, float] = {}

    def look(layer: int, core, q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool):
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        offset = k.shape[2] - q.shape[2]
        for start in range(0, q.shape[2], block):
            rows = q[:, :, start : start + block]
            keys = k[:, :, : offset + start + rows.shape[2]]
            scores = rows.float() @ keys.float().transpose(-1, -2) * q.shape[-1] ** -0.5
            allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril(offset + start)
            kept = scores[..., allowed]
            logits.add(kept)
            batch_top["logits"] = max(batch_top.get("logits", 0.0), float(kept.abs().max()))

    def after_layer(module, args, output):
        hidden.add(output)
        batch_top["hidden"] = max(batch_top.get("hidden", 0.0), float(output.abs().max()))

    rows = []
    layers = [module for module in lm.model.modules() if isinstance(module, DecoderLayer)]
    handles = [layer.register_forward_hook(after_layer) for layer in layers]
    try:
        with tapped_attention(lm.model, look), torch.inference_mode():
            for index, part in enumerate(ids.split(lm.batch_size)):
                batch_top.clear()
                lm.model(input_ids=part.to(lm.device), use_cache=False, logits_to_keep=1)
                rows.append({"batch": index, **{f"{name}_top1": value for name, value in batch_top.items()}})
    finally:
        for handle in handles:
            handle.remove()
    metrics = {**logits.metrics("logits"), **hidden.metrics("hidden"), "tokens": float(ids.numel())}
    return Result("outliers", lm.name, metrics, rows, provenance(tokens=ids.numel(), length=ids.shape[1]))
