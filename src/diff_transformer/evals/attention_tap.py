"""Read the attention of any causal LM, or change its logits, layer by layer.

    with tapped_attention(model, tap):        tap(call) at each layer; the model's outputs do not change
    with changed_logits(model, plan):         each layer computes softmax(plan(call)(logits)) V instead

A ``call`` is the same for this package's attention, for DiffLlama, and for the softmax attention of every model that
goes through transformers' attention interface (Llama, Qwen, GPT-2, ...).
"""

import sys
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from diff_transformer.errors import UserError
from diff_transformer.evals.attention_call import (
    AttentionCall,
    Change,
    Changes,
    Finish,
    Mean,
    Original,
    Tap,
    weighted,
)

INTERFACE = "ALL_ATTENTION_FUNCTIONS"  # the name in transformers' modelling files


@contextmanager
def tapped_attention(model: nn.Module, tap: Tap) -> Generator[None]:
    """Call ``tap(call)`` at each layer's attention. The outputs of the model are bit-identical to those without it.

    Raises:
        ValueError: for a model whose attention cannot be read, saying why.
    """

    def look(call: AttentionCall, original: Original, finish: Finish, again: bool) -> Any:
        if not again:
            tap(call)
        return original()

    with _intercepted(model, look):
        yield


@contextmanager
def changed_logits(model: nn.Module, plan: Changes) -> Generator[None]:
    """Recompute every layer's attention from changed logits, in fp32 and in blocks of queries.

    ``plan(call)`` returns a function of the logits of a block (a tuple of one map or two, ``[B, H, t, S]``) and of the
    mask of allowed keys, which returns the logits to use. On exit, also after an exception, the model is as before.

    Raises:
        ValueError: for a model whose attention cannot be read, saying why.
    """

    def recompute(call: AttentionCall, original: Original, finish: Finish, again: bool) -> Any:
        return finish(plan(call))

    with _intercepted(model, recompute):
        yield


def output_of(layer_output: Any) -> Tensor:
    """The hidden states ``[B, T, width]`` in a layer's output, which is a tensor or a tuple that begins with it."""
    return layer_output[0] if isinstance(layer_output, tuple) else layer_output


@contextmanager
def _intercepted(model: nn.Module, handle: Callable) -> Generator[None]:
    """Replace the result of each attention by ``handle(call, original, finish, again)``.

    ``original()`` computes the layer's own result, ``finish(change)`` the result from changed logits. ``again`` is True
    for the second of two calls that a layer makes with the same queries and keys.
    """
    from diff_transformer.model.attention import Attention

    own = [module for module in model.modules() if isinstance(module, Attention)]
    with ExitStack() as stack:
        if own:
            for layer, module in enumerate(own):
                stack.enter_context(_attribute(module.core, "attend", _own_attention(module.core, layer, handle)))
            yield
            return
        foreign = _ForeignAttention(model, handle)
        for namespace, interface in foreign.namespaces():
            stack.enter_context(_attribute(namespace, INTERFACE, _Interface(interface, foreign)))
        body = getattr(model, "base_model", model)
        stack.callback(body.register_forward_hook(foreign.check).remove)
        yield


@contextmanager
def _attribute(owner: Any, name: str, value: Any) -> Generator[None]:
    """Set ``owner.name`` to ``value`` inside the context."""
    before = vars(owner)
    there, old = name in before, before.get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if there:
            setattr(owner, name, old)
        else:
            delattr(owner, name)


def _own_attention(core: Any, layer: int, handle: Callable) -> Callable:
    """``core.attend`` of this package's attention, passed through ``handle``."""
    before = core.attend

    def attend(q: Tensor, k: Tensor, v: Tensor, lam: Any, visible: Any, first: Tensor | None = None) -> Tensor:
        scale, (mask, is_causal, window) = q.shape[-1] ** -0.5, visible[:3]
        if core.variant.maps == 2:
            q1, q2, k1, k2 = core.split(q, k)
            lam = torch.as_tensor(lam, dtype=torch.float32, device=q.device) if isinstance(lam, float) else lam
            mean = _dint_mean(core, q, k, visible) if core.variant.means else None
            call = AttentionCall(
                layer, q1, k1, scale, mask, is_causal, q2, k2, lam, mean=mean, window=window, first=first, v=v
            )
        else:
            call = AttentionCall(layer, q, k, scale, mask, is_causal, window=window, first=first, v=v)

        def finish(change: Change) -> Tensor:
            return torch.cat([weighted(call.attention(rows, change), v) for rows in call.blocks()], dim=2)

        return handle(call, lambda: before(q, k, v, lam, visible, first), finish, False)

    return attend


def _dint_mean(core: Any, q: Tensor, k: Tensor, visible: Any) -> Mean:
    """G of DINT's ``core``, block by block: the contribution of other queries is computed from their maps."""

    def mean(call: AttentionCall, rows: slice, first: Tensor, change: Change | None) -> Tensor:
        weights, fully_masked = core.counted(q, k, visible)
        running = core.is_causal or visible.is_causal
        start, stop, _ = rows.indices(q.shape[2])
        others = [(0, start)] if running else [(0, start), (stop, q.shape[2])]
        total = first.new_zeros(*first.shape[:2], 1, first.shape[3])
        for begin, end in others:
            for block in call.blocks():
                part = slice(max(begin, block.start), min(end, block.stop))
                if part.start < part.stop:
                    total = total + (call.maps(part, change)[0] * weights[:, :, part]).sum(2, keepdim=True)
        values = first * weights[:, :, rows]
        counts = weights.to(first.dtype)
        if running:
            found = (total + values.cumsum(2)) / counts.cumsum(2)[:, :, rows].clamp_min(1)
        else:
            found = ((total + values.sum(2, keepdim=True)) / counts.sum(2, keepdim=True).clamp_min(1)).expand_as(first)
        return found if fully_masked is None else found.masked_fill(fully_masked[:, :, rows], 0)

    return mean


