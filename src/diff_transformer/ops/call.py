"""One call of the operator: tensors and options, checked once, and the decision which backend computes it.

Shapes: B batch, H signal heads, Hn noise heads, G key/value heads, T queries, S keys, D query width, Dv value width.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from diff_transformer.ops.arguments import (
    autocast_input,
    check_options,
    check_tensors,
    four_dimensional_mask,
    weight_for_every_row,
)


class Call(NamedTuple):
    """The argument of every backend's ``attend``. Custom operators take the first ``OPERANDS`` fields, in this order.

    Packed documents: B is 1, and T and S count the rows of all documents.
    """

    q1: Tensor  # [B, H, T, D]
    q2: Tensor  # [B, Hn, T, D]
    k1: Tensor  # [B, G, S, D]
    k2: Tensor | None  # [B, G, S, D]; None where it is k1
    v: Tensor  # [B, G, S, Dv]
    lam: Tensor  # [B, H, T, 1], fp32 (fp64 for fp64 inputs); a view, often with strides of 0
    first: Tensor | None = None  # weight of the first map, like lam; None for 1
    attn_mask: Tensor | None = None  # [B|1, H|1, T|1, S|1], boolean or additive
    cu_seqlens_q: Tensor | None = None  # [documents + 1], int32: where the queries of each begin, and their total
    cu_seqlens_k: Tensor | None = None  # the same for keys
    is_causal: bool = False  # aligned to the lower right corner
    window: int | None = None
    scale: float = 1.0
    gradients: tuple[str, ...] = ()  # names of the inputs whose gradients are needed
    backend: str = "auto"  # as given; after ``resolve`` the one that computes

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """q1, q2, k1, k2, v and lam, with k1 for k2 where k2 is None."""
        return self.q1, self.q2, self.k1, self.k1 if self.k2 is None else self.k2, self.v, self.lam

    @property
    def documents(self) -> tuple[Tensor, Tensor] | None:
        """Where the queries and the keys of packed documents begin; None without documents."""
        if self.cu_seqlens_q is None or self.cu_seqlens_k is None:
            return None
        return self.cu_seqlens_q, self.cu_seqlens_k

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


OPERANDS = Call._fields.index("gradients")
# Their types in the schema of a custom operator.
SCHEMA = (
    "Tensor q1, Tensor q2, Tensor k1, Tensor? k2, Tensor v, Tensor lam, Tensor? first, Tensor? attn_mask, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, bool is_causal, int? window, float scale"
)
TENSORS = 10  # of these
_AT = {name: i for i, name in enumerate(Call._fields)}


def replace(call: Call, **changes: Any) -> Call:
    """The call with other fields. torch.compile of torch 2.11 can keep it over a graph break, unlike ``_replace``'s."""
    values: list[Any] = list(call)
    for name, value in changes.items():
        values[_AT[name]] = value
    return Call(*values)


def check(
    q1, q2, k1, k2, v, lam, attn_mask=None, is_causal=False, window=None, scale=None, backend="auto", first=None
) -> Call:  # fmt: skip
    """The call of these arguments, cast as autocast wants it; raises what ``diff_attention`` documents."""
    is_causal, shared_keys = bool(is_causal), k2 is k1
    q1, q2, k1, v = map(autocast_input, (q1, q2, k1, v))
    k2 = k1 if shared_keys else autocast_input(k2)
    check_tensors(q1, q2, k1, k2, v)
    T, D, S = q1.shape[2], q1.shape[3], k1.shape[2]
    window, scale = check_options(is_causal, window, scale, (T, S), D)
    lam = weight_for_every_row("lam", lam, q1)
    first = None if first is None else weight_for_every_row("first", first, q1)
    attn_mask = four_dimensional_mask(attn_mask, q1, S)
    gradients: tuple[str, ...] = ()
    if torch.is_grad_enabled():
        inputs = {"q1": q1, "q2": q2, "k1": k1, "k2": k2, "v": v, "lam": lam, "attn_mask": attn_mask, "first": first}
        gradients = tuple([name for name, x in inputs.items() if x is not None and x.requires_grad])
    k2 = None if shared_keys else k2
    options = is_causal, window, scale
    return Call(q1, q2, k1, k2, v, lam, first, attn_mask, None, None, *options, gradients=gradients, backend=backend)


def in_dtype(call: Call, dtype: torch.dtype) -> Call:
    """The call with q1, q2, k1, k2 and v in another dtype."""
    call = with_keys(call, lambda x: x.to(dtype))
    return replace(call, q1=call.q1.to(dtype), q2=call.q2.to(dtype))


def with_keys(call: Call, change: Callable[[Tensor], Tensor]) -> Call:
    """The call with k1, k2 and v changed."""
    k2 = None if call.k2 is None else change(call.k2)
    return replace(call, k1=change(call.k1), k2=k2, v=change(call.v))


def normalized(call: Call) -> Call:
    """An equal call with a scale above 0, and a noise head for each signal head where the mask differs between these.

    Kernels take the largest score of a row before they scale it.
    """
    H, Hn, mask = call.q1.shape[1], call.q2.shape[1], call.attn_mask
    if mask is not None and mask.shape[1] > 1 and Hn < H:
        call = replace(call, q2=call.q2.repeat_interleave(H // Hn, dim=1))
    if call.scale > 0:
        return call
    sign = -1 if call.scale < 0 else 0
    return replace(call, q1=call.q1 * sign, q2=call.q2 * sign, scale=abs(call.scale) or 1.0)


def is_empty(call: Call) -> bool:
    """True if there is nothing to compute: no batch entry, no query or no key."""
    return not (call.q1.numel() and call.k1.numel())


def zeros(call: Call, width: int | None = None) -> Tensor:
    """[B, H, T, width], by default Dv, of an empty call: zeros, whose gradients for its inputs are zero too."""
    q1, v = call.q1, call.v
    dtype = v.dtype if width is None else call.lam.dtype
    inputs = [x for x in call[:8] if x is not None]
    no_values = [x[:0].sum().to(dtype) for x in inputs]
    return sum(no_values, q1.new_zeros((*q1.shape[:3], v.shape[3] if width is None else width), dtype=dtype))
