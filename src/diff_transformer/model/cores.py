"""The cores of attention, between projections and output: the one thing in which the two models of a pair differ.

Legend: B batch, T queries, S keys, n query heads of the matched Transformer (h = n / 2 differential heads), m its
key/value heads (g = m / 2), d head width.
"""

import inspect
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diff_transformer.model.documents import Documents
from diff_transformer.model.heads import pair_heads
from diff_transformer.model.lambdas import LearnedLambda
from diff_transformer.model.layers import RMSNorm
from diff_transformer.ops.diff_attention import diff_attention, diff_attention_maps
from diff_transformer.ops.varlen import diff_attention_varlen


class Core(nn.Module):
    """A core computes ``attend`` on rows that may see one another, and ``attend_documents`` on packed documents."""

    attend: Callable[..., Tensor]
    attend_documents: Callable[..., Tensor]

    def attended(self, q: Tensor, k: Tensor, v: Tensor, attn_mask, is_causal: bool, documents) -> Tensor:
        """Whichever of the two is asked for: ``[B, T, heads, width]``."""
        if documents is None:
            return self.attend(q, k, v, attn_mask, is_causal).transpose(1, 2)
        return self.attend_documents(q, k, v, documents, is_causal).unflatten(0, (q.shape[0], q.shape[2]))


class DiffCore(Core):
    """``(1 - lambda_init) * RMSNorm(DiffAttn(q, k, v))``, each head by itself (section 2.1, equations 1 to 3).

    Without the head norm the constant factor stays: the ablation of Table 6 takes away the norm alone.
    """

    def __init__(
        self,
        head_dim: int,
        lambda_start: float,
        *,
        lambda_std: float = 0.1,
        head_norm: bool | str = True,
        head_norm_init: float = 1.0,
        norm_eps: float = 1e-5,
        backend: str = "auto",
    ):
        super().__init__()
        self.lam = LearnedLambda(head_dim, lambda_start, lambda_std)
        self.head_norm = RMSNorm(2 * head_dim, norm_eps, head_norm_init, head_norm is True) if head_norm else None
        self.backend = backend

    def attend(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
        """``(A1 - lambda A2) V``, before the head norm: ``[B, h, T, 2d]``."""
        q1, q2, k1, k2 = pair_heads(q, k)
        return diff_attention(
            q1, q2, k1, k2, v, self.lam(), attn_mask=attn_mask, is_causal=is_causal, backend=self.backend
        )

    def attend_documents(self, q: Tensor, k: Tensor, v: Tensor, documents: Documents, is_causal: bool) -> Tensor:
        """The same within each of the packed documents: ``[B * T, h, 2d]``."""
        q1, q2, k1, k2 = (_in_a_row(x) for x in pair_heads(q, k))
        bounds, longest = documents
        return diff_attention_varlen(
            q1, q2, k1, k2, _in_a_row(v), self.lam(), bounds, bounds, longest, longest,
            is_causal=is_causal, backend=self.backend,
        )  # fmt: skip

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None,
        is_causal: bool,
        documents: Documents | None = None,
    ) -> Tensor:
        """``q [B, n, T, d]``, ``k [B, m, S, d]``, ``v [B, g, S, 2d]`` -> ``[B, T, h, 2d]``."""
        out = self.attended(q, k, v, attn_mask, is_causal, documents)
        gain = 1.0 - self.lam.initial
        return out * gain if self.head_norm is None else self.head_norm(out, gain)

    def maps(self, q: Tensor, k: Tensor, attn_mask: Tensor | None, is_causal: bool):
        """The two attention maps and their difference, each ``[B, h, T, S]``, as ``DiffMaps``."""
        q1, q2, k1, k2 = pair_heads(q, k)
        return diff_attention_maps(q1, q2, k1, k2, self.lam(), attn_mask=attn_mask, is_causal=is_causal)


class SoftmaxCore(Core):
    """``softmax(q k^T / sqrt(d)) v`` through PyTorch's ``scaled_dot_product_attention``.

    ``head_norm``, an RMSNorm over d, is applied to each head by itself: the control of Table 6.
    """

    def __init__(self, head_norm: RMSNorm | None = None):
        super().__init__()
        self.head_norm = head_norm

    def attend(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
        """``A V``: ``[B, n, T, d]``."""
        mask, is_causal = _sdpa_mask(q, k, attn_mask, is_causal)
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, enable_gqa=grouped)

    def attend_documents(self, q: Tensor, k: Tensor, v: Tensor, documents: Documents, is_causal: bool) -> Tensor:
        """The same within each of the packed documents: FlashAttention's packed form on CUDA, else one by one."""
        rows = [_in_a_row(x) for x in (q, k, v)]
        if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
            return _packed_flash_attention(*rows, documents, is_causal)
        sizes = documents.cu_seqlens.diff().tolist()
        parts = [
            self.attend(*(x.transpose(0, 1)[None] for x in document), None, is_causal)[0].transpose(0, 1)
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
    ) -> Tensor:
        """``q [B, n, T, d]``, ``k``, ``v [B, m, S, d]`` -> ``[B, T, n, d]``."""
        out = self.attended(q, k, v, attn_mask, is_causal, documents)
        return out if self.head_norm is None else self.head_norm(out)

    def maps(self, q: Tensor, k: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
        """The attention map ``[B, n, T, S]``: the first map of differential attention with lambda = 0."""
        return diff_attention_maps(q, q, k, k, 0.0, attn_mask=attn_mask, is_causal=is_causal).first


def _packed_flash_attention(q: Tensor, k: Tensor, v: Tensor, documents: Documents, is_causal: bool) -> Tensor:
    """PyTorch's ``varlen_attn`` of ``q [B * T, n, d]``, ``k``, ``v [B * T, m, d]``; its causal flag became a window."""
    from torch.nn.attention.varlen import varlen_attn

    windowed = "window_size" in inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"window_size": (-1, 0 if is_causal else -1)} if windowed else {"is_causal": is_causal}
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    (bounds, longest), attend = documents, cast(Callable[..., Tensor], varlen_attn)
    return attend(q, k, v, bounds, bounds, longest, longest, **options)


def _in_a_row(x: Tensor) -> Tensor:
    """Rows of a batch one after another: [B, heads, T, width] -> [B * T, heads, width]."""
    return x.transpose(1, 2).flatten(0, 1)


def _sdpa_mask(q: Tensor, k: Tensor, attn_mask: Tensor | None, is_causal: bool) -> tuple[Tensor | None, bool]:
    """SDPA's flag aligns to the upper left corner and excludes a mask: express both here, to the lower right."""
    queries, keys = q.shape[2], k.shape[2]
    if not is_causal or queries == 1:
        return attn_mask, False
    if attn_mask is None and queries == keys:
        return None, True
    causal = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
    if attn_mask is None:
        return causal, False
    if attn_mask.dtype == torch.bool:
        return attn_mask & causal, False
    return attn_mask.masked_fill(~causal, float("-inf")), False
