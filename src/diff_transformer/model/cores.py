"""Attention between the projections and W_O: one core, whose ``Variant`` says what it computes.

Legend: B batch, T queries, S keys, h output heads, g value heads, r signal heads that share a noise head, d width of a
query head, dv width of a value head. ``count_heads`` says how many heads queries, keys and values have.
"""

import math
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from diff_transformer.errors import UserError
from diff_transformer.model.heads import MATCHED, HeadCounts, Variant
from diff_transformer.model.inputs import Packing, Visible
from diff_transformer.model.lambdas import FixedLambda, LearnedLambda, TokenLambda, lambda_init
from diff_transformer.model.layers import RMSNorm
from diff_transformer.ops.api import can_decode, decode_heads, diff_attention, diff_attention_maps
from diff_transformer.ops.reference import DiffMaps
from diff_transformer.ops.sdpa import packed_attention, packs, softmax_attention
from diff_transformer.ops.varlen import diff_attention_varlen

Lambda = Any  # a number, a scalar tensor, or [B, h, T, 1]; None for one map
Weights = tuple[Lambda, Tensor | None, Tensor | None]  # of ``AttentionCore.weights``


class AttentionCore(nn.Module):
    """The attention of one layer between its projections and W_O.

    lam: the module of lambda, or of the sigmoids of each token (a gate, lambda, or both); None for softmax attention.
    gates: the module of a gate beside a lambda that is no sigmoid; None without one.
    head_norm: RMSNorm of each head, or None.
    window: in causal attention each query sees its last ``window`` keys, its own included; None for all keys.
    backend: of ``diff_attention``.
    is_causal: that of the layer. The means of "dint" are then running ones, even in a call whose mask says what is
        visible.
    """

    lam: Any
    is_causal = True

    def __init__(
        self,
        variant: Variant,
        hidden_size: int,
        heads: HeadCounts,
        layer_index: int = 0,
        *,
        backend: str = "auto",
        window: int | None = None,
        norm_eps: float = 1e-5,
    ):
        super().__init__()
        self.variant, self.backend, self.window = variant, backend, window
        start = variant.lambda_init
        start = lambda_init(layer_index, variant.lambda_depth_offset) if start == "depth" else float(start)
        self.lam = None
        if variant.lam == "learned":
            self.lam = LearnedLambda(heads.head_dim, start, variant.lambda_std)
        elif variant.lam == "fixed":
            self.lam = FixedLambda(start)
        elif variant.sigmoids:
            first = 0.5 if variant.gate == "first" else 1.0  # weights of the maps at zero logits
            second = 0.5 if variant.initial_ratio is None else first * variant.initial_ratio
            self.lam = TokenLambda(
                hidden_size, heads.outputs, variant.sigmoids,
                offset=math.log(second / (1 - second)), telemetry=variant.lam == "token",
            )  # fmt: skip
        self.gates = None
        if variant.gate and variant.lam in ("learned", "fixed"):
            self.gates = TokenLambda(hidden_size, heads.outputs, telemetry=False)
        if variant.head_scale == MATCHED:
            raise UserError(
                "head_scale='matched' has no value to match here; train with it, or build the model from "
                "with_matched_scale(config), which measures the values"
            )
        self.scale, norm_init = (
            float(of[layer_index] if isinstance(of, list | tuple) else of)
            for of in (variant.head_scale, variant.head_norm_init)
        )
        norm = RMSNorm(heads.value_dim, norm_eps, norm_init, variant.head_norm == "weighted")
        self.head_norm = norm if variant.head_norm else None

    @property
    def gain(self) -> float:
        """The constant that multiplies each head."""
        lam: Any = self._modules.get("lam")
        return self.scale * (1.0 - lam.initial) if self.variant.factor and lam is not None else self.scale

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, visible: Visible, *, hidden_states: Tensor | None = None
    ) -> Tensor:
        """``q``, ``k``, ``v`` with the heads of ``count_heads``, ``[B, heads, length, width]`` -> ``[B, T, h, dv]``.

        ``hidden_states [B, T, hidden_size]``: the input from which the numbers of each token are computed.
        """
        out, weights = decode_in_one_call(self, q, k, v, visible, hidden_states)
        if out is not None:
            return out
        lam, first, after = weights or self.weights(hidden_states)
        if visible.documents is None:
            return self.finish(self.attend(q, k, v, lam, visible, first).transpose(1, 2), after)
        out = self.attend_documents(q, k, v, lam, visible, first)
        return self.finish(out.unflatten(0, (q.shape[0], q.shape[2])), after)

    def weights(self, hidden_states: Tensor | None) -> Weights:
        """Weights of the second and of the first map, and a gate after the norm; in fp32 or wider.

        None for what the variant lacks; a gate is ``[B, h, T, 1]``.
        """
        lam, gate = self.lambda_and_gate(hidden_states)
        if not self.variant.subtract:
            lam = -lam
        if self.variant.gate == "normed":
            return lam, None, gate
        if self.variant.gate == "result" and lam is not None:
            lam = lam * gate
        return lam, gate, None

    def lambda_and_gate(self, hidden_states: Tensor | None) -> tuple[Lambda, Tensor | None]:
        """Lambda, the weight of the second map, and the gate ``[B, h, T, 1]``; None for what the variant lacks."""
        if self.variant.sigmoids and self.gates is None:
            columns = self.lam(hidden_states).split(1, 3)  # gate, lambda: each [B, h, T, 1]
            return columns[-1] if self.variant.lam else None, columns[0] if self.variant.gate else None
        lam = None if self.lam is None else self.lam(hidden_states)
        return lam, None if self.gates is None else self.gates(hidden_states)

    def split(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries and keys of the two maps, ``(q1, q2, k1, k2)``, as ``diff_attention`` takes them.

        The query heads of a group are adjacent: r signal heads, then their noise head. So are the two key heads of a
        group; ``k`` may have them side by side, ``[B, g, S, 2d]``.
        """
        r = self.variant.signal_heads
        (q1, q2), (k1, k2) = _pairs(q) if r == 1 else _groups(q, r), (k, k)
        if k.shape[3] > q.shape[3]:
            k1, k2 = k.chunk(2, dim=3)
        elif not self.variant.shared_keys:
            k1, k2 = _pairs(k)
        return q1, q2, k1, k2

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, lam: Lambda, visible: Visible, first: Tensor | None = None
    ) -> Tensor:
        """``(first A1 - lambda A2) V`` or ``first A1 V``, before the norm: ``[B, h, T, dv]``."""
        mask, causal, window = visible[:3]
        if self.variant.maps == 1:
            return _gated(softmax_attention(q, k, v, mask, causal, window=window), first)
        options: dict[str, Any] = {"first": first, "attn_mask": mask, "is_causal": causal, "window": window}
        return diff_attention(*self.split(q, k), v, lam, **options, backend=self.backend)

    def attend_documents(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lam: Lambda,
        visible: Visible,
        first: Tensor | None = None,
        of_keys: Packing | None = None,
    ) -> Tensor:
        """``attend`` within each packed document: ``[B * T, h, dv]``.

        ``of_keys``: where the same documents are among the keys, if not where they are among the queries.
        """
        assert visible.documents is not None
        causal, window = visible.is_causal, visible.window
        (bounds, longest), (bounds_k, longest_k) = visible.documents, of_keys or visible.documents
        lam, first = (_rows(x) if isinstance(x, Tensor) and x.dim() == 4 else x for x in (lam, first))
        if self.variant.maps == 2 and not self.variant.means:
            q1, q2, k1, k2 = self.split(q, k)
            rows = [_rows(x) for x in (q1, q2, k1)]
            rows += [rows[2] if k2 is k1 else _rows(k2), _rows(v)]
            options: dict[str, Any] = {"first": first, "is_causal": causal, "window": window, "backend": self.backend}
            return diff_attention_varlen(*rows, cast(Any, lam), bounds, bounds_k, **options)
        rows = [_rows(x) for x in (q, k, v)]
        if self.variant.maps == 1 and packs(q):
            limits = bounds, bounds_k, longest, longest_k
            return _gated(packed_attention(rows[0], rows[1], rows[2], *limits, causal, window), first)
        alone, sizes, sizes_k = visible._replace(documents=None), bounds.diff().tolist(), bounds_k.diff().tolist()
        documents = zip(rows[0].split(sizes), rows[1].split(sizes_k), rows[2].split(sizes_k), strict=True)
        lams = [lam] * len(sizes)
        if isinstance(lam, Tensor) and lam.dim() == 3:
            lams = [_as_batch(part) for part in lam.split(sizes)]
        outs = [
            self.attend(*map(_as_batch, document), lam=of_document, visible=alone)[0].transpose(0, 1)
            for document, of_document in zip(documents, lams, strict=True)
        ]
        return _gated(torch.cat(outs), first)

    def finish(self, out: Tensor, gate: Tensor | None = None) -> Tensor:
        """Apply head norm, constants and a gate after the norm, ``[B, h, T, 1]``, to each head of ``[B, T, h, dv]``."""
        if self.head_norm is not None:
            out = self.head_norm(out, self.gain)
        elif self.gain != 1.0:
            out = out * self.gain
        return out if gate is None else _gated(out, gate.transpose(1, 2))

    def maps(self, q: Tensor, k: Tensor, visible: Visible, *, hidden_states: Tensor | None = None) -> DiffMaps:
        """Both softmax maps and the map that multiplies V, weights included: ``[B, h, T, S]`` each.

        With one map, the second is 0.
        """
        lam, first, _ = self.weights(hidden_states)
        parts = (q, q, k, k) if self.variant.maps == 1 else self.split(q, k)
        options: dict[str, Any] = dict(zip(("attn_mask", "is_causal", "window"), visible, strict=False))
        maps = diff_attention_maps(*parts, 0.0 if lam is None else lam, first=first, **options)
        if self.variant.maps == 1:
            maps = maps._replace(second=maps.second.new_zeros(()).expand_as(maps.second))
        return maps


def decode_in_one_call(
    core: AttentionCore, q: Tensor, k: Tensor, v: Tensor, visible: Visible, hidden_states: Tensor | None
) -> tuple[Tensor | None, Weights | None]:
    """``core.forward`` of a few queries over a cache in one call of the CPU kernel; None where the modules have to run.

    They have to if a hook, a wrapper or an experiment changed one of them. The second result is ``core.weights``, if
    this function computed them.
    """
    variant, changed = core.variant, "attend" in vars(core)
    if variant.maps == 1 or core.backend not in ("auto", "blockwise") or not can_decode(q, k, v):
        return None, None
    if variant.means or changed or visible.mask is not None or visible.documents is not None:
        return None, None
    parts = core._modules  # the look-up of an nn.Module takes a microsecond
    norm: Any = parts.get("head_norm")
    lam: Any = parts["lam"]
    if norm is not None and not is_plain(norm, RMSNorm):
        return None, None
    weights, vectors = None, ()
    if is_plain(lam, LearnedLambda) and core.gates is None and variant.subtract:
        vectors = tuple(lam._parameters.values())
    else:
        weights = core.weights(hidden_states)
    value, first, gate = weights or (lam.initial, None, None)
    norm_weight, norm_eps = (None, None) if norm is None else (norm._parameters["weight"], norm.eps)
    out = decode_heads(
        *core.split(q, k), v, value, vectors, first, gate, norm_weight, norm_eps, core.gain, visible.is_causal,
        visible.window,
    )  # fmt: skip
    return out, weights


def is_plain(part: nn.Module, kind: type[nn.Module]) -> bool:
    """True if a call of ``part`` runs the ``forward`` of ``kind`` and nothing else: no wrapper, no hook."""
    if type(part) is not kind or "forward" in vars(part):
        return False
    return not (part._forward_hooks or part._forward_pre_hooks or _has_any_global_hook())


def _pairs(x: Tensor) -> tuple[Tensor, Tensor]:
    """x[:, 0::2] and x[:, 1::2], whose gradients are put together in one pass; those of slices take zeros and a sum."""
    B, n, length, width = x.shape
    first, second = x.view(B, n // 2, 2, length, width).unbind(2)
    return first, second


def _groups(q: Tensor, signal: int) -> tuple[Tensor, Tensor]:
    """Signal heads ``[B, n r / (r + 1), T, d]`` and noise heads ``[B, n / (r + 1), T, d]`` of groups of r + 1 heads."""
    first, second = q.unflatten(1, (-1, signal + 1)).split((signal, 1), dim=2)
    return first.flatten(1, 2), second.squeeze(2)


def _gated(out: Tensor, gate: Tensor | None) -> Tensor:
    """``out`` times the fp32 ``gate``, if there is one, in the dtype of ``out``."""
    return out if gate is None else (out * gate).to(out.dtype)


def _as_batch(rows: Tensor) -> Tensor:
    """``[T, heads, width]`` as ``[1, heads, T, width]``."""
    return rows.transpose(0, 1)[None]


def _rows(x: Tensor) -> Tensor:
    """The rows of a batch one after another: [B, heads, T, width] -> [B * T, heads, width]."""
    return x.transpose(1, 2).flatten(0, 1)
