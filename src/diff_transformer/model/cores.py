"""The cores of ``"diff"``, ``"diff_v2"`` and ``"grouped_diff"``: differential attention between projections and W_O.

A core is the one thing in which the models of a pair differ; ``softmax.py`` has the baseline's and ``dint.py`` that of
``"dint"``. Legend: B batch, T queries, S keys, n query heads of the matched Transformer (h = n / 2 differential heads),
m its key/value heads (g = m / 2), d head width, dv width of a value head.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks

from diff_transformer.model.inputs import Packing, Visible
from diff_transformer.model.lambdas import FixedLambda, LambdaModule, LearnedLambda
from diff_transformer.model.layers import RMSNorm
from diff_transformer.ops.api import DecodeWeights, decode_head, diff_attention, diff_attention_maps
from diff_transformer.ops.reference import DiffMaps
from diff_transformer.ops.varlen import diff_attention_varlen

Lambda = float | Tensor  # a number, a scalar or [B, h, T, 1]


class Core(nn.Module):
    """What the layer around a core calls: ``forward``, ``forward_with_maps`` and ``call_state``.

    ``window``: in causal attention each query sees its last ``window`` keys, its own included; None for all keys.
    ``is_causal``: the core computes causally whatever a call says ("dint").
    """

    window: int | None = None
    is_causal: bool = False

    backend: str
    attend: Callable[..., Tensor]
    attend_documents: Callable[..., Tensor]
    maps: Callable[..., Any]

    def normalise(self, out: Tensor) -> Tensor:
        """What follows attention in each head ``[B, T, heads, width]``."""
        return out

    def forward_with_maps(self, q: Tensor, k: Tensor, v: Tensor, visible: Visible, **state) -> tuple:
        """Output and attention maps.

        With ``attn_implementation="eager"`` the output is computed from the maps, so that gradients reach them. Other
        backends never form the maps; there they are computed beside the output.
        """
        if not self.output_follows_maps():
            return self(q, k, v, visible, **state), self.maps(q, k, visible, **state)
        maps = self.maps(q, k, visible, **state)
        weights = getattr(maps, "difference", maps)  # [B, heads, T, S], fp32
        values = v.to(weights.dtype).repeat_interleave(weights.shape[1] // v.shape[1], dim=1)
        return self.normalise((weights @ values).to(v.dtype).transpose(1, 2)), maps

    def output_follows_maps(self) -> bool:
        """Whether the output can be computed from the maps: the backend forms them, and no experiment replaced it."""
        return self.backend in ("reference", "eager") and "attend" not in self.__dict__

    def call_state(self, cache, layer_idx: int, tokens: Tensor | None) -> dict:
        """Further keyword arguments of ``attend`` and ``maps``, for cores that need more than q, k and v."""
        return {}


class DiffCore(Core):
    """``(1 - lambda_init) * RMSNorm(DiffAttn(q, k, v))``, each head by itself (section 2.1, equations 1 to 3).

    Without the head norm the constant factor stays: the ablation of Table 6 removes the norm alone.
    """

    lam: LambdaModule
    head_norm: RMSNorm | None

    def __init__(self, lam: LambdaModule, head_norm: RMSNorm | None = None, backend: str = "auto"):
        super().__init__()
        self.lam, self.head_norm, self.backend = lam, head_norm, backend

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        visible: Visible,
        *,
        hidden_states: Tensor | None = None,
        lam: Lambda | None = None,
        **state,
    ) -> Tensor:
        """``q``, ``k``, ``v`` with the heads of ``count_heads``, ``[B, heads, length, width]`` -> ``[B, T, h, dv]``.

        ``hidden_states [B, T, hidden_size]``: the input from which a lambda for each token is computed. With ``lam``,
        which is known then, the operator and the norm follow one after the other.
        """
        if lam is None and visible.mask is None and visible.documents is None:
            out = decode_head(q, k, v, self.decode_weights, visible.is_causal, visible.window)
            if out is not None:
                return out
        lam = self.lam(hidden_states) if lam is None else lam
        if visible.documents is None:
            return self.normalise(self.attend(q, k, v, lam, visible, **state).transpose(1, 2))
        out = self.attend_documents(q, k, v, lam, visible)
        return self.normalise(out.unflatten(0, (q.shape[0], q.shape[2])))

    def split(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries and keys of the two maps, ``(q1, q2, k1, k2)``, as ``diff_attention`` takes them."""
        return pair_heads(q, k)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, lam: Lambda, visible: Visible) -> Tensor:
        """``(A1 - lambda A2) V``, before the head norm: ``[B, h, T, dv]``."""
        q1, q2, k1, k2 = self.split(q, k)
        return diff_attention(
            q1, q2, k1, k2, v, lam, attn_mask=visible.mask, is_causal=visible.is_causal, window=visible.window,
            backend=self.backend,
        )  # fmt: skip

    def attend_documents(
        self, q: Tensor, k: Tensor, v: Tensor, lam: Lambda, visible: Visible, of_keys: Packing | None = None
    ) -> Tensor:
        """``attend`` within each packed document: ``[B * T, h, dv]``.

        ``of_keys``: where the same documents are among the keys, if not where they are among the queries.
        """
        q1, q2, k1, k2 = self.split(q, k)
        rows1, rows2, keys1 = (concatenate_rows(x) for x in (q1, q2, k1))
        keys2 = keys1 if k2 is k1 else concatenate_rows(k2)
        lam = concatenate_rows(lam) if isinstance(lam, Tensor) and lam.dim() == 4 else lam
        assert visible.documents is not None
        (bounds, longest), (bounds_k, longest_k) = visible.documents, of_keys or visible.documents
        return diff_attention_varlen(
            rows1, rows2, keys1, keys2, concatenate_rows(v), lam, bounds, bounds_k, longest, longest_k,
            is_causal=visible.is_causal, window=visible.window, backend=self.backend,
        )  # fmt: skip

    def normalise(self, out: Tensor) -> Tensor:
        """``(1 - lambda_init) * RMSNorm(out)``."""
        gain = 1.0 - self.lam.initial
        if self.head_norm is None:
            return out if gain == 1.0 else out * gain
        return self.head_norm(out, gain)

    def maps(self, q: Tensor, k: Tensor, visible: Visible, *, hidden_states: Tensor | None = None) -> DiffMaps:
        """The two attention maps and their difference, each ``[B, h, T, S]``."""
        lam, (mask, is_causal, window, _) = self.lam(hidden_states), visible
        return diff_attention_maps(*self.split(q, k), lam, attn_mask=mask, is_causal=is_causal, window=window)

    def decode_weights(self) -> DecodeWeights | None:
        """The weights that the operator's ``decode_head`` needs to decode this core in one call.

        None unless this core and its parts are exactly as they were built, so that calling them would compute what that
        call does; for another backend; and while gradients of its weights are needed. Called for every token
        and layer: it takes microseconds, hence no loops over generators.
        """
        parts, of_core = self._modules, self.__dict__
        lam: Any = parts.get("lam")
        norm: Any = parts["head_norm"] if "head_norm" in parts else of_core["head_norm"]
        if type(self) is not DiffCore or self.backend not in ("auto", "blockwise") or not _REPLACED.isdisjoint(of_core):
            return None
        if _methods_of_core() != _METHODS or hooks._global_forward_hooks or hooks._global_forward_pre_hooks:
            return None
        if _as_built(lam, LearnedLambda):
            of = lam._parameters
            vectors = (of.get("lambda_q1"), of.get("lambda_k1"), of.get("lambda_q2"), of.get("lambda_k2"))
            if any(x is None for x in vectors):
                return None
        elif _as_built(lam, FixedLambda):
            vectors = ()
        else:
            return None
        weight, eps = None, 0.0
        if norm is not None:
            if not _as_built(norm, RMSNorm) or "weight" not in norm._parameters:
                return None
            weight, eps = norm._parameters["weight"], norm.eps
        if torch.is_grad_enabled():
            for x in (*vectors, weight):
                if x is not None and x.requires_grad:
                    return None
        return DecodeWeights(vectors, lam.initial, weight, norm is not None, eps, 1.0 - lam.initial)


