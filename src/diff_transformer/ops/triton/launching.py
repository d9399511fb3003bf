"""What launches have in common: strides, masks as kernels take them, the device."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton.knobs
from torch import Tensor

from diff_transformer.ops.triton.tiles import ADDITIVE, BOOLEAN, NO_MASK, ONE_ROW, ROW_PER_QUERY, VALUE_PER_QUERY

INTERPRETED: bool = triton.knobs.runtime.interpret  # TRITON_INTERPRET=1, which counts when kernels are decorated
ALIGNMENT = 16  # what Triton notes of integers and of addresses, when it compiles for a launch
SECTION = 8  # heads whose keys and values share the L2 cache: 8 of 4096 keys at D = 128 are 34 MB of an H100's 50


def on_device(x: Tensor) -> AbstractContextManager:
    """Kernels run on the current device, which need not be that of the tensors."""
    return torch.cuda.device(x.device) if x.device.type == "cuda" else nullcontext()


def launch(kernel: Any, programs: int, arguments: Sequence[Any], constants: dict[str, Any]) -> None:
    """Run ``programs`` programs of the kernel where its first argument lies."""
    with on_device(arguments[0]):
        kernel[(programs,)](*arguments, **constants)


def strides(*tensors: Tensor) -> list[int]:
    """Strides of batch, head and row of each, in elements."""
    return [stride for x in tensors for stride in x.stride()[:3]]


def rows_contiguous(x: Tensor) -> Tensor:
    """x itself, or a copy where values of a row are not beside one another."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def like_queries(v: Tensor, B: int, H: int, T: int) -> Tensor:
    """Uninitialised [B, H, T, Dv] in the dtype of v, in memory [B, T, H, Dv] as the output projection wants it."""
    return v.new_empty(B, T, H, v.shape[-1]).transpose(1, 2)


def transposed_like(x: Tensor) -> Tensor:
    """Uninitialised [B, heads, length, width] like x, in memory [B, length, heads, width] as projections are."""
    B, heads, length, width = x.shape
    return x.new_empty(B, length, heads, width).transpose(1, 2)


def kernel_mask(attn_mask: Tensor | None, placeholder: Tensor) -> tuple[Tensor, list[int], int, int]:
    """(mask, its strides, 0 in broadcast dimensions, MASK_KIND, MASK_ROWS) for a kernel."""
    if attn_mask is None:
        return placeholder, [0, 0, 0, 0], NO_MASK.value, ONE_ROW.value
    boolean = attn_mask.dtype == torch.bool
    if attn_mask.shape[2] > 1 and attn_mask.stride(2) != 0:
        attn_mask = aligned_rows(attn_mask)
    steps = [0 if size == 1 else step for size, step in zip(attn_mask.shape, attn_mask.stride(), strict=True)]
    mask = attn_mask.view(torch.uint8) if boolean else attn_mask
    rows = ONE_ROW if steps[2] == 0 else VALUE_PER_QUERY if steps[3] == 0 else ROW_PER_QUERY
    return mask, steps, (BOOLEAN if boolean else ADDITIVE).value, rows.value


def aligned_rows(mask: Tensor) -> Tensor:
    """mask [B|1, H|1, T, S|1], or a copy of it whose rows begin and end at multiples of 16 elements and have no gaps.

    Only then can a kernel read several values at once and without asking which there are; else it runs out of
    registers. What is the same for all batch entries or heads is copied once, and what is the same for all keys, one
    value a row, not at all.
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
    """Whether the last row, padded, is still within what the mask was cut from."""
    last = sum((size - 1) * step for size, step in zip(mask.shape[:3], mask.stride()[:3], strict=True))
    end = mask.storage_offset() + last + -(-mask.shape[3] // ALIGNMENT) * ALIGNMENT
    return end * mask.element_size() <= mask.untyped_storage().nbytes()
