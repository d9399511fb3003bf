"""Differential attention on PyTorch's scaled_dot_product_attention: both maps in one call, or one call for each map.

One call computes both maps where the keys are [k1|k2], of width 2 D, and the queries [q1|0] and [0|q2]: the zeros add
nothing to the scores. Where k2 is k1, the queries of both maps are simply more heads. One call for each map, with
values as wide as the kernel takes, is FlashDiffAttn_1 or _2 (arXiv 2410.05258, appendix A). ``forms`` says which of
these SDPA's kernels take for a call and what they cost; the cheapest one is used, unless another was measured to be
faster (dispatch.py). On the CPU all calls compute in fp32: the bf16 kernel accumulates gradients in bf16, which misses
the numerics budget of dv at lengths of some hundreds.

Packed documents take the same forms of PyTorch's ``varlen_attn``, the kernel "flash" without padding.

Shapes: B batch, H signal heads, Hn noise heads, G key/value heads, T queries, S keys, D query width, Dv value width.
"""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from operator import index as concrete
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from diff_transformer.ops.masking import apply_masks, fully_masked_rows, position_mask


class Kernel(NamedTuple):
    """What a kernel of SDPA takes. Source: PyTorch, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp."""

    backend: SDPBackend
    max_width: int | None  # of queries and of values; None for any
    wider_values: bool  # whether values may have another width than queries
    masks: bool
    dtypes: tuple[torch.dtype, ...]
    grouped: bool  # whether it reads shared keys in place (enable_gqa)


_HALF = (torch.bfloat16, torch.float16)
_FLOATING = (*_HALF, torch.float32)
KERNELS = {
    "cudnn": Kernel(SDPBackend.CUDNN_ATTENTION, 128, True, True, _HALF, True),
    "flash": Kernel(SDPBackend.FLASH_ATTENTION, 256, False, False, _HALF, True),
    "efficient": Kernel(SDPBackend.EFFICIENT_ATTENTION, None, True, True, _FLOATING, False),
    "cpu": Kernel(SDPBackend.FLASH_ATTENTION, None, False, True, (*_FLOATING, torch.float64), False),
}
CUDNN_FIRST = 91500  # versions of cuDNN above this one are PyTorch's first choice on Hopper and Blackwell servers


class Form(NamedTuple):
    """How a call is passed to SDPA."""

    kernel: str  # of KERNELS
    joined: bool  # both maps in one call
    parts: int  # of the values, each in a call of its own
    width: int  # of such a part

    @property
    def name(self) -> str:
        return f"{self.kernel}, {'both maps at once' if self.joined else 'one map at a time'}"


def attend(
    q1, q2, k1, k2, v, lam, attn_mask, is_causal, window, scale, form: Form | None = None, strict: bool = False
) -> Tensor:
    """(softmax(q1 k1^T scale) - lam softmax(q2 k2^T scale)) v of checked arguments, [B, H, T, Dv] in the dtype of v.

    form: one of ``forms``; None for the first one, with the kernel that PyTorch chooses. strict: raise where its kernel
    refuses the call, instead of leaving the choice to PyTorch.
    """
    T, S = q1.shape[2], k1.shape[2]
    kernel = nullcontext() if form is None else only(form.kernel, strict)
    form = form or forms(q1, q2, k1, k2, v, attn_mask, is_causal, window)[0]
    if attn_mask is not None and attn_mask.shape[1] > 1:
        q2 = q2.repeat_interleave(q1.shape[1] // q2.shape[1], dim=1)  # each signal head then has its own second map
    fully_masked = fully_masked_rows(T, S, is_causal, window, attn_mask, q1.device)
    out_dtype = v.dtype
    if q1.device.type == "cpu":
        q1, q2, k1, k2, v = (x.to(lam.dtype) for x in (q1, q2, k1, k2, v))
    mask = None
    negative = scale <= 0 and q1.device.type == "cpu"  # the CPU kernel multiplies the -inf of is_causal by the scale
    if attn_mask is not None or window is not None or T != S or (is_causal and negative):
        mask = one_mask(position_mask(T, S, is_causal, window, q1.device), attn_mask, fully_masked, q1.dtype)
        is_causal = False

    def softmax_attention(q: Tensor, k: Tensor, values: Tensor) -> Tensor:
        options: dict[str, Any] = {"attn_mask": mask, "is_causal": is_causal, "scale": scale}
        if q.shape[1] != k.shape[1]:
            if KERNELS[form.kernel].grouped:
                options["enable_gqa"] = True
            else:  # SDPA would materialise the maps
                k, values = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, values))
        return scaled_dot_product_attention(q, k, values, **options)

    with kernel:
        out = difference(q1, q2, k1, k2, v, lam, form, softmax_attention)
    return (out if fully_masked is None else out.masked_fill(fully_masked, 0)).to(out_dtype)


