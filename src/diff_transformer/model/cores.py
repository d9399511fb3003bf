"""The cores of ``"diff"``, ``"diff_v2"`` and ``"grouped_diff"``: differential attention between projections and W_O.

A core is the one thing in which the models of a pair differ; ``softmax.py`` has the baseline's and ``dint.py`` that of
``"dint"``. Legend: B batch, T queries, S keys, n query heads of the matched Transformer (h = n / 2 differential heads),
m its key/value heads (g = m / 2), d head width, dv width of a value head.
"""

from collections.abc import Callable
from typing import Any, TypeGuard, TypeVar

from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from diff_transformer.model.inputs import Packing, Visible
from diff_transformer.model.lambdas import LambdaModule, LearnedLambda
from diff_transformer.model.layers import RMSNorm
from diff_transformer.ops.api import can_decode, decode_heads, diff_attention, diff_attention_maps
from diff_transformer.ops.reference import DiffMaps
from diff_transformer.ops.varlen import diff_attention_varlen

Part = TypeVar("Part", bound=nn.Module)
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

        ``hidden_states [B, T, hidden_size]``: the input from which a lambda for each token is computed.
        """
        out = self.decode(q, k, v, visible, hidden_states) if lam is None else None
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

    def decode(self, q: Tensor, k: Tensor, v: Tensor, visible: Visible, hidden_states: Tensor | None) -> Tensor | None:
        """``forward`` of a few queries over a cache in one call of the CPU kernel; None where the modules have to run.

        They have to if a hook, a wrapper or an experiment changed one of them.
        """
        norm, lam = self.head_norm, self.lam
        if not can_decode(q) or self.backend not in ("auto", "blockwise"):
            return None
        if visible.mask is not None or visible.documents is not None or "attend" in vars(self):
            return None
        if norm is not None and not is_plain(norm, RMSNorm):
            return None
        norm_weight, norm_eps = (None, None) if norm is None else (norm.weight, norm.eps)
        if is_plain(lam, LearnedLambda):
            value, vectors = lam.initial, (lam.lambda_q1, lam.lambda_k1, lam.lambda_q2, lam.lambda_k2)
        else:
            value, vectors = lam(hidden_states), ()
        return decode_heads(
            *self.split(q, k), v, value, vectors, None, None, norm_weight, norm_eps, 1.0 - lam.initial,
            visible.is_causal, visible.window,
        )  # fmt: skip


def is_plain(part: nn.Module, kind: type[Part]) -> TypeGuard[Part]:
    """True if a call of ``part`` runs the ``forward`` of ``kind`` and nothing else: no wrapper, no hook."""
    if type(part) is not kind or "forward" in vars(part):
        return False
    return not (part._forward_hooks or part._forward_pre_hooks or _has_any_global_hook())


class DiffV2Core(DiffCore):
    """The second version: query heads 2i and 2i+1 are the maps of head i and share keys and values.

    lambda depends on token and head (``TokenLambda``); there is neither a head norm nor the factor 1 - lambda_init.
    """

    def split(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return *_pairs(q), k, k


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