class _ForeignAttention:
    """The attention modules of other Hugging Face models, which look their function up in transformers' interface."""

    def __init__(self, model: nn.Module, handle: Callable):
        self.model, self.handle = model, handle
        self.modules = {id(module) for module in model.modules()}
        self.numbers: dict[int, int] = {}
        self.halves: set[int] = set()  # DiffLlama layers between the first and the second of their two calls

    def namespaces(self) -> list[tuple[Any, Any]]:
        """(modelling file, its attention interface) for all classes in the model.

        Raises:
            ValueError: if none uses the interface.
        """
        names = {cls.__module__ for module in self.model.modules() for cls in type(module).__mro__}
        names.discard("transformers.modeling_utils")  # defines the interface and computes no attention
        files = [sys.modules[name] for name in sorted(names) if hasattr(sys.modules.get(name), INTERFACE)]
        if not files:
            raise UserError(
                f"{type(self.model).__name__} has neither this package's attention nor transformers' attention "
                "interface, so its attention cannot be read; give a Hugging Face causal LM such as Llama, Qwen "
                "or GPT-2, or convert it first"
            )
        return [(file, getattr(file, INTERFACE)) for file in files]

    def check(self, *_: Any) -> None:
        """A forward hook: raise ValueError if a forward pass called no attention through the interface."""
        if not self.numbers:
            raise UserError(
                f"{type(self.model).__name__} computes attention without transformers' attention interface (it is set "
                f"to {getattr(self.model.config, '_attn_implementation', None)!r}); load it with "
                "attn_implementation='sdpa'"
            )

    def wrapped(self, function: Callable) -> Callable:
        """An attention function of the interface, passed through ``handle`` for the modules of this model."""

        def attend(
            module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *rest: Any, **kwargs: Any
        ) -> Any:
            def original():
                return function(module, query, key, value, attention_mask, *rest, **kwargs)

            if id(module) not in self.modules:
                return original()
            call = self._call(module, query, key, value, attention_mask, rest, kwargs)
            again = id(module) in self.halves
            twice = _is_diff_llama(module)
            if twice:
                self.halves ^= {id(module)}

            def finish(change: Change) -> tuple[Tensor, None]:
                blocks = [
                    weighted(
                        torch.cat(call.maps(rows, change), dim=1)  # DiffLlama subtracts by itself
                        if twice
                        else call.attention(rows, change),
                        value,
                    )
                    for rows in call.blocks()
                ]
                return torch.cat(blocks, dim=2).transpose(1, 2).contiguous(), None

            return self.handle(call, original, finish, again)

        return attend

    def _call(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, rest: tuple, kwargs: dict
    ) -> AttentionCall:
        number = getattr(module, "layer_idx", None)
        layer = self.numbers.setdefault(id(module), len(self.numbers) if number is None else number)
        other = [name for name in ("s_aux", "position_bias") if kwargs.get(name) is not None]
        if other or rest or not (mask is None or (isinstance(mask, Tensor) and mask.dim() == 4)):
            what = f"with {', '.join(other)}" if other else "as the implementation it is set to calls it"
            raise UserError(
                f"the attention of {type(module).__name__}, {what}, is not supported; load the model with "
                "attn_implementation='sdpa', or give another"
            )
        causal = kwargs.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        scale = kwargs.get("scaling")
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        is_causal = bool(causal) and mask is None
        call = AttentionCall(layer, q, k, scale, mask, is_causal, softcap=kwargs.get("softcap"), v=v)
        lam = kwargs.get("differential_lambda")
        if lam is not None:  # of a model that differentiate has changed
            from diff_transformer.model.differentiate import maps_of

            q1, q2, k1, k2 = maps_of(q, k, v)
            return replace(call, q1=q1, k1=k1, q2=q2, k2=k2, lam=lam, first=kwargs.get("differential_gate"))
        if not _is_diff_llama(module):
            return call
        (q1, q2), (k1, k2) = q.chunk(2, dim=1), k.chunk(2, dim=1)  # pairs: head i and head i + h
        return replace(call, q1=q1, k1=k1, q2=q2, k2=k2, lam=_diff_llama_lambda(module), v=None)


class _Interface:
    """Replaces transformers' ``AttentionInterface`` in a modelling file."""

    def __init__(self, original: Any, foreign: _ForeignAttention):
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
    """Lambda as DiffLlama computes it: each exponential is rounded to the model's dtype before the subtraction."""
    dtype = module.q_proj.weight.dtype
    first = torch.exp((module.lambda_q1 * module.lambda_k1).sum(dtype=torch.float32)).to(dtype)
    second = torch.exp((module.lambda_q2 * module.lambda_k2).sum(dtype=torch.float32)).to(dtype)
    return (first - second + module.lambda_init).float()
