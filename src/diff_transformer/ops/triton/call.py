"""One call of the operator, as the launchers of the Triton and Gluon kernels take it.

Shapes: B batch, H signal heads, Hn noise heads, G key/value heads, T queries, S keys, D query width, Dv value width.
"""

from dataclasses import KW_ONLY, dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor


class Documents(NamedTuple):
    """Packed documents: B is 1, and T and S count the rows of all documents."""

    cu_seqlens_q: Tensor  # [documents + 1], int32: where the queries of each document begin, and their total
    cu_seqlens_k: Tensor  # the same for keys


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

    def grid(
        self, rows: Literal["queries", "keys"], block: int, placeholder: Tensor
    ) -> tuple[int, int, tuple[Tensor, Tensor, Tensor]]:
        """Tiles of ``block`` rows for each head, batch entries, and (document of each tile, cu_seqlens_q and _k).

        Without documents, the last are the placeholder, which kernels do not read. The first tile of document i is
        number i + cu_seqlens[i] // block: this leaves every document enough tiles, and one more at most. So the number
        of tiles follows from the number of rows, without reading cu_seqlens on the host.
        """
        x = self.q1 if rows == "queries" else self.k1
        if self.documents is None:
            return -(-x.shape[2] // block), x.shape[0], (placeholder, placeholder, placeholder)
        bounds = self.documents[0 if rows == "queries" else 1]
        tiles = x.shape[2] // block + len(bounds) - 1
        of_document = (bounds // block).diff() + 1
        return tiles, 1, (torch.repeat_interleave(of_document, output_size=tiles), *self.documents)
