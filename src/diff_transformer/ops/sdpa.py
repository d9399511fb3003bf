"""The backend "sdpa": differential attention by PyTorch's scaled_dot_product_attention; and the baseline's attention.

Each map is a call with its values whole or in parts as wide as the queries, as the kernel takes them: FlashDiffAttn_1
or _2 (arXiv 2410.05258, appendix A). Where k2 is k1 one call computes both maps, whose queries are simply more heads.
Packed documents go through PyTorch's ``varlen_attn``. PyTorch chooses the kernel.

Shapes: B batch, H signal heads, Hn noise heads, G key/value heads, T queries, S keys, D query width, Dv value width.
"""

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from operator import index as concrete
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from diff_transformer.ops.arguments import active_transform
from diff_transformer.ops.call import Call, in_dtype, with_noise_head_for_each_mask
from diff_transformer.ops.masking import cast_mask, fully_masked_rows, one_mask, position_mask
from diff_transformer.ops.reference import attention_map

# Softmax attention of queries [B, heads, T, width] and keys [B, G, S, width] to values [B, G, S, their width].
MapAttention = Callable[[Tensor, Tensor, Tensor], Tensor]


class Kernel(NamedTuple):
    """The limits of a kernel of SDPA. Source: PyTorch, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp."""

    max_width: int | None  # of queries and of values; None for any
    wider_values: bool  # whether values may have another width than queries
    masks: bool
    dtypes: tuple[torch.dtype, ...]
    grouped: bool  # whether it reads shared keys in place (enable_gqa)


_HALF = (torch.bfloat16, torch.float16)
_FLOATING = (*_HALF, torch.float32)
KERNELS = {
    "cudnn": Kernel(128, True, True, _HALF, True),
    "flash": Kernel(256, False, False, _HALF, True),
    "efficient": Kernel(None, True, True, _FLOATING, False),
    "cpu": Kernel(None, False, True, (*_FLOATING, torch.float64), False),
}
REPEATING = (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)  # the backward of the others adds in any order
CUDNN_FIRST = 91500  # versions of cuDNN above this one are PyTorch's first choice on Hopper and Blackwell servers


class Plan(NamedTuple):
    """The kernel of SDPA that a call goes to, and how its values are cut for it."""

    kernel: str  # of KERNELS
    parts: int  # of the values, each in a call of its own
    width: int  # of such a part


def unsupported_reason(call: Call) -> str | None:
    """Why the backend cannot compute this call, or None: it takes all but some packed documents."""
    if call.cu_seqlens_q is None:
        return None
    if active_transform() is not None or not packs(call.v):
        return "PyTorch's varlen_attn takes packed bfloat16 and float16 on CUDA, and its backward does not repeat"
    width = call.q1.shape[3]  # of the parts of the values too
    if width % 8 or not supports(KERNELS["flash"], width, width, call.v.dtype, False):
        return f"PyTorch's varlen_attn takes widths that 8 divides, up to 256, not {width}"
    return None


