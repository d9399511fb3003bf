"""DEX: a differential extension of pretrained softmax attention [arXiv 2505.16333].

    model = differentiate(model, kind="dex")      # the same logits
    ...                                           # train; lambda follows the steps
    fold(model)                                   # a plain softmax model again, with the trained model's logits

There is no second map. From the output O of each chosen head goes a part of itself, before W_O, with one matrix W_D for
the heads of a layer:

    O' = O - lambda(t) O W_D,    lambda(t) = (1 - a) (t / T) lambda_init + a lambda_learned,    a = min(1, t / T)

lambda_init is that of the paper's depth schedule, and t / T the finished share of training. As W_D and lambda(0) are 0,
the logits are the source's at the start. At the end lambda is the learned one, and ``I - lambda W_D`` is a matrix that
folds into W_O. W_D starts at 0, so -W_D is as good a start: to subtract or to add is the same model.

Legend: B batch, T tokens, n heads of width d.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from diff_transformer.errors import UserError
from diff_transformer.model.lambdas import lambda_init
from diff_transformer.model.parts import DEX, ENTRY, Parts, attentions, read_part


class Dex(nn.Module):
    """The extension of one layer: heads ``[B, T, n d]`` to the same shape.

    Parameters ``weight [d, d]`` (W_D) and ``lam [1]`` (the learned lambda); buffers ``progress [1]`` (t / T) and
    ``chosen [n]``, 1 for a head that is extended and 0 for others.
    """

    progress: Tensor
    chosen: Tensor

    def __init__(self, n: int, d: int, start: float):
        super().__init__()
        self.weight, self.lam = nn.Parameter(torch.empty(d, d)), nn.Parameter(torch.empty(1))
        self.register_buffer("progress", torch.empty(1))
        self.register_buffer("chosen", torch.empty(n))
        self.start = start

    def present_lambda(self) -> Tensor:
        """lambda(t), fp32 ``[1]``."""
        share = self.progress.float().clamp(0, 1)
        return (1 - share) * share * self.start + share * self.lam.float()

    def forward(self, heads: Tensor) -> Tensor:
        each = heads.unflatten(-1, (-1, self.weight.shape[0]))  # [B, T, n, d]
        factor = (self.present_lambda() * self.chosen.float())[:, None].to(each.dtype)  # [n, 1]
        return (each - factor * (each @ self.weight)).flatten(-2)


@torch.no_grad()
def extend(model: Any, parts: Sequence[Parts], heads: Sequence[Sequence[int]] | None = None) -> None:
    """Add the extension to each attention module of ``parts``; ``heads`` are those that it changes, all by default.

    Raises:
        UserError: for heads that a layer does not have, or of another number of layers.
    """
    if heads is not None and len(heads) != len(parts):
        raise UserError(f"heads has {len(heads)} layers, and the model has {len(parts)}; give a list for each")
    for place, part in enumerate(parts):
        chosen = range(part.n) if heads is None else heads[place]
        if wrong := [head for head in chosen if not 0 <= head < part.n]:
            raise UserError(f"heads[{place}] has {wrong[0]}, and the layer has {part.n} heads")
        like = part.q.weight
        module = Dex(part.n, part.d, lambda_init(place)).to(device=like.device, dtype=like.dtype)
        for tensor in (module.weight, module.lam, module.progress, module.chosen):
            tensor.zero_()
        module.chosen[[*chosen]] = 1
        attention: Any = part.module
        attention.add_module(DEX, module)
        attention.dex_out = next(name for name, child in attention.named_children() if child is part.out)
        _hook(attention, part.out)
        attention.dex_follows = attention.register_forward_pre_hook(_follow)


def _extended(attention: nn.Module, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Forward pre-hook of W_O; the extension is looked up, as PEFT may have wrapped it."""
    return getattr(attention, DEX)(args[0]), *args[1:]


def _follow(attention: Any, _: tuple[Any, ...]) -> None:
    """Forward pre-hook of attention: the extension acts before what W_O is now, which PEFT wraps and merges."""
    out = getattr(attention, attention.dex_out)
    if attention.dex_id not in out._forward_pre_hooks:
        attention.dex_hook.remove()
        _hook(attention, out)


