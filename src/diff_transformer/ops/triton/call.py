"""One call of the operator, as the launchers of the Triton and Gluon kernels take it.

Shapes: B batch, H signal heads, Hn noise heads, G key/value heads, T queries, S keys, D query width, Dv value width.
"""

from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

from torch import Tensor


class Documents(NamedTuple):
    """Packed documents: B is 1, and T and S count the rows of all documents."""

    cu_seqlens_q: Tensor  # [documents + 1], int32: where the queries of each document begin, and their total
    cu_seqlens_k: Tensor  # the same for keys
    max_q: int  # queries of the longest document
    max_k: int  # keys of the longest document


@dataclass(frozen=True)
class Call:
    """The inputs and options of a call, checked."""

    q1: Tensor  # [B, H, T, D]
    q2: Tensor  # [B, Hn, T, D]
    k1: Tensor  # [B, G, S, D]
    k2: Tensor | None  # [B, G, S, D]; None where it is k1
    v: Tensor  # [B, G, S, Dv]
    lam: Tensor  # [B, H, T, 1], fp32, any strides
    _: KW_ONLY
    scale: float
    is_causal: bool = False  # aligned to the lower right corner
    window: int | None = None
    attn_mask: Tensor | None = None  # [B|1, H|1, T|1, S|1], boolean or additive
    documents: Documents | None = None

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """q1, q2, k1, k2, v and lam, with k1 for k2 where k2 is None."""
        return self.q1, self.q2, self.k1, self.k1 if self.k2 is None else self.k2, self.v, self.lam

    @property
    def sequences(self) -> tuple[int, int, int]:
        """The number of sequences (batch entries or documents), and the queries and keys of the longest one."""
        if self.documents is None:
            return self.q1.shape[0], self.q1.shape[2], self.k1.shape[2]
        return len(self.documents.cu_seqlens_q) - 1, self.documents.max_q, self.documents.max_k

    def boundaries(self, placeholder: Tensor) -> tuple[Tensor, Tensor]:
        """cu_seqlens_q and cu_seqlens_k; without documents the placeholder, which kernels do not read."""
        return (placeholder, placeholder) if self.documents is None else self.documents[:2]
