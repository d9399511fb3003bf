"""The anatomy of heads: what each head attends to, how much heads repeat one another, and which of them matter.

On held-out text, of every head of every layer. W is its signed attention: of differential attention ``A1 - lambda A2``,
of softmax attention its map.

    negative, negative_mass  share of the weights below 0 among those a query may give; their share of the magnitude
    sink                     share of the magnitude on the first key
    entropy, keys            entropy of |W| / sum |W| in nats, mean over queries; its exponential, the effective keys
    distance                 1 - cosine of this head's W and another's, over all queries and keys; mean over the layer
    cka                      linear centred kernel alignment of this head's output W V and another's, over all tokens;
                             mean over the layer (Kornblith et al., arXiv 1905.00414)
    importance               |dL / dg| of a factor g = 1 on the head, L the mean loss (Michel et al., arXiv 1905.10650)
    lam, lam_spread          lambda, mean and standard deviation over tokens; gate, gate_spread: the first map's weight

The table ``hessian`` has the largest (``rank`` 1, 2, ...) and the smallest (-1, -2, ...) eigenvalues of the Hessian of
L over all rows, if the setting ``hessian`` asks for them (``hessian.py``).

What a model does not have is missing: softmax attention has no lambda and no negative weight. ``distance`` and ``cka``
need two heads, ``cka`` values that the layer does not split (DiffLlama does).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from diff_transformer.errors import UserError
from diff_transformer.evals.attention_call import AttentionCall, weighted
from diff_transformer.evals.attention_tap import tapped_attention
from diff_transformer.evals.hessian import hessian_eigenvalues
from diff_transformer.evals.lm import CausalLM, text_details, text_rows
from diff_transformer.evals.samples import Samples
from diff_transformer.evals.types import Result
from diff_transformer.model.parts import layers_of
from diff_transformer.settings import NonNegativeInt, PositiveInt, Seed

EXTREMES = 5  # eigenvalues of either end
_OUT = ("o_proj", "out_proj", "dense", "c_proj")  # names of the output projection of attention


@dataclass(frozen=True)
class Settings:
    """Text and its amount."""

    # Text: "python", a text file, JSON lines, parquet or a folder.
    corpus: str = "python"
    # Text to use: "held-out", "all", or "auto", as of `outliers`.
    split: str = "auto"
    # Tokens of a row; maps of length x length weights of every head are held.
    length: PositiveInt = 256
    # Rows.
    samples: PositiveInt = 16
    # Steps towards the Hessian's extreme eigenvalues, each two gradients in fp64; 0 for none. 30 suffice.
    hessian: NonNegativeInt = 0
    # Seed of the choice of rows.
    seed: Seed = 0


QUICK = {"length": 128, "samples": 4}


def run(lm: CausalLM, settings: Settings, samples: Samples) -> Result:
    """A row of the table ``anatomy`` for each row of text, layer and head, and ``hessian``.

    Raises:
        UserError: for a model whose attention cannot be read, or rows longer than it supports.
    """
    ids, part = text_rows(lm, settings, settings.samples)

    def score(numbers: Sequence[int]) -> list[dict]:
        return [{"example": number, "heads": anatomy(lm, ids[number : number + 1])} for number in numbers]

    measured = samples.rows("rows", range(len(ids)), score)
    rows = [{"example": row["example"], **head} for row in measured for head in row["heads"]]
    if settings.hessian:
        rows += _extremes(
            hessian_eigenvalues(lm.model, lambda model: _loss(model, ids.to(lm.device)), settings.hessian)
        )
    about = {"length": settings.length, "tokens": len(measured) * settings.length}
    return Result("anatomy", rows, about | text_details(settings, part))


def _loss(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def _extremes(values: Tensor) -> list[dict[str, Any]]:
    """Rows of ``hessian`` from ascending eigenvalues; those in the middle are not exact yet."""
    count = min(EXTREMES, max(1, len(values) // 4))
    ranked = {rank: values[-rank] for rank in range(1, count + 1)}
    ranked |= {-rank: values[rank - 1] for rank in range(1, count + 1)}
    return [
        {"experiment": "hessian", "example": rank, "rank": rank, "value": float(value)}
        for rank, value in ranked.items()
    ]


def anatomy(lm: CausalLM, ids: Tensor) -> list[dict[str, Any]]:
    """The quantities of every head on one row of text ``ids [1, T]``: dictionaries with ``layer`` and ``head``."""
    of_layers: dict[int, dict[str, Tensor]] = {}

    def look(call: AttentionCall) -> None:
        with torch.no_grad():
            of_layers[call.layer] = of_attention(call)

    inputs: list[Tensor] = []

    def keep(_: nn.Module, args: tuple) -> tuple:
        x = args[0] if args[0].requires_grad else args[0].detach().requires_grad_()  # of a frozen model
        inputs.append(x)
        return (x, *args[1:])

    projections = {n: found for n, layer in enumerate(layers_of(lm.model)) if (found := _projection(layer)) is not None}
    if not projections:
        raise UserError(f"{type(lm.model).__name__} has no output projection of attention ({', '.join(_OUT)}) to read")
    handles = [projection.register_forward_pre_hook(keep) for projection in projections.values()]
    ids = ids.to(lm.device)
    try:
        with tapped_attention(lm.model, look), torch.enable_grad():
            logits = lm.model(input_ids=ids, use_cache=False).logits
            loss = F.cross_entropy(logits[0, :-1].float(), ids[0, 1:])
            gradients = torch.autograd.grad(loss, inputs)
    finally:
        for handle in handles:
            handle.remove()
    rows = []
    for layer, x, gradient in zip(projections, inputs, gradients, strict=True):
        of = of_layers[layer]
        heads = len(of["sink"])
        of["importance"] = (x.detach() * gradient)[0].unflatten(-1, (heads, -1)).sum((0, 2)).abs()
        columns = {name: values.double().tolist() for name, values in of.items()}
        rows += [
            {"layer": layer, "head": head, **{name: round(values[head], 6) for name, values in columns.items()}}
            for head in range(heads)
        ]
    return rows


def of_attention(call: AttentionCall) -> dict[str, Tensor]:
    """The quantities of the heads of one layer that its attention alone gives, ``[H]`` each; the batch has one row."""
    weights, allowed = call.attention()[0].float(), call.allowed()  # [H, T, S]
    size = weights.abs()
    total = size.sum(-1, keepdim=True).clamp_min(torch.finfo(size.dtype).tiny)
    shares = size / total
    entropy = torch.special.entr(shares).sum(-1).mean(-1)
    of = {"sink": shares[..., 0].mean(-1), "entropy": entropy, "keys": entropy.exp()}
    if call.q2 is not None:
        places = allowed.expand(1, *weights.shape)[0].sum((-1, -2))
        of["negative"] = (weights < 0).sum((-1, -2)) / places
        of["negative_mass"] = weights.clamp_max(0).abs().sum((-1, -2)) / size.sum((-1, -2))
    for name, values in (("lam", call.lam), ("gate", call.first)):
        if values is not None:
            each = values.float().expand(1, len(weights), weights.shape[1], 1)[0, ..., 0]  # [H, T]
            of |= {name: each.mean(-1), f"{name}_spread": each.std(-1, correction=0)}
    if len(weights) > 1:
        flat = F.normalize(weights.flatten(1), dim=-1)
        of["distance"] = 1 - _mean_of_others(flat @ flat.T)
        if call.v is not None:
            of["cka"] = _mean_of_others(linear_cka(weighted(weights[None], call.v.float())[0]))
    return of


def linear_cka(outputs: Tensor) -> Tensor:
    """Linear CKA of each pair of heads: ``[H, T, d]`` -> ``[H, H]``, 1 for heads equal up to rotation and scale."""
    centred = outputs.double() - outputs.double().mean(1, keepdim=True)
    kernels = F.normalize((centred @ centred.mT).flatten(1), dim=-1)  # [H, T * T]
    return (kernels @ kernels.T).float()


def _mean_of_others(pairs: Tensor) -> Tensor:
    """The mean of each row of ``[H, H]`` without its diagonal."""
    return (pairs.sum(-1) - pairs.diagonal()) / (len(pairs) - 1)


def _projection(layer: nn.Module) -> nn.Module | None:
    """The output projection of a layer's attention; None for a layer of a hybrid that has no attention."""
    for name, module in layer.named_modules():
        *path, last = name.split(".")
        if last in _OUT and any("attn" in part or "attention" in part for part in path):
            return module
    return None
