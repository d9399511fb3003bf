"""The attention of other Hugging Face models, DiffLlama among them, seen from the experiments."""

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from diff_transformer.evals.attention_call import AttentionCall, Change, weighted

INTERFACE = "ALL_ATTENTION_FUNCTIONS"  # the name in transformers' modelling files


class Foreign:
    """The attention modules of a Hugging Face model, which find their function in transformers' interface."""

    def __init__(self, model: nn.Module, handle: Callable):
        self.model, self.handle = model, handle
        self.modules = {id(module) for module in model.modules()}
        self.numbers: dict[int, int] = {}
        self.halves: set[int] = set()  # DiffLlama's layers that have made the first of their two calls

    def namespaces(self) -> list[tuple[Any, Any]]:
        """(modelling file, the attention interface it uses), for all classes in the model.

        Raises:
            ValueError: if no file uses it.
        """
        names = {cls.__module__ for module in self.model.modules() for cls in type(module).__mro__}
        names.discard("transformers.modeling_utils")  # where the interface is defined; no attention is computed there
        files = [sys.modules[name] for name in sorted(names) if hasattr(sys.modules.get(name), INTERFACE)]
        if not files:
            raise ValueError(
                f"{type(self.model).__name__} has neither this package's attention nor transformers' attention "
                "interface, so its attention cannot be looked into; give a Hugging Face causal LM such as Llama, Qwen "
                "or GPT-2, or convert it first"
            )
        return [(file, getattr(file, INTERFACE)) for file in files]

    def check(self, *_: Any) -> None:
        """A forward hook: raise ValueError if the model has computed without one call of its attention being seen."""
        if not self.numbers:
            raise ValueError(
                f"{type(self.model).__name__} computes attention without transformers' attention interface (it is set "
                f"to {getattr(self.model.config, '_attn_implementation', None)!r}); load it with "
                "attn_implementation='sdpa'"
            )

    def wrapped(self, function: Callable) -> Callable:
        """An attention function of the interface, by way of ``handle`` for the modules of this model."""

        def attend(
            module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *rest: Any, **kwargs: Any
        ) -> Any:
            def original():
                return function(module, query, key, value, attention_mask, *rest, **kwargs)

            if id(module) not in self.modules:
                return original()
            call = self._call(module, query, key, attention_mask, rest, kwargs)
            again = id(module) in self.halves
            if call.lam is not None:
                self.halves ^= {id(module)}

            def finish(change: Change) -> tuple[Tensor, None]:
                blocks = [
                    weighted(torch.cat(call.maps(rows, change), dim=1), value)  # DiffLlama subtracts by itself
                    for rows in call.blocks()
                ]
                return torch.cat(blocks, dim=2).transpose(1, 2).contiguous(), None

            return self.handle(call, original, finish, again)

        return attend

    def _call(self, module: Any, q: Tensor, k: Tensor, mask: Any, rest: tuple, kwargs: dict) -> AttentionCall:
        number = getattr(module, "layer_idx", None)
        layer = self.numbers.setdefault(id(module), len(self.numbers) if number is None else number)
        other = [name for name in ("s_aux", "position_bias") if kwargs.get(name) is not None]
        if other or rest or not (mask is None or (isinstance(mask, Tensor) and mask.dim() == 4)):
            what = f"with {', '.join(other)}" if other else "as the implementation it is set to calls it"
            raise ValueError(
                f"the attention of {type(module).__name__}, {what}, is not read here; load the model with "
                "attn_implementation='sdpa', or give another"
            )
        causal = kwargs.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        scale = kwargs.get("scaling")
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        call = AttentionCall(layer, q, k, scale, mask, bool(causal) and mask is None, softcap=kwargs.get("softcap"))
        if not _is_diff_llama(module):
            return call
        (q1, q2), (k1, k2) = q.chunk(2, dim=1), k.chunk(2, dim=1)  # pairs: head i and head i + h
        return replace(call, q1=q1, k1=k1, q2=q2, k2=k2, lam=_diff_llama_lambda(module))


class Interface:
    """Stands in for transformers' ``AttentionInterface`` in a modelling file."""

    def __init__(self, original: Any, foreign: Foreign):
        self._original, self._foreign = original, foreign

    def get_interface(self, *args: Any) -> Callable:
        return self._foreign.wrapped(self._original.get_interface(*args))

    def __getitem__(self, name: str) -> Callable:
        return self._foreign.wrapped(self._original[name])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def _is_diff_llama(module: nn.Module) -> bool:
    return any(cls.__name__ == "DiffLlamaAttention" for cls in type(module).__mro__)


def _diff_llama_lambda(module: Any) -> Tensor:
    """As DiffLlama computes it: each exponential is rounded to the model's dtype before they are subtracted."""
    dtype = module.q_proj.weight.dtype
    first = torch.exp((module.lambda_q1 * module.lambda_k1).sum(dtype=torch.float32)).to(dtype)
    second = torch.exp((module.lambda_q2 * module.lambda_k2).sum(dtype=torch.float32)).to(dtype)
    return (first - second + module.lambda_init).float()