def attend(call: Call) -> Tensor:
    """(first A1 - lam A2) V, [B, H, T, Dv] in the dtype of v.

    On the CPU all calls compute in fp32: the bf16 kernel accumulates gradients in bf16, which misses the numerics
    budget of dv at lengths of some hundreds.
    """
    if call.cu_seqlens_q is not None:
        return _attend_packed(call)
    plan, dtype = plan_of(call), call.v.dtype
    call = with_noise_head_for_each_mask(call)
    on_cpu = call.q1.device.type == "cpu"
    if on_cpu:
        call = in_dtype(call, call.lam.dtype)
    visible = call.q1.shape[2], call.k1.shape[2], call.is_causal, call.window, call.attn_mask
    fully_masked = fully_masked_rows(*visible, call.q1.device)
    flag = call.window is None and (call.scale > 0 or not on_cpu)  # the CPU's multiplies its -inf by the scale
    mask, is_causal = mask_and_flag(*visible, fully_masked, call.q1, flag)
    options: dict[str, Any] = {"attn_mask": mask, "is_causal": is_causal, "scale": call.scale}

    def attend_to(q: Tensor, k: Tensor, values: Tensor) -> Tensor:
        if q.shape[1] != k.shape[1] and KERNELS[plan.kernel].grouped:
            return scaled_dot_product_attention(q, k, values, **options, enable_gqa=True)
        if q.shape[1] != k.shape[1]:  # SDPA would materialise the maps
            k, values = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, values))
        return scaled_dot_product_attention(q, k, values, **options)

    mask_by_head = call.attn_mask is not None and call.attn_mask.shape[1] > 1  # would have to be copied for both maps
    joined = call.k2 is None and not mask_by_head
    with sdpa_kernel(list(REPEATING)) if must_repeat(call) else nullcontext():
        return difference(call, attend_to, plan, joined, fully_masked).to(dtype)


def _attend_packed(call: Call) -> Tensor:
    def attend_to(*heads: Tensor) -> Tensor:
        q, k, v = (x[0].transpose(0, 1) for x in heads)
        assert call.documents is not None
        out = packed_attention(q, k, v, *call.documents, call.is_causal, call.window, call.scale)
        return out.transpose(0, 1)[None]

    parts = value_parts(KERNELS["flash"], concrete(call.q1.shape[3]), concrete(call.v.shape[3]))
    return difference(call, attend_to, Plan("flash", *parts), joined=call.k2 is None)


