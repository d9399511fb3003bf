"""Looking inside the attention of any causal LM, and changing its logits, layer by layer.

    with tapped_attention(model, tap):        tap(call) at each layer; the model computes what it always does
    with changed_logits(model, plan):         each layer computes softmax(plan(call)(logits)) V instead

A ``call`` is the same for this package's attention, for DiffLlama, and for the softmax attention of every model that
goes through transformers' attention interface (Llama, Qwen, GPT-2, ...). Legend: B batch, H heads of a map, G key
heads, T queries, S keys, d head width.
"""

import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

BLOCK = 1 << 22  # logits held at a time


@dataclass(frozen=True)
class AttentionCall:
    """What the attention of one layer computes from: queries and keys after the rotary embedding. Not to be changed.

    Attributes:
        layer: counted from 0.
        q1, k1: ``[B, H, T, d]``, ``[B, G, S, d]``: the first map, or the only one.
        scale: factor of ``q k^T``.
        mask: bool (True = attend) or additive, broadcastable to ``[B, H, T, S]``, or None.
        is_causal: whether a causal limit holds beside the mask, aligned to the lower right corner.
        q2, k2, lam: the second map and lambda (broadcastable to ``[B, H, T, 1]``); None for softmax attention.
        softcap: c of ``c tanh(logits / c)``, where the model has it.
        mean: for DINT, ``mean(call, rows, first, change)``: the mean of the first map that its attention adds, for the
            queries ``rows`` of which ``first`` is the map.
        window: of the causal limit, as in ``diff_attention``.
    """

    layer: int
    q1: Tensor
    k1: Tensor
    scale: float
    mask: Tensor | None
    is_causal: bool
    q2: Tensor | None = None
    k2: Tensor | None = None
    lam: Tensor | None = None
    softcap: float | None = None
    mean: "Mean | None" = None
    window: int | None = None

    def blocks(self, elements: int = BLOCK) -> Iterator[slice]:
        """Ranges of queries that together are all, each with at most ``elements`` logits in all its maps."""
        batch, heads, queries = self.q1.shape[:3]
        maps = 1 if self.q2 is None else 2
        size = max(1, elements // (batch * heads * self.k1.shape[2] * maps))
        return (slice(start, min(start + size, queries)) for start in range(0, queries, size))

    def logits(self, rows: slice = slice(None)) -> tuple[Tensor, ...]:
        """``scale q k^T`` of one map or two, each ``[B, H, t, S]`` in fp32 (fp64 for fp64 inputs), without the mask."""
        found = [_products(self.q1[:, :, rows], self.k1) * self.scale]
        if self.q2 is not None and self.k2 is not None:
            found.append(_products(self.q2[:, :, rows], self.k2) * self.scale)
        if self.softcap is not None:
            found = [self.softcap * (x / self.softcap).tanh() for x in found]
        return tuple(found)

    def allowed(self, rows: slice = slice(None)) -> Tensor:
        """True where a query may attend to a key: bool, broadcastable to ``[B, H, t, S]``, of at least ``[t, S]``."""
        queries, keys = self.q1.shape[2], self.k1.shape[2]
        seen = torch.ones(len(range(queries)[rows]), keys, dtype=torch.bool, device=self.q1.device)
        if self.is_causal:
            own = torch.arange(keys - queries, keys, device=seen.device)[rows, None]
            place = torch.arange(keys, device=seen.device)
            seen = place <= own
            if self.window is not None:
                seen = seen & (place > own - self.window)
        mask = self._mask(rows)
        if mask is None:
            return seen
        return seen & (mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2)

    def maps(self, rows: slice = slice(None), change: "Change | None" = None) -> tuple[Tensor, ...]:
        """softmax of the (changed) logits over the allowed keys, one map or two; a row that sees nothing is 0."""
        allowed, logits = self.allowed(rows), self.logits(rows)
        if change is not None:
            logits = change(logits, allowed)
        mask = self._mask(rows)
        if mask is not None and mask.dtype != torch.bool:
            logits = tuple(x + mask for x in logits)
        blind = ~allowed.any(-1, keepdim=True)
        hidden = ~allowed & ~blind
        return tuple(x.masked_fill(hidden, float("-inf")).softmax(-1).masked_fill(blind, 0.0) for x in logits)

    def attention(self, rows: slice = slice(None), change: "Change | None" = None) -> Tensor:
        """``A1 - lambda A2`` (DINT: ``+ lambda G``), or the map of softmax attention: ``[B, H, t, S]``."""
        maps = self.maps(rows, change)
        if self.lam is None:
            return maps[0]
        difference = self.difference(maps, rows)
        if self.mean is None:
            return difference
        return difference + self.lam * self.mean(self, rows, maps[0], change)

    def difference(self, maps: tuple[Tensor, ...], rows: slice) -> Tensor:
        """``A1 - lambda A2`` of two maps of the queries ``rows``."""
        assert self.lam is not None
        lam = self.lam[..., rows, :] if self.lam.dim() > 1 and self.lam.shape[-2] > 1 else self.lam
        return maps[0] - lam * maps[1].repeat_interleave(maps[0].shape[1] // maps[1].shape[1], dim=1)

    def _mask(self, rows: slice) -> Tensor | None:
        if self.mask is None:
            return None
        mask = self.mask[..., : self.k1.shape[2]]
        return mask[..., rows, :] if mask.shape[-2] > 1 else mask


Tap = Callable[[AttentionCall], None]
Change = Callable[[tuple[Tensor, ...], Tensor], tuple[Tensor, ...]]  # (logits of each map, allowed) -> logits
Mean = Callable[[AttentionCall, slice, Tensor, "Change | None"], Tensor]
Plan = Callable[[AttentionCall], Change]
_Original = Callable[[], Any]
_Finish = Callable[[Change], Any]  # from changed logits, what the layer goes on with


@contextmanager
def tapped_attention(model: nn.Module, tap: Tap) -> Generator[None]:
    """Call ``tap(call)`` at each layer's attention. Every output of the model is, bit for bit, what it is without.

    Raises:
        ValueError: for a model whose attention cannot be seen, saying why.
    """

    def look(call: AttentionCall, original: _Original, finish: _Finish, again: bool) -> Any:
        if not again:
            tap(call)
        return original()

    with _intercepted(model, look):
        yield


@contextmanager
def changed_logits(model: nn.Module, plan: Plan) -> Generator[None]:
    """Recompute every layer's attention, in fp32 and in blocks of queries, with the logits that ``plan`` makes.

    ``plan(call)`` gives a function that takes the logits of a block (a tuple of one map or two, ``[B, H, t, S]``) and
    where they are allowed, and returns the logits to use. Afterwards, also after an exception, the model is as before.

    Raises:
        ValueError: for a model whose attention cannot be seen, saying why.
    """

    def recompute(call: AttentionCall, original: _Original, finish: _Finish, again: bool) -> Any:
        return finish(plan(call))

    with _intercepted(model, recompute):
        yield


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The decoder layers of a causal LM, in order: what they return is the residual stream after them.

    Raises:
        ValueError: for a model without a list of ``config.num_hidden_layers`` layers.
    """
    config = getattr(model, "config", None)
    count = None if config is None else getattr(config.get_text_config(), "num_hidden_layers", None)
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and count and len(module) == count:
            return list(module)
    raise ValueError(
        f"{type(model).__name__} has no list of layers as long as its configuration says (num_hidden_layers: {count}); "
        "give a Hugging Face causal LM"
    )


def output_of(layer_output: Any) -> Tensor:
    """The hidden states ``[B, T, width]`` of what a layer returns: a tensor, or a tuple that begins with it."""
    return layer_output[0] if isinstance(layer_output, tuple) else layer_output


@contextmanager
def _intercepted(model: nn.Module, handle: Callable) -> Generator[None]:
    """``handle(call, original, finish, again)`` instead of each attention; its result is what the layer goes on with.

    ``finish(change)`` computes that result from changed logits; ``again`` is True where a layer that calls its
    attention twice with the same queries and keys does so for the second time.
    """
    from diff_transformer.model.attention import Attention

    own = [module for module in model.modules() if isinstance(module, Attention)]
    with ExitStack() as stack:
        if own:
            for layer, module in enumerate(own):
                stack.enter_context(_attribute(module.core, "attend", _own_attention(module.core, layer, handle)))
            yield
            return
        foreign = _Foreign(model, handle)
        for namespace, interface in foreign.namespaces():
            stack.enter_context(_attribute(namespace, _INTERFACE, _Interface(interface, foreign)))
        body = getattr(model, "base_model", model)
        stack.callback(body.register_forward_hook(foreign.check).remove)
        yield


@contextmanager
def _attribute(owner: Any, name: str, value: Any) -> Generator[None]:
    """``owner.name`` is ``value`` inside the context, and afterwards what it was."""
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
    """``core.attend`` of this package's attention, by way of ``handle``."""
    from diff_transformer.model.cores import DiffCore
    from diff_transformer.model.dint import DintCore, Rows

    before = core.attend

    def attend(q: Tensor, k: Tensor, v: Tensor, lam: Any, mask: Tensor | None, is_causal: bool, **more: Any) -> Tensor:
        scale, window = q.shape[-1] ** -0.5, core.reach(is_causal)
        given = more.get("rows", Rows())
        if isinstance(core, DiffCore):
            q1, q2, k1, k2 = core.split(q, k)
            lam = torch.as_tensor(lam, dtype=torch.float32, device=q.device) if isinstance(lam, float) else lam
            mean = _dint_mean(core, q, k, mask, is_causal, given) if isinstance(core, DintCore) else None
            call = AttentionCall(layer, q1, k1, scale, mask, is_causal, q2, k2, lam, mean=mean, window=window)
        else:
            call = AttentionCall(layer, q, k, scale, mask, is_causal, window=window)

        def finish(change: Change) -> Tensor:
            if not isinstance(core, DintCore):
                return torch.cat([_weighted(call.attention(rows, change), v) for rows in call.blocks()], dim=2)
            parts = []
            for rows in call.blocks():
                maps = call.maps(rows, change)
                parts.append((_weighted(call.difference(maps, rows), v), _weighted(maps[0], v)))
            difference, first = (torch.cat(blocks, dim=2) for blocks in zip(*parts, strict=True))
            counted = core.counted(q, k, mask, is_causal, given)
            return core.with_means(difference, first, lam, counted, is_causal, given)

        return handle(call, lambda: before(q, k, v, lam, mask, is_causal, **more), finish, False)

    return attend


def _dint_mean(core: Any, q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool, given: Any) -> Mean:
    """G of DINT's ``core``, block by block: what the queries before ``rows`` add is computed from their maps."""
    continues = given.continues(q.shape[2])

    def mean(call: AttentionCall, rows: slice, first: Tensor, change: Change | None) -> Tensor:
        if continues:
            raise ValueError(
                "the attention of 'dint' is a mean over all queries so far, and the cache does not keep their maps; "
                "give the whole sequence in one call"
            )
        weights, blind = core.counted(q, k, mask, is_causal, given)
        running = core.is_causal or is_causal
        start, stop, _ = rows.indices(q.shape[2])
        others = [(0, start)] if running else [(0, start), (stop, q.shape[2])]
        total = first.new_zeros(*first.shape[:2], 1, first.shape[3])
        for begin, end in others:
            for block in call.blocks():
                part = slice(max(begin, block.start), min(end, block.stop))
                if part.start < part.stop:
                    total = total + (call.maps(part, change)[0] * weights[:, :, part]).sum(2, keepdim=True)
        kept = first * weights[:, :, rows]
        counts = weights.to(first.dtype)
        if running:
            found = (total + kept.cumsum(2)) / counts.cumsum(2)[:, :, rows].clamp_min(1)
        else:
            found = ((total + kept.sum(2, keepdim=True)) / counts.sum(2, keepdim=True).clamp_min(1)).expand_as(first)
        return found if blind is None else found.masked_fill(blind[:, :, rows], 0)

    return mean


_INTERFACE = "ALL_ATTENTION_FUNCTIONS"  # the name in transformers' modelling files


class _Foreign:
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
        files = [sys.modules[name] for name in sorted(names) if hasattr(sys.modules.get(name), _INTERFACE)]
        if not files:
            raise ValueError(
                f"{type(self.model).__name__} has neither this package's attention nor transformers' attention "
                "interface, so its attention cannot be looked into; give a Hugging Face causal LM such as Llama, Qwen "
                "or GPT-2, or convert it first"
            )
        return [(file, getattr(file, _INTERFACE)) for file in files]

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
                    _weighted(torch.cat(call.maps(rows, change), dim=1), value)  # DiffLlama subtracts by itself
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


class _Interface:
    """Stands in for transformers' ``AttentionInterface`` in a modelling file."""

    def __init__(self, original: Any, foreign: _Foreign):
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


def _products(q: Tensor, k: Tensor) -> Tensor:
    """``q k^T`` in fp32 (fp64): ``[B, H, t, d]``, ``[B, G, S, d]`` -> ``[B, H, t, S]``, without repeating k."""
    wide = torch.promote_types(q.dtype, torch.float32)
    grouped = q.to(wide).unflatten(1, (k.shape[1], -1))  # [B, G, H/G, t, d]
    return (grouped @ k.to(wide)[:, :, None].mT).flatten(1, 2)


def _weighted(weights: Tensor, v: Tensor) -> Tensor:
    """``weights [B, H, t, S]`` times ``v [B, g, S, dv]``, in the dtype of v: ``[B, H, t, dv]``."""
    grouped = weights.unflatten(1, (v.shape[1], -1))
    return (grouped @ v.to(weights.dtype)[:, :, None]).flatten(1, 2).to(v.dtype)
