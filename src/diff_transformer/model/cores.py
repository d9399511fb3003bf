"""The cores of attention, between projections and output: the one thing in which the two models of a pair differ.

Legend: B batch, T queries, S keys, n query heads of the matched Transformer (h = n / 2 differential heads), m its
key/value heads (g = m / 2), d head width.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from diff_transformer.model.decoding import decoding_head
from diff_transformer.model.documents import Documents
from diff_transformer.model.heads import group_heads, pair_heads
from diff_transformer.model.lambdas import LambdaModule
from diff_transformer.model.layers import RMSNorm
from diff_transformer.model.softmax import softmax_attention
from diff_transformer.ops.blockwise import layer
from diff_transformer.ops.blockwise.native import FEW
from diff_transformer.ops.diff_attention import diff_attention, diff_attention_maps
from diff_transformer.ops.reference import DiffMaps
from diff_transformer.ops.varlen import diff_attention_varlen

Lambda = float | Tensor  # a number, a scalar or [B, h, T, 1]


class Core(nn.Module):
    """A core computes ``attend`` on rows that may see one another, and ``attend_documents`` on packed documents.

    ``window``: where attention is causal, each query sees the last ``window`` keys up to its own; all if None.
    """

    window: int | None = None

    backend: str
    attend: Callable[..., Tensor]
    attend_documents: Callable[..., Tensor]
    maps: Callable[..., Any]

    def reach(self, is_causal: bool) -> int | None:
        """The window of a call; where a mask says what may be seen (``is_causal`` False), it holds the window too."""
        return self.window if is_causal else None

    def rows(self, cache, layer_idx: int, tokens: Tensor | None) -> dict:
        """What a core needs to know beside queries, keys and values: keyword arguments of ``attend`` and ``maps``."""
        return {}

    def attended(
        self, q: Tensor, k: Tensor, v: Tensor, lam: Lambda | None, attn_mask, is_causal: bool, documents, **rows
    ) -> Tensor:
        """Whichever of the two is asked for: ``[B, T, heads, width]``."""
        if documents is None:
            return self.attend(q, k, v, lam, attn_mask, is_causal, **rows).transpose(1, 2)
        return self.attend_documents(q, k, v, lam, documents, is_causal).unflatten(0, (q.shape[0], q.shape[2]))


class DiffCore(Core):
    """``(1 - lambda_init) * RMSNorm(DiffAttn(q, k, v))``, each head by itself (section 2.1, equations 1 to 3).

    Without the head norm the constant factor stays: the ablation of Table 6 takes away the norm alone.
    """

    lam: LambdaModule
    head_norm: RMSNorm | None

    def __init__(self, lam: LambdaModule, head_norm: RMSNorm | None = None, backend: str = "auto"):
        super().__init__()
        self.lam, self.head_norm, self.backend = lam, head_norm, backend

    def split(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries and keys of the two maps, ``(q1, q2, k1, k2)``, as ``diff_attention`` takes them."""
        return pair_heads(q, k)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, lam: Lambda, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
        """``(A1 - lambda A2) V``, before the head norm: ``[B, h, T, dv]``."""
        q1, q2, k1, k2 = self.split(q, k)
        return diff_attention(
            q1, q2, k1, k2, v, lam, attn_mask=attn_mask, is_causal=is_causal, window=self.reach(is_causal),
            backend=self.backend,
        )  # fmt: skip

    def attend_documents(
        self, q: Tensor, k: Tensor, v: Tensor, lam: Lambda, documents: Documents, is_causal: bool
    ) -> Tensor:
        """The same within each of the packed documents: ``[B * T, h, dv]``."""
        q1, q2, k1, k2 = self.split(q, k)
        rows1, rows2, keys1 = (_in_a_row(x) for x in (q1, q2, k1))
        keys2 = keys1 if k2 is k1 else _in_a_row(k2)
        lam = _in_a_row(lam) if isinstance(lam, Tensor) and lam.dim() == 4 else lam
        bounds, longest = documents
        return diff_attention_varlen(
            rows1, rows2, keys1, keys2, _in_a_row(v), lam, bounds, bounds, longest, longest,
            is_causal=is_causal, window=self.reach(is_causal), backend=self.backend,
        )  # fmt: skip

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None,
        is_causal: bool,
        documents: Documents | None = None,
        *,
        hidden_states: Tensor | None = None,
        **rows,
    ) -> Tensor:
        """``q``, ``k``, ``v`` with the heads of ``count_heads``, ``[B, heads, length, width]`` -> ``[B, T, h, dv]``.

        ``hidden_states [B, T, hidden_size]``: what a lambda of each token is computed from.
        """
        plain = attn_mask is None and documents is None and type(self) is DiffCore
        if plain and q.shape[2] <= FEW and q.device.type == "cpu":
            head = decoding_head(self)
            if head is not None and layer.takes(q, k, v):
                return layer.decode(q, k, v, head, is_causal, self.reach(is_causal))
        out = self.attended(q, k, v, self.lam(hidden_states), attn_mask, is_causal, documents, **rows)
        gain = 1.0 - self.lam.initial
        if self.head_norm is None:
            return out if gain == 1.0 else out * gain
        return self.head_norm(out, gain)

    def maps(
        self, q: Tensor, k: Tensor, attn_mask: Tensor | None, is_causal: bool, *, hidden_states: Tensor | None = None
    ) -> DiffMaps:
        """The two attention maps and their difference, each ``[B, h, T, S]``."""
        lam, window = self.lam(hidden_states), self.reach(is_causal)
        return diff_attention_maps(*self.split(q, k), lam, attn_mask=attn_mask, is_causal=is_causal, window=window)