def _methods_of_core() -> tuple[Callable, ...]:
    return DiffCore.attend, DiffCore.split, DiffCore.normalise


# What the native call replaces, as this file and its neighbours define it: experiments and wrappers may replace it on
# the class, or by an attribute of the instance.
_METHODS = _methods_of_core()
_FORWARD: dict[type[nn.Module], Callable] = {part: part.forward for part in (RMSNorm, LearnedLambda, FixedLambda)}
_REPLACED = frozenset((
    *("attend", "split", "normalise", "forward", "_call_impl", "_compiled_call_impl"),
    *("weight", "lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"),
))  # fmt: skip


def _as_built(part: nn.Module | None, kind: type[nn.Module]) -> bool:
    """Whether calling ``part`` runs the ``forward`` of ``kind`` on the part's own parameters, and nothing else.

    Not so for wrappers, subclasses and parametrizations (another type), hooks, and attributes of the instance in place
    of a method or a parameter.
    """
    if type(part) is not kind or kind.forward is not _FORWARD[kind]:
        return False
    return not (part._forward_hooks or part._forward_pre_hooks) and _REPLACED.isdisjoint(part.__dict__)


class DiffV2Core(DiffCore):
    """The second version: query heads 2i and 2i+1 are the maps of head i and share keys and values.

    lambda depends on token and head (``TokenLambda``); there is neither a head norm nor the factor 1 - lambda_init.
    """

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, visible: Visible, *, hidden_states: Tensor | None = None, **state
    ) -> Tensor:
        """As in ``DiffCore``."""
        lam = self.lam(hidden_states)
        if visible.mask is None and visible.documents is None and isinstance(lam, Tensor) and self._as_built():
            given = DecodeWeights(of_tokens=lam, shared_keys=True)
            out = decode_head(q, k, v, lambda: given, visible.is_causal, visible.window)
            if out is not None:
                return out
        return super().forward(q, k, v, visible, lam=lam, **state)

    def split(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return *_pairs(q), k, k

    def _as_built(self) -> bool:
        """Whether nothing between lambda, which was called, and the result was replaced: see ``decode_weights``."""
        if type(self) is not DiffV2Core or self.backend not in ("auto", "blockwise") or self.head_norm is not None:
            return False
        return _REPLACED.isdisjoint(self.__dict__) and _methods_of_core() == _METHODS and DiffV2Core.split is _SPLIT_V2


_SPLIT_V2 = DiffV2Core.split


class GroupedDiffCore(DiffCore):
    """Grouped differential attention (arXiv 2510.06949): ``signal`` signal heads share one noise head.

    Lambda and head norm are those of ``DiffCore``. Query heads come group by group: the signal heads, then their noise
    head.
    """

    def __init__(self, lam: LambdaModule, head_norm: RMSNorm | None = None, backend: str = "auto", *, signal: int):
        super().__init__(lam, head_norm, backend)
        self.signal = signal

    def split(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q1 ``[B, n r / (r + 1), T, d]``, q2 ``[B, n / (r + 1), T, d]`` with r = ``signal``; k1, k2 as before."""
        groups = q.unflatten(1, (-1, self.signal + 1))  # [B, noise heads, r + 1, T, d]
        signal, noise = groups.split((self.signal, 1), dim=2)
        return signal.flatten(1, 2), noise.squeeze(2), *_pair_keys(q, k)


def pair_heads(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Views of the two maps' queries and keys, ``(q1, q2, k1, k2)``: heads 2i and 2i+1 are the maps of head i.

    ``q`` is ``[B, n, T, d]``; ``k`` is ``[B, m, S, d]`` or, in a static cache, pairs side by side,
    ``[B, m / 2, S, 2d]``.
    """
    return *_pairs(q), *_pair_keys(q, k)


def _pair_keys(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    k1, k2 = _pairs(k) if k.shape[-1] == q.shape[-1] else k.chunk(2, dim=-1)
    return k1, k2


def _pairs(x: Tensor) -> tuple[Tensor, Tensor]:
    """x[:, 0::2] and x[:, 1::2], whose gradients are put together in one pass; those of slices take zeros and a sum."""
    B, n, *rest = x.shape
    first, second = x.view(B, n // 2, 2, *rest).unbind(2)
    return first, second


def concatenate_rows(x: Tensor) -> Tensor:
    """The rows of a batch one after another: [B, heads, T, width] -> [B * T, heads, width]."""
    return x.transpose(1, 2).flatten(0, 1)