def attend_varlen(
    q1, q2, k1, k2, v, lam, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, is_causal, window, scale,
    form: Form | None = None,
) -> Tensor:  # fmt: skip
    """``attend`` within each document: tensors packed as [1, heads, total, width], lam [1, H, total, 1].

    form: one of ``packed_forms``; None for the first one.
    """
    form = form or packed_forms(q1, q2, k1, k2, v)[0]
    documents = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k

    def softmax_attention(*heads: Tensor) -> Tensor:
        rows = (x[0].transpose(0, 1) for x in heads)
        return packed_attention(*rows, *documents, is_causal, window, scale).transpose(0, 1)[None]

    return difference(q1, q2, k1, k2, v, lam, form, softmax_attention).to(v.dtype)


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    is_causal: bool, window: int | None, scale: float | None = None,
) -> Tensor:  # fmt: skip
    """softmax(q k^T scale) v within each document by PyTorch's ``varlen_attn``, [total_q, heads, D]."""
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {"scale": scale, "window_size": (window - 1 if window else -1, 0 if is_causal else -1)}
    if q.shape[1] != k.shape[1]:
        if varlen_takes_groups():
            options["enable_gqa"] = True
        else:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    documents = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return cast(Callable[..., Tensor], varlen_attn)(q, k, v, *documents, **options)


