"""Shared by all launches: the device, strides, output memory, and masks in the form that kernels take."""

from contextlib import nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
import triton.knobs
from torch import Tensor

from diff_transformer.ops.call import Call
from diff_transformer.ops.triton.tiles import ADDITIVE, BOOLEAN, NO_MASK, ONE_ROW, ROW_PER_QUERY, VALUE_PER_QUERY

Results = TypeVar("Results", bound=tuple)
INTERPRETED: bool = triton.knobs.runtime.interpret  # TRITON_INTERPRET=1 when kernels are decorated
ALIGNMENT = 16  # Triton specialises a kernel for integers and addresses that 16 divides
SECTION = 8  # heads that share the L2 cache: keys and values of 8 heads, 4096 keys, D = 128 take 34 of an H100's 50 MB


class Launch(NamedTuple):
    """A kernel, its grid of programs, and its arguments and the compiler's options by name."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]

    def start(self) -> Any:
        """Start the kernel on the current device; the compiled kernel."""
        return self.kernel[self.grid](**self.arguments)


def launched(results: Results, launches: list[Launch]) -> Results:
    """The results, after the kernels that compute them were started in order, on the device of the results."""
    device = results[0].device
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        for launch in launches:
            launch.start()
    return results


def inputs_of(call: Call) -> tuple[Tensor, ...]:
    """The ``inputs`` of kernels: q1, q2, k1, k2, v, lam and first, in the place of a missing one lam."""
    return *call.inputs, call.lam if call.first is None else call.first


def strides(*tensors: Tensor) -> tuple[tuple[int, ...], ...]:
    """Strides of batch, head and row of each tensor, in elements."""
    return tuple(x.stride()[:3] for x in tensors)


def rows_contiguous(x: Tensor) -> Tensor:
    """x itself, or a copy if its last stride is not 1."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def like_queries(v: Tensor, B: int, H: int, T: int) -> Tensor:
    """Uninitialised [B, H, T, Dv] in the dtype of v, in memory [B, T, H, Dv] as the output projection wants it."""
    return v.new_empty(B, T, H, v.shape[-1]).transpose(1, 2)


def transposed_like(x: Tensor) -> Tensor:
    """Uninitialised [B, heads, length, width] like x, in memory [B, length, heads, width] as projections are."""
    B, heads, length, width = x.shape
    return x.new_empty(B, length, heads, width).transpose(1, 2)


def kernel_mask(attn_mask: Tensor | None, placeholder: Tensor) -> tuple[Tensor, tuple[int, ...], int, int]:
    """(mask, its strides with 0 in broadcast dimensions, MASK_KIND, MASK_ROWS) for a kernel."""
    if attn_mask is None:
        return placeholder, (0, 0, 0, 0), NO_MASK.value, ONE_ROW.value
    boolean = attn_mask.dtype == torch.bool
    if attn_mask.shape[2] > 1 and attn_mask.stride(2) != 0:
        attn_mask = aligned_rows(attn_mask)
    steps = tuple(0 if size == 1 else step for size, step in zip(attn_mask.shape, attn_mask.stride(), strict=True))
    mask = attn_mask.view(torch.uint8) if boolean else attn_mask
    rows = ONE_ROW if steps[2] == 0 else VALUE_PER_QUERY if steps[3] == 0 else ROW_PER_QUERY
    return mask, steps, (BOOLEAN if boolean else ADDITIVE).value, rows.value


def aligned_rows(mask: Tensor) -> Tensor:
    """mask [B|1, H|1, T, S|1], or a copy whose rows are contiguous and begin and end at multiples of 16 elements.

    Only then can a kernel load several values at once without predicates; otherwise it runs out of registers. A mask
    that is the same for all batch entries or heads is copied once. One that is the same for all keys is not copied.
    """
    *_, row, step = mask.stride()
    if mask.shape[3] == 1 or step == 0:
        return mask
    if step == 1 and row % ALIGNMENT == 0 and mask.data_ptr() % ALIGNMENT == 0 and _ends_within_memory(mask):
        return mask
    own = mask[tuple(slice(1 if stride == 0 else None) for stride in mask.stride()[:2])]
    length = -(-mask.shape[3] // ALIGNMENT) * ALIGNMENT
    return own.new_empty(*own.shape[:3], length)[..., : mask.shape[3]].copy_(own).expand(mask.shape)


def _ends_within_memory(mask: Tensor) -> bool:
    """True if the last row, padded, still lies within the storage of the mask."""
    last = sum((size - 1) * step for size, step in zip(mask.shape[:3], mask.stride()[:3], strict=True))
    end = mask.storage_offset() + last + -(-mask.shape[3] // ALIGNMENT) * ALIGNMENT
    return end * mask.element_size() <= mask.untyped_storage().nbytes()
