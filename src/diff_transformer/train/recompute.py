"""Activations that a step keeps for its backward pass, and those it recomputes (``train.activation_checkpointing``)."""

from collections import defaultdict, deque
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from diff_transformer.model.config import DiffTransformerConfig

# Operators whose results "selective" keeps: matrix products, and attention as a whole, by whichever backend.
_KEPT = (
    "aten::mm", "aten::addmm", "aten::_scaled_mm", "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu", "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention", "torch_attn::_varlen_attn", "diff_transformer::blockwise",
    "diff_transformer::triton",
)  # fmt: skip

ATTENTION_DROPOUT = ("attention_dropout", "attn_pdrop")  # in the configurations of transformers


def recompute(model: Any, what: str) -> None:
    """Recompute, in the backward pass of each layer, nothing ("none"), all of it ("full"), or what is cheap
    ("selective"): norms, rotary embedding and activation functions, but neither products nor attention. Where
    attention itself draws dropout, or there are no layers, "selective" is "full"."""
    draws = any(getattr(model.config, name, 0) for name in ATTENTION_DROPOUT)
    if what == "full" or (what == "selective" and (draws or not hasattr(model.base_model, "layers"))):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    elif what == "selective":
        own = isinstance(model.config, DiffTransformerConfig)  # which draws nothing
        for layer in model.base_model.layers:
            layer.forward = partial(_selectively, layer.forward, not own)


def _selectively(forward, draws: bool, *inputs, **options):
    if not torch.is_grad_enabled():
        return forward(*inputs, **options)
    return checkpoint(forward, *inputs, use_reentrant=False, context_fn=_contexts, preserve_rng_state=draws, **options)


def _is_kept(operator: Any) -> bool:
    name = operator.name() if isinstance(operator, torch._ops.OpOverload) else str(operator)
    return name.partition(".")[0] in _KEPT


def _policy(context: Any, operator: Any, *inputs: Any, **options: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if _is_kept(operator) else CheckpointPolicy.PREFER_RECOMPUTE


def _contexts() -> tuple:
    """PyTorch's contexts in a compiled layer; else ours, which do not demand the same operators of both passes.

    Under FSDP2 these differ: hooks of a module within the layer run in the first pass alone. They also keep such a
    layer from being compiled, which is known here, when the layer runs, and not before.
    """
    if torch.compiler.is_compiling():
        return create_selective_checkpoint_contexts(_policy)
    results: dict[Any, deque] = defaultdict(deque)
    return _Keep(results), _Reuse(results)


class _Keep(TorchDispatchMode):
    """Keeps the results of the first pass."""

    def __init__(self, results: dict[Any, deque]):
        super().__init__()
        self.results = results

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if _is_kept(func):
            self.results[func].append(tree_map(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, out))
        return out


class _Reuse(_Keep):
    """Gives the results of the first pass to the second, in their order."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.results[func].popleft() if _is_kept(func) else func(*args, **(kwargs or {}))