def difference(
    call: Call, attend_to: MapAttention, plan: Plan, joined: bool, fully_masked: Tensor | None = None
) -> Tensor:
    """(first A1 - lam A2) V, [B, H, T, Dv], subtracted in the dtype of lam; 0 in ``fully_masked``, [B|1, H|1, T, 1].

    joined: one call for both maps, which have the same keys.
    """
    q1, q2, k1, k2, v, lam = call[:6]
    G, Dv, padding = k1.shape[1], v.shape[3], plan.parts * plan.width - v.shape[3]
    values = (pad(v, (0, padding)) if padding else v).split(plan.width, dim=-1)

    def one_map(q: Tensor, k: Tensor) -> Tensor:
        outs = [attend_to(q, k, part) for part in values]
        return (outs[0] if len(outs) == 1 else torch.cat(outs, dim=-1)).narrow(-1, 0, Dv).to(lam.dtype)

    if joined:
        by_group = [x.unflatten(1, (G, -1)) for x in (q1, q2)]  # [B, G, heads of the map / G, T, D]
        out = one_map(torch.cat(by_group, dim=2).flatten(1, 2), k1).unflatten(1, (G, -1))
        first, second = (x.flatten(1, 2) for x in out.split([x.shape[2] for x in by_group], dim=2))
    else:
        first, second = one_map(q1, k1), one_map(q2, k1 if k2 is None else k2)
    if call.first is not None:
        first = call.first * first
    out = first - lam * second.repeat_interleave(q1.shape[1] // q2.shape[1], dim=1)
    return (out if fully_masked is None else out.masked_fill(fully_masked, 0)).to(v.dtype)


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
        backend: ``"sdpa"`` (PyTorch chooses the kernel) or ``"eager"`` (materialises the map).
    """
    T, S = q.shape[2], k.shape[2]
    if backend == "sdpa":
        mask, is_causal = mask_and_flag(T, S, is_causal, window, attn_mask, None, q, window is None or window >= S)
        grouped = True if q.shape[1] != k.shape[1] else False  # noqa: SIM210  (symbolic when traced or compiled)
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, enable_gqa=grouped)
    seen = position_mask(T, S, is_causal, window, q.device)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    weights = attention_map(q, k, seen, attn_mask, q.shape[3] ** -0.5)  # [B, n, T, S], fp32
    return (weights @ v.to(weights.dtype)).to(v.dtype)


def plan_of(call: Call) -> Plan:
    """The plan for the kernel that PyTorch prefers among those that take the call."""
    D, Dv = concrete(call.q1.shape[3]), concrete(call.v.shape[3])
    names = ("efficient",) if must_repeat(call) else kernels_of(call.q1.device.type, call.q1.device.index)
    for name in names:
        parts, width = value_parts(KERNELS[name], D, Dv)
        if supports(KERNELS[name], D, width, call.q1.dtype, needs_mask(call)):
            return Plan(name, parts, width)
    return Plan("efficient", 1, Dv)


def must_repeat(call: Call) -> bool:
    """True if the gradients of a call on a GPU must repeat bit for bit."""
    wanted = bool(call.gradients) and torch.are_deterministic_algorithms_enabled()
    return wanted and call.q1.device.type == "cuda"


def needs_mask(call: Call) -> bool:
    """True if SDPA needs a mask: its causal corner is the upper left one, unless one query sees all keys."""
    if call.attn_mask is not None or call.window is not None:
        return True
    if call.is_causal and 1 != call.q1.shape[2] != call.k1.shape[2]:  # noqa: SIM103 (symbolic under torch.compile)
        return True
    return False


def value_parts(kernel: Kernel, width: int, Dv: int) -> tuple[int, int]:
    """In how many parts values of width Dv are passed beside queries of this width, and the width of a part."""
    limit = (kernel.max_width or Dv) if kernel.wider_values else width
    parts = -(-Dv // limit)
    if not kernel.wider_values:
        return parts, width
    return parts, Dv if parts == 1 else -(-Dv // (8 * parts)) * 8


def supports(kernel: Kernel, width: int, part: int, dtype: torch.dtype, masked: bool) -> bool:
    """True if a kernel takes queries of ``width`` and values of width ``part``."""
    if dtype not in kernel.dtypes or (masked and not kernel.masks):
        return False
    if kernel is KERNELS["cudnn"] and (width % 8 or part % 8):
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


def mask_and_flag(
    T: int,
    S: int,
    is_causal: bool,
    window: int | None,
    attn_mask: Tensor | None,
    fully_masked: Tensor | None,
    q: Tensor,
    flag: bool,
) -> tuple[Tensor | None, bool]:
    """SDPA's mask, boolean or additive, which unmasks the fully masked rows, and its flag is_causal.

    That aligns to the upper left corner and excludes a mask. flag: whether it may be set.
    """
    if is_causal and attn_mask is None and flag and 1 < T == S:
        return None, True
    mask = one_mask(position_mask(T, S, is_causal, window, q.device), attn_mask)
    if mask is not None and mask.dtype != torch.bool:
        mask = cast_mask(mask, q.dtype)
    if mask is not None and fully_masked is not None:
        mask = mask | fully_masked if mask.dtype == torch.bool else mask.masked_fill(fully_masked, 0)
    return mask, False


def packs(x: Tensor) -> bool:
    """True if ``packed_attention`` takes tensors like x here, and repeats where algorithms must be deterministic."""
    if x.dtype not in _HALF or torch.are_deterministic_algorithms_enabled():
        return False
    return "flash" in kernels_of(x.device.type, x.device.index) and torch.version.hip is None


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    is_causal: bool, window: int | None, scale: float | None = None,
) -> Tensor:  # fmt: skip
    """softmax(q k^T scale) v within each document by PyTorch's ``varlen_attn``, [total_q, heads, D]."""
    from torch.nn.attention.varlen import varlen_attn

    window = None if window is None else min(window, len(k))
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
    """True if the installed PyTorch's ``varlen_attn`` reads shared keys in place."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


# Constants for torch.compile, as in triton/__init__.py.
for _function in (kernels_of, varlen_takes_groups):
    _function._dynamo_marked_constant = True  # ty: ignore[invalid-assignment]