def _hook(attention: Any, out: nn.Module) -> None:
    """Let the extension act before ``out``; ``dex_id`` is for ``_follow``, as torch.compile reads no handle."""
    attention.dex_hook = out.register_forward_pre_hook(partial(_extended, attention))
    attention.dex_id = attention.dex_hook.id


def extensions(model: nn.Module) -> Iterator[Dex]:
    return (module for module in model.modules() if isinstance(module, Dex))


def set_progress(model: nn.Module, share: float) -> None:
    """Set t / T of lambda's schedule, from 0 to 1, in every layer of a model with DEX; others stay as they are."""
    for module in extensions(model):
        module.progress.fill_(share)


def fold(model: Any) -> Any:
    """Multiply ``I - lambda W_D`` into W_O of the chosen heads, in place: a softmax model with equal logits.

    Lambda is the present one. The model keeps its class, loses the extension and its entry in the configuration, and
    can be served by any engine.

    Raises:
        UserError: for a model without DEX, or one with adapters that are not merged.
    """
    if (getattr(model.config, ENTRY, None) or {}).get("kind") != "dex":
        raise UserError(f"{type(model).__name__} has no DEX to fold; give a model of differentiate(model, kind='dex')")
    for part in [read_part(path, attention) for path, attention in attentions(model)]:
        attention: Any = part.module
        attention.dex_hook.remove()
        attention.dex_follows.remove()
        _fold(attention._modules.pop(DEX), part)
    delattr(model.config, ENTRY)
    return model


@torch.no_grad()
def _fold(module: Dex, part: Parts) -> None:
    weight = part.out.weight  # [width, n d], of Conv1D [n d, width]
    rows = weight.double() if isinstance(part.out, Conv1D) else weight.double().T
    change = torch.eye(part.d, device=weight.device, dtype=torch.float64) - module.present_lambda() * module.weight
    each = rows.unflatten(0, (part.n, part.d))  # [n, d, width]
    folded = torch.where(module.chosen[:, None, None] > 0, change.double() @ each, each).flatten(0, 1)
    weight.copy_(folded if isinstance(part.out, Conv1D) else folded.T)


def trained_by_dex(model: Any) -> list[nn.Parameter]:
    """The parameters that DEX trains: W_K, W_V, W_O, W_D and the learned lambda of each layer.

    Raises:
        UserError: for a model without DEX, or a matrix that holds queries too, which DEX does not train.
    """
    if not any(extensions(model)):
        raise UserError(f"{type(model).__name__} has no DEX to train; give a model of differentiate(model, kind='dex')")
    found: list[nn.Parameter] = []
    for path, attention in attentions(model):
        if not hasattr(attention, "k_proj"):
            raise UserError(
                f"train.weights=dex trains keys and values without queries, and {type(attention).__name__} has them in "
                "one matrix; give train.weights=attention, or leave the arm dex out"
            )
        part = read_part(path, attention)
        for trained in (part.k, part.v, part.out, attention.get_submodule(DEX)):
            found += trained.parameters()
    return found


@torch.no_grad()
def heads_by_entropy(model: Any, ids: Tensor, share: float = 0.5) -> list[list[int]]:
    """Of each layer the heads with the highest entropy of attention on a text, for ``differentiate(..., heads=)``.

    Args:
        ids: int64 ``[B, T]``, on the model's device.
        share: of the heads that are chosen, above 0 and at most 1; the paper takes half.
    """
    if not 0 < share <= 1:
        raise UserError(f"share is {share}; it must be above 0 and at most 1")
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        maps = model(ids, output_attentions=True).attentions
    finally:
        model.set_attn_implementation(before)
    entropies = [torch.special.entr(layer.float()).sum(-1).mean((0, 2)) for layer in maps]  # [n] each
    return [sorted(each.topk(max(1, round(share * len(each)))).indices.tolist()) for each in entropies]