@cache
def varlen_takes_groups() -> bool:
    """Whether the installed PyTorch's ``varlen_attn`` reads shared keys in place."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def difference(
    q1: Tensor, q2: Tensor, k1: Tensor, k2: Tensor, v: Tensor, lam: Tensor, form: Form,
    softmax_attention: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Tensor:  # fmt: skip
    """Both maps' softmax attention and their difference, [B, H, T, Dv] in the dtype of lam.

    softmax_attention: of queries [B, heads, T, width], keys [B, G, S, width] and a part of the values.
    """
    G, repeat = k1.shape[1], q1.shape[1] // q2.shape[1]
    Dv, padding = v.shape[-1], form.parts * form.width - v.shape[-1]
    parts = (pad(v, (0, padding)) if padding else v).split(form.width, dim=-1)

    def attended(q: Tensor, k: Tensor) -> Tensor:
        outs = [softmax_attention(q, k, part) for part in parts]
        return (outs[0] if len(outs) == 1 else torch.cat(outs, dim=-1)).narrow(-1, 0, Dv).to(lam.dtype)

    if form.joined:
        if k2 is not k1:
            k1 = torch.cat((k1, k2), dim=-1)
            q1, q2 = pad(q1, (0, q2.shape[-1])), pad(q2, (q1.shape[-1], 0))
        by_group = [x.unflatten(1, (G, -1)) for x in (q1, q2)]  # [B, G, heads of the map / G, T, D or 2 D]
        out = attended(torch.cat(by_group, dim=2).flatten(1, 2), k1).unflatten(1, (G, -1))
        first, second = (x.flatten(1, 2) for x in out.split([x.shape[2] for x in by_group], dim=2))
    else:
        first, second = attended(q1, k1), attended(q2, k2)
    return first - lam * second.repeat_interleave(repeat, dim=1)


def forms(
    q1: Tensor,
    q2: Tensor,
    k1: Tensor,
    k2: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    window: int | None,
) -> list[Form]:
    """The forms that the device's kernels take for this call, never empty.

    Kernels come in the order in which PyTorch prefers them, and the forms of a kernel by their cost: products first,
    then calls. On the CPU calls cost nothing, and joined keys only memory. A mask with a row for each head would have
    to be copied for both maps to be joined.
    """
    D, Dv, shared, cpu = concrete(q1.shape[3]), concrete(v.shape[3]), k2 is k1, q1.device.type != "cuda"
    masked = attn_mask is not None or window is not None or not aligned(q1, k1, is_causal)
    found: list[tuple[int, int, int, Form]] = []
    for order, name in enumerate(kernels_of(q1.device.type, q1.device.index)):
        kernel = KERNELS[name]
        for joined in (True, False):
            width = 2 * D if joined and not shared else D
            parts, part = value_parts(kernel, width, Dv)
            if joined and attn_mask is not None and attn_mask.shape[1] > 1:
                continue
            if supports(kernel, width, part, q1.dtype, masked):
                calls = int(joined) if cpu and not shared else parts * (2 - joined)
                found.append((order, parts * (width + part), calls, Form(name, joined, parts, part)))
    return [form for *_, form in sorted(found)] or [Form("efficient", False, 1, Dv)]


def packed_forms(q1: Tensor, q2: Tensor, k1: Tensor, k2: Tensor, v: Tensor) -> list[Form]:
    """The forms that ``varlen_attn`` takes for packed documents; none on a CPU and in fp32, for example.

    Its backward adds in any order, so there is none under torch.use_deterministic_algorithms either.
    """
    if v.dtype not in _HALF or torch.version.hip is not None or torch.are_deterministic_algorithms_enabled():
        return []
    offered = forms(q1, q2, k1, k2, v, None, False, None)
    return [form for form in offered if form.kernel == "flash" and form.width % 8 == 0]


def aligned(q1: Tensor, k1: Tensor, is_causal: bool) -> bool:
    """Whether SDPA needs no mask for the causal limit: its own corner is the upper left one, and one query sees all."""
    if is_causal and 1 != q1.shape[2] != k1.shape[2]:  # noqa: SIM103 (the expression is symbolic under torch.compile)
        return False
    return True


def value_parts(kernel: Kernel, width: int, Dv: int) -> tuple[int, int]:
    """In how many parts values of width Dv are passed beside queries of this width, and the width of a part."""
    limit = (kernel.max_width or Dv) if kernel.wider_values else width
    parts = -(-Dv // limit)
    if not kernel.wider_values:
        return parts, width
    return parts, Dv if parts == 1 else -(-Dv // (8 * parts)) * 8


def supports(kernel: Kernel, width: int, part: int, dtype: torch.dtype, masked: bool) -> bool:
    """Whether a kernel takes queries of ``width`` and values of width ``part``."""
    if dtype not in kernel.dtypes or (masked and not kernel.masks):
        return False
    if kernel.backend == SDPBackend.CUDNN_ATTENTION and (width % 8 or part % 8):
        return False
    if kernel.max_width == 256 and 192 < width <= 224:
        return False  # has no backward on consumer GPUs
    return kernel.max_width is None or max(width, part) <= kernel.max_width


def kernels_of(device: str, index: int | None) -> tuple[str, ...]:
    """The kernels of a device, in the order in which PyTorch prefers them."""
    if device != "cuda":
        return ("cpu",)
    if not torch.cuda.is_available() or torch.version.hip is not None:  # fake tensors, ROCm
        return ("flash", "efficient")
    major, _ = torch.cuda.get_device_capability(index)
    if major < 8:
        return ("efficient",)
    cudnn = torch.backends.cudnn.version() or 0
    if major in (9, 10) and cudnn > CUDNN_FIRST:
        return ("cudnn", "flash", "efficient")
    return ("flash", "efficient", "cudnn") if cudnn >= 90000 else ("flash", "efficient")


# Constants for torch.compile, as in triton/__init__.py.
kernels_of._dynamo_marked_constant = True  # ty: ignore[missing-attribute]
varlen_takes_groups._dynamo_marked_constant = True  # ty: ignore[missing-attribute]


def only(name: str, strict: bool) -> AbstractContextManager:
    """Context manager in which SDPA takes this kernel; unless ``strict``, the others where it refuses a call."""
    first = KERNELS[name].backend
    rest = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    if torch.are_deterministic_algorithms_enabled():  # with warn_only, as training sets it, flash would not repeat
        rest = rest[1:]
    return sdpa_kernel([first] if strict else [first, *(x for x in rest if x != first)], set_priority=True)


def one_mask(
    seen: Tensor | None, attn_mask: Tensor | None, fully_masked: Tensor | None, dtype: torch.dtype
) -> Tensor | None:
    """Positions and attn_mask in one mask, boolean or additive, which unmasks the fully masked rows."""
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        mask = apply_masks(attn_mask.to(dtype), seen, None)
        return mask if fully_masked is None else mask.masked_fill(fully_masked, 0)
    mask = attn_mask if seen is None else seen if attn_mask is None else seen & attn_mask
    return mask if mask is None or fully_masked is None else mask | fully_masked


def unsupported_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the backend cannot work here, or None."""
    return None