class GroupedDiffCore(DiffCore):
    """Grouped differential attention (arXiv 2510.06949): ``signal`` signal heads share one noise head; lambda and head
    norm are those of ``DiffCore``. Query heads lie group by group, the signal heads first and then their noise head."""

    def __init__(self, lam: LambdaModule, head_norm: RMSNorm | None = None, backend: str = "auto", *, signal: int):
        super().__init__(lam, head_norm, backend)
        self.signal = signal

    def split(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return group_heads(q, k, self.signal)


class DiffV2Core(DiffCore):
    """The second version: query heads 2i and 2i+1 are the maps of head i and share keys and values; lambda is that of
    a token and head (``TokenLambda``), and there is neither head norm nor the factor 1 - lambda_init."""

    def split(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return q[:, 0::2], q[:, 1::2], k, k


class SoftmaxCore(Core):
    """``softmax(q k^T / sqrt(d)) v``, by default through PyTorch's ``scaled_dot_product_attention``.

    ``head_norm``, an RMSNorm over d, is applied to each head by itself: the control of Table 6.
    """

    def __init__(self, head_norm: RMSNorm | None = None, backend: str = "sdpa"):
        super().__init__()
        self.head_norm = head_norm
        self.backend = backend

    def attend(self, q: Tensor, k: Tensor, v: Tensor, lam: None, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
        """``A V``: ``[B, n, T, d]``."""
        window = self.reach(is_causal)
        return softmax_attention(q, k, v, attn_mask, is_causal, window=window, backend=self.backend)

    def attend_documents(
        self, q: Tensor, k: Tensor, v: Tensor, lam: None, documents: Documents, is_causal: bool
    ) -> Tensor:
        """The same within each of the packed documents: FlashAttention's packed form on CUDA, else one by one."""
        rows = [_in_a_row(x) for x in (q, k, v)]
        packed = self.backend in ("sdpa", "flash") and (self.window is None or "window_size" in _varlen_options())
        if packed and q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
            return _packed_flash_attention(*rows, documents, is_causal, self.reach(is_causal))
        sizes = documents.cu_seqlens.diff().tolist()
        parts = [
            self.attend(*(x.transpose(0, 1)[None] for x in document), None, None, is_causal)[0].transpose(0, 1)
            for document in zip(*(x.split(sizes) for x in rows), strict=True)
        ]
        return torch.cat(parts)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None,
        is_causal: bool,
        documents: Documents | None = None,
        **_,
    ) -> Tensor:
        """``q [B, n, T, d]``, ``k``, ``v [B, m, S, d]`` -> ``[B, T, n, d]``."""
        out = self.attended(q, k, v, None, attn_mask, is_causal, documents)
        return out if self.head_norm is None else self.head_norm(out)

    def maps(self, q: Tensor, k: Tensor, attn_mask: Tensor | None, is_causal: bool, **_) -> Tensor:
        """The attention map ``[B, n, T, S]``: the first map of differential attention with lambda = 0."""
        window = self.reach(is_causal)
        return diff_attention_maps(q, q, k, k, 0.0, attn_mask=attn_mask, is_causal=is_causal, window=window).first


def _varlen_options() -> Mapping[str, Any]:
    """The arguments of PyTorch's ``varlen_attn``: its causal flag became a window, and grouped heads came later."""
    from torch.nn.attention.varlen import varlen_attn

    return inspect.signature(varlen_attn).parameters


def _packed_flash_attention(
    q: Tensor, k: Tensor, v: Tensor, documents: Documents, is_causal: bool, window: int | None
) -> Tensor:
    """PyTorch's ``varlen_attn`` of ``q [B * T, n, d]``, ``k``, ``v [B * T, m, d]``."""
    from torch.nn.attention.varlen import varlen_attn

    before = -1 if window is None else window - 1  # keys to the left of a query's own
    known, options = _varlen_options(), {}
    if "window_size" in known:
        options["window_size"] = (before, 0 if is_causal else -1)
    else:
        options["is_causal"] = is_causal
    if "enable_gqa" in known:
        options["enable_gqa"] = q.shape[1] != k.shape[1]
    else:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    (bounds, longest), attend = documents, cast(Callable[..., Tensor], varlen_attn)
    return attend(q, k, v, bounds, bounds, longest, longest, **options)


def _in_a_row(x: Tensor) -> Tensor:
    """Rows of a batch one after another: [B, heads, T, width] -> [B * T, heads, width]."""
    return x.transpose(1, 2).flatten(0, 1)
