"""Softmax attention of the matched Transformer: its core.

Legend: B batch, T queries, S keys, n query heads, m key/value heads, d head width.
"""

import torch
from torch import Tensor

from diff_transformer.model.cores import Core, concatenate_rows
from diff_transformer.model.inputs import Packing, Visible
from diff_transformer.model.layers import RMSNorm
from diff_transformer.ops.api import diff_attention_maps
from diff_transformer.ops.softmax_calls import packed_attention, packs, softmax_attention


class SoftmaxCore(Core):
    """``softmax(q k^T / sqrt(d)) v``, by default through PyTorch's ``scaled_dot_product_attention``.

    ``head_norm``, an RMSNorm over d, is applied to each head by itself: the control of Table 6.
    """

    def __init__(self, head_norm: RMSNorm | None = None, backend: str = "sdpa"):
        super().__init__()
        self.head_norm = head_norm
        self.backend = backend

    def forward(self, q: Tensor, k: Tensor, v: Tensor, visible: Visible, **_) -> Tensor:
        """``q [B, n, T, d]``, ``k``, ``v [B, m, S, d]`` -> ``[B, T, n, d]``."""
        if visible.documents is None:
            return self.normalise(self.attend(q, k, v, None, visible).transpose(1, 2))
        out = self.attend_documents(q, k, v, None, visible)
        return self.normalise(out.unflatten(0, (q.shape[0], q.shape[2])))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, lam: None, visible: Visible) -> Tensor:
        """``A V``: ``[B, n, T, d]``."""
        mask, is_causal, window, _ = visible
        return softmax_attention(q, k, v, mask, is_causal, window=window, backend=self.backend)

    def attend_documents(
        self, q: Tensor, k: Tensor, v: Tensor, lam: None, visible: Visible, of_keys: Packing | None = None
    ) -> Tensor:
        """``attend`` within each packed document, ``[B * T, n, d]``; ``of_keys`` as in ``DiffCore``.

        One call of FlashAttention's packed form on CUDA, else one call for each document, and so where algorithms must
        be deterministic: the packed form's backward is not.
        """
        documents, alone = visible.documents, visible._replace(documents=None)
        assert documents is not None
        rows = [concatenate_rows(x) for x in (q, k, v)]
        if self.backend in ("sdpa", "flash") and packs(q):
            (bounds, longest), (bounds_k, longest_k) = documents, of_keys or documents
            options = bounds, bounds_k, longest, longest_k, visible.is_causal, visible.window
            return packed_attention(rows[0], rows[1], rows[2], *options)
        sizes, sizes_k = (each.cu_seqlens.diff().tolist() for each in (documents, of_keys or documents))
        parts = [
            self.attend(*(x.transpose(0, 1)[None] for x in document), None, alone)[0].transpose(0, 1)
            for document in zip(rows[0].split(sizes), *(x.split(sizes_k) for x in rows[1:]), strict=True)
        ]
        return torch.cat(parts)

    def normalise(self, out: Tensor) -> Tensor:
        return out if self.head_norm is None else self.head_norm(out)

    def maps(self, q: Tensor, k: Tensor, visible: Visible, **_) -> Tensor:
        """The attention map ``[B, n, T, S]``: the first map of differential attention with lambda = 0."""
        mask, is_causal, window, _ = visible
        return diff_attention_maps(q, q, k, k, 0.0, attn_mask=mask, is_causal=is_causal, window=window).first
