"""Softmax attention of the matched Transformer: its core, and one function for each backend.

Legend: B batch, T queries, S keys, n query heads, m key/value heads, d head width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from diff_transformer.model.cores import Core, concatenate_rows
from diff_transformer.model.inputs import Documents
from diff_transformer.model.layers import RMSNorm
from diff_transformer.ops import flash, flex, sdpa
from diff_transformer.ops.api import diff_attention_maps
from diff_transformer.ops.masking import fully_masked_rows, position_mask
from diff_transformer.ops.reference import attention_map


class SoftmaxCore(Core):
    """``softmax(q k^T / sqrt(d)) v``, by default through PyTorch's ``scaled_dot_product_attention``.

    ``head_norm``, an RMSNorm over d, is applied to each head by itself: the control of Table 6.
    """

    def __init__(self, head_norm: RMSNorm | None = None, backend: str = "sdpa"):
        super().__init__()
        self.head_norm = head_norm
        self.backend = backend

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
        return self.normalise(self.attended(q, k, v, None, attn_mask, is_causal, documents))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, lam: None, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
        """``A V``: ``[B, n, T, d]``."""
        window = self.reach(is_causal)
        return softmax_attention(q, k, v, attn_mask, is_causal, window=window, backend=self.backend)

    def attend_documents(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lam: None,
        documents: Documents,
        is_causal: bool,
        of_keys: Documents | None = None,
    ) -> Tensor:
        """``attend`` within each packed document, ``[B * T, n, d]``; ``of_keys`` as in ``DiffCore``.

        One call of FlashAttention's packed form on CUDA, else one call for each document.
        """
        rows = [concatenate_rows(x) for x in (q, k, v)]
        if self.backend in ("sdpa", "flash") and q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
            (bounds, longest), (bounds_k, longest_k) = documents, of_keys or documents
            options = bounds, bounds_k, longest, longest_k, is_causal, self.reach(is_causal)
            return sdpa.packed_attention(rows[0], rows[1], rows[2], *options)
        sizes, sizes_k = (each.cu_seqlens.diff().tolist() for each in (documents, of_keys or documents))
        parts = [
            self.attend(*(x.transpose(0, 1)[None] for x in document), None, None, is_causal)[0].transpose(0, 1)
            for document in zip(rows[0].split(sizes), *(x.split(sizes_k) for x in rows[1:]), strict=True)
        ]
        return torch.cat(parts)

    def normalise(self, out: Tensor) -> Tensor:
        return out if self.head_norm is None else self.head_norm(out)

    def maps(self, q: Tensor, k: Tensor, attn_mask: Tensor | None, is_causal: bool, **_) -> Tensor:
        """The attention map ``[B, n, T, S]``: the first map of differential attention with lambda = 0."""
        window = self.reach(is_causal)
        return diff_attention_maps(q, q, k, k, 0.0, attn_mask=attn_mask, is_causal=is_causal, window=window).first


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    *,
    window: int | None = None,
    backend: str = "sdpa",
) -> Tensor:
    """``softmax(q k^T / sqrt(d)) v`` of ``q [B, n, T, d]`` and ``k``, ``v [B, m, S, d]``: ``[B, n, T, d]``.

    Args:
        attn_mask: bool (True = attend) or additive, broadcastable to ``[B, n, T, S]``.
        is_causal: hide later keys, aligned to the lower right corner, as ``diff_attention`` does.
        window: each query sees its last ``window`` keys; needs ``is_causal``.
        backend: ``"sdpa"`` (PyTorch chooses the kernel), ``"eager"`` (materialises the map), ``"flex"``, ``"flash"``.

    Raises:
        RuntimeError: if the backend cannot compute this call.
    """
    if backend == "sdpa":
        mask, is_causal = sdpa_mask(q, k, attn_mask, is_causal, window)
        grouped = bool(q.shape[1] != k.shape[1])  # torch.jit.trace has tensors for sizes
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, enable_gqa=grouped)
    if attn_mask is not None:
        attn_mask = attn_mask[(None,) * (4 - attn_mask.dim())]
    return {"eager": _eager, "flex": _flex, "flash": _flash}[backend](q, k, v, attn_mask, is_causal, window)


def sdpa_mask(
    q: Tensor, k: Tensor, attn_mask: Tensor | None, is_causal: bool, window: int | None = None
) -> tuple[Tensor | None, bool]:
    """Mask and flag for SDPA, whose causal flag aligns to the upper left corner and cannot be combined with a mask."""
    queries, keys = q.shape[2], k.shape[2]
    if is_causal and attn_mask is None and 1 < queries == keys and (window is None or window >= keys):
        return None, True
    seen = position_mask(queries, keys, is_causal, window, q.device)
    if seen is None or attn_mask is None:
        return (attn_mask if seen is None else seen), False
    if attn_mask.dtype == torch.bool:
        return attn_mask & seen, False
    return attn_mask.masked_fill(~seen, float("-inf")), False


def _eager(q: Tensor, k: Tensor, v: Tensor, attn_mask, is_causal: bool, window) -> Tensor:
    repeat, scale = q.shape[1] // k.shape[1], q.shape[3] ** -0.5
    seen = position_mask(q.shape[2], k.shape[2], is_causal, window, q.device)
    weights = attention_map(q, k.repeat_interleave(repeat, dim=1), seen, attn_mask, scale)  # [B, n, T, S], fp32
    return (weights @ v.repeat_interleave(repeat, dim=1).to(weights.dtype)).to(v.dtype)


def _flex(q: Tensor, k: Tensor, v: Tensor, attn_mask, is_causal: bool, window) -> Tensor:
    _require(flex.unsupported_reason(q.device, q.dtype), "flex")
    reason = flex.no_gradients_reason(q.device)
    if reason and torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        raise NotImplementedError(reason)
    T, S = q.shape[2], k.shape[2]
    fully_masked = fully_masked_rows(T, S, is_causal, window, attn_mask, q.device)
    if attn_mask is None or fully_masked is None:
        mask, bias = flex.position_block_mask(T, S, is_causal, window, q.device), None
    else:
        mask = flex.dense_block_mask(T, S, is_causal, window, attn_mask, fully_masked)
        bias = None if attn_mask.dtype == torch.bool else flex.additive(attn_mask, fully_masked)
    # On the CPU, FlexAttention refuses tensors that require gradients even in ``no_grad``.
    q, k, v = (x.contiguous() if torch.is_grad_enabled() else x.detach().contiguous() for x in (q, k, v))
    out = flex.flex_attention(q, k, v, bias, mask, enable_gqa=q.shape[1] != k.shape[1])
    return out if fully_masked is None else out.masked_fill(fully_masked, 0)


def _flash(q: Tensor, k: Tensor, v: Tensor, attn_mask, is_causal: bool, window) -> Tensor:
    _require(flash.unsupported_reason(q.device, q.dtype), "flash")
    if attn_mask is not None:
        _require("flash-attn takes no attn_mask; pack sequences instead of padding them", "flash")
    found = flash.installed()
    assert found is not None  # unsupported_reason has checked
    options = {"softmax_scale": q.shape[3] ** -0.5, "causal": is_causal}
    if window is not None:
        options["window_size"] = (window - 1, 0)
    out = found[1](*(x.transpose(1, 2) for x in (q, k, v)), **options)
    return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)


def _require(reason: str | None, name: str) -> None:
    if reason is not None:
        raise RuntimeError(f"softmax attention on {name!r} is not available: {reason}")
