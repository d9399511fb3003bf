"""Differential attention by PyTorch's and flash-attn's softmax attention: a call for both maps, for one, or for a part.

``difference`` subtracts the maps and zeroes fully masked rows. There are three ways to call softmax attention: ``Sdpa``
(PyTorch's scaled_dot_product_attention), ``Flex`` (FlexAttention, compiled) and ``Flash`` (the flash-attn package). The
matched Transformer's attention, ``softmax_attention``, takes the same ways.

A call for each map, with values as wide as the kernel takes, is FlashDiffAttn_1 or _2 (arXiv 2410.05258, appendix A).
One call of SDPA computes both maps where the keys are [k1|k2], of width 2 D, and the queries [q1|0] and [0|q2]: the
zeros add nothing to the scores. Where k2 is k1, the queries of both maps are simply more heads.

Shapes: B batch, H signal heads, Hn noise heads, G key/value heads, T queries, S keys, D query width, Dv value width.
"""

import importlib
import inspect
import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from operator import index as concrete
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from diff_transformer.ops.arguments import active_transform
from diff_transformer.ops.call import Call, Documents, in_dtype, replace, with_noise_head_for_each_mask
from diff_transformer.ops.masking import cast_mask, fully_masked_rows, one_mask, position_mask
from diff_transformer.ops.reference import attention_map

# Softmax attention of queries [B, heads, T, width] and keys [B, G, S, width] to values [B, G, S, their width].
MapAttention = Callable[[Tensor, Tensor, Tensor], Tensor]


def difference(
    call: Call,
    attend: MapAttention,
    parts: int,
    width: int,
    *,
    joined: bool = False,
    fully_masked: Tensor | None = None,
) -> Tensor:
    """(A1 - lam A2) V, [B, H, T, Dv], subtracted in the dtype of lam; 0 in the rows ``fully_masked``, [B|1, H|1, T, 1].

    parts, width: of the values, each passed to ``attend`` in a call of its own. joined: one call for both maps.
    """
    q1, q2, k1, k2, v, lam = call[:6]
    G, Dv, padding = k1.shape[1], v.shape[3], parts * width - v.shape[3]
    values = (pad(v, (0, padding)) if padding else v).split(width, dim=-1)

    def one_map(q: Tensor, k: Tensor) -> Tensor:
        outs = [attend(q, k, part) for part in values]
        return (outs[0] if len(outs) == 1 else torch.cat(outs, dim=-1)).narrow(-1, 0, Dv).to(lam.dtype)

    if joined:
        if k2 is not None:
            k1 = torch.cat((k1, k2), dim=-1)
            q1, q2 = pad(q1, (0, q2.shape[-1])), pad(q2, (q1.shape[-1], 0))
        by_group = [x.unflatten(1, (G, -1)) for x in (q1, q2)]  # [B, G, heads of the map / G, T, D or 2 D]
        out = one_map(torch.cat(by_group, dim=2).flatten(1, 2), k1).unflatten(1, (G, -1))
        first, second = (x.flatten(1, 2) for x in out.split([x.shape[2] for x in by_group], dim=2))
    else:
        first, second = one_map(q1, k1), one_map(q2, k1 if k2 is None else k2)
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
        backend: ``"sdpa"`` (PyTorch chooses the kernel), ``"eager"`` (materialises the map), ``"flex"``, ``"flash"``.

    Raises:
        RuntimeError: if the backend cannot compute this call.
    """
    T, S, scale = q.shape[2], k.shape[2], q.shape[3] ** -0.5
    if backend == "sdpa":
        mask, is_causal = mask_and_flag(T, S, is_causal, window, attn_mask, None, q, window is None or window >= S)
        grouped = True if q.shape[1] != k.shape[1] else False  # noqa: SIM210  (symbolic when traced or compiled)
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, enable_gqa=grouped)
    if attn_mask is not None:
        attn_mask = attn_mask[(None,) * (4 - attn_mask.dim())]
    if backend == "eager":
        seen = position_mask(T, S, is_causal, window, q.device)
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        weights = attention_map(q, k, seen, attn_mask, scale)  # [B, n, T, S], fp32
        return (weights @ v.to(weights.dtype)).to(v.dtype)
    way = {"flex": Flex, "flash": Flash}[backend]
    reason = way.unsupported_reason(q.device, q.dtype)
    if reason is None and backend == "flash" and attn_mask is not None:
        reason = "flash-attn takes no attn_mask; pack sequences instead of padding them"
    if reason is not None:
        raise RuntimeError(f"softmax attention on {backend!r} is not available: {reason}")
    if backend == "flash":
        return flash_attention(flash_function(), q, k, v, scale, is_causal, window)[..., : v.shape[3]]
    reason = Flex.no_gradients_reason(q.device)
    if reason and torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        raise NotImplementedError(reason)
    fully_masked = fully_masked_rows(T, S, is_causal, window, attn_mask, q.device)
    out = Flex.function(q, k, v, is_causal, window, attn_mask, fully_masked, scale)
    return out if fully_masked is None else out.masked_fill(fully_masked, 0)


# PyTorch's scaled_dot_product_attention, and its varlen_attn for packed documents.


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


class SdpaPlan(NamedTuple):
    """How a call is passed to SDPA."""

    kernel: str  # of KERNELS
    joined: bool  # both maps in one call
    parts: int  # of the values, each in a call of its own
    width: int  # of such a part

    @property
    def name(self) -> str:
        return f"{self.kernel}, {'both maps at once' if self.joined else 'one map at a time'}"


class Sdpa:
    """The backend "sdpa". A variant is one of ``plans``; None for the first one, with the kernel that PyTorch chooses.

    On the CPU all calls compute in fp32: the bf16 kernel accumulates gradients in bf16, which misses the numerics
    budget of dv at lengths of some hundreds.
    """

    @staticmethod
    def attend(call: Call, strict: bool = False) -> Tensor:
        """(A1 - lam A2) V; strict: raise where the variant's kernel refuses the call, instead of taking another."""
        if call.documents is not None:
            return Sdpa._attend_packed(call, call.documents)
        kernel = nullcontext() if call.variant is None else only(call.variant.kernel, strict)
        plan, dtype = call.variant or plans(call)[0], call.v.dtype
        call = with_noise_head_for_each_mask(call)
        on_cpu = call.q1.device.type == "cpu"
        if on_cpu:
            call = in_dtype(call, call.lam.dtype)
        given = call.q1.shape[2], call.k1.shape[2], call.is_causal, call.window, call.attn_mask
        fully_masked = fully_masked_rows(*given, call.q1.device)
        flag = call.window is None and (call.scale > 0 or not on_cpu)  # the CPU's multiplies its -inf by the scale
        mask, is_causal = mask_and_flag(*given, fully_masked, call.q1, flag)
        options: dict[str, Any] = {"attn_mask": mask, "is_causal": is_causal, "scale": call.scale}

        def attend(q: Tensor, k: Tensor, values: Tensor) -> Tensor:
            if q.shape[1] != k.shape[1] and KERNELS[plan.kernel].grouped:
                return scaled_dot_product_attention(q, k, values, **options, enable_gqa=True)
            if q.shape[1] != k.shape[1]:  # SDPA would materialise the maps
                k, values = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, values))
            return scaled_dot_product_attention(q, k, values, **options)

        with kernel:
            out = difference(call, attend, plan.parts, plan.width, joined=plan.joined, fully_masked=fully_masked)
        return out.to(dtype)

    @staticmethod
    def _attend_packed(call: Call, documents: Documents) -> Tensor:
        plan = call.variant or packed_plans(call)[0]

        def attend(*heads: Tensor) -> Tensor:
            rows = (x[0].transpose(0, 1) for x in heads)
            out = packed_attention(*rows, *documents, call.is_causal, call.window, call.scale)
            return out.transpose(0, 1)[None]

        return difference(call, attend, plan.parts, plan.width, joined=plan.joined)

    @staticmethod
    def takes_packed(call: Call) -> bool:
        """Whether all packed documents are computed at once."""
        return active_transform() is None and bool(packed_plans(call))


def plans(call: Call) -> list[SdpaPlan]:
    """The plans that the device's kernels take for this call, never empty: by kernel, in the order in which PyTorch
    prefers them.

    Three rules say which of a kernel's plans comes first:

    1. Both maps in one call where they share their keys: no product is added.
    2. Both maps in one call on a GPU's kernel whose values are as wide as its queries, if an even number of parts as
       wide as a query covers the values: keys of twice the width then need half the parts.
    3. Otherwise one map at a time.

    A mask with a row for each head would have to be copied for both maps to be joined.
    """
    q1, v, shared = call.q1, call.v, call.k2 is None
    D, Dv = concrete(q1.shape[3]), concrete(v.shape[3])
    masked = call.attn_mask is not None or call.window is not None or not aligned(call)
    mask_by_head = call.attn_mask is not None and call.attn_mask.shape[1] > 1
    found = []
    for name in kernels_of(q1.device.type, q1.device.index):
        kernel = KERNELS[name]
        even = -(-Dv // D) % 2 == 0
        joined_first = shared or (even and not kernel.wider_values and q1.device.type == "cuda")
        for joined in (joined_first, not joined_first):
            width = D if shared or not joined else 2 * D
            parts, part = value_parts(kernel, width, Dv)
            if not (joined and mask_by_head) and supports(kernel, width, part, q1.dtype, masked):
                found.append(SdpaPlan(name, joined, parts, part))
    return found or [SdpaPlan("efficient", False, 1, Dv)]


def packed_plans(call: Call) -> list[SdpaPlan]:
    """The plans that ``varlen_attn`` takes for packed documents; none where it does not work (``packs``)."""
    if not packs(call.v):
        return []
    offered = plans(replace(call, attn_mask=None, is_causal=False, window=None))
    return [plan for plan in offered if plan.kernel == "flash" and plan.width % 8 == 0]


def aligned(call: Call) -> bool:
    """Whether SDPA needs no mask for the causal limit: its own corner is the upper left one, and one query sees all."""
    if call.is_causal and 1 != call.q1.shape[2] != call.k1.shape[2]:  # noqa: SIM103 (symbolic under torch.compile)
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


def only(name: str, strict: bool) -> AbstractContextManager:
    """Context manager in which SDPA takes this kernel; unless ``strict``, the others where it refuses a call."""
    first = KERNELS[name].backend
    rest = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    if torch.are_deterministic_algorithms_enabled():  # with warn_only, as training sets it, flash would not repeat
        rest = rest[1:]
    return sdpa_kernel([first] if strict else [first, *(x for x in rest if x != first)], set_priority=True)


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
    """Whether the installed PyTorch's ``varlen_attn`` reads shared keys in place."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


# FlexAttention, compiled: masks are functions of positions.


class Flex:
    """The backend "flex". On the CPU it has no backward, and the compiled forward needs a C++ compiler."""

    @staticmethod
    def attend(call: Call) -> Tensor:
        """(A1 - lam A2) V."""
        call = with_noise_head_for_each_mask(call)
        positions = call.is_causal, call.window, call.attn_mask
        fully_masked = fully_masked_rows(call.q1.shape[2], call.k1.shape[2], *positions, call.q1.device)

        def attend(*heads: Tensor) -> Tensor:
            return Flex.function(*heads, *positions, fully_masked, call.scale)

        return difference(call, attend, 1, call.v.shape[3], fully_masked=fully_masked)

    @staticmethod
    def function(q, k, v, is_causal: bool, window: int | None, attn_mask, fully_masked, scale: float) -> Tensor:
        """softmax(q k^T scale) v, [B, heads, T, Dv]; the rows ``fully_masked`` hold finite numbers."""
        T, S = q.shape[2], k.shape[2]
        if attn_mask is None or fully_masked is None:
            mask, bias = position_block_mask(T, S, is_causal, window, q.device), None
        else:
            mask = dense_block_mask(T, S, is_causal, window, attn_mask, fully_masked)
            bias = None if attn_mask.dtype == torch.bool else additive(attn_mask, fully_masked)
        # On the CPU FlexAttention refuses tensors that require gradients, even under no_grad.
        q, k, v = (x.contiguous() if torch.is_grad_enabled() else x.detach().contiguous() for x in (q, k, v))
        return flex_attention(q, k, v, bias, mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])

    @staticmethod
    def unsupported_reason(device: torch.device, dtype: torch.dtype) -> str | None:
        """Why the backend cannot work here, or None."""
        if dtype == torch.float64:
            return "FlexAttention has no float64 kernels; give backend='reference' or 'blockwise'"
        if device.type == "cpu" and torch.compiler.is_compiling():
            return "FlexAttention on the CPU cannot be part of a compiled function; give backend='blockwise'"
        if device.type == "cpu" and shutil.which(os.environ.get("CXX", "g++")) is None:
            found = "FlexAttention on the CPU is compiled with a C++ compiler, and none was found"
            return f"{found}; install g++ or set CXX"
        if device.type not in ("cpu", "cuda"):
            return f"FlexAttention is used here on CPU and CUDA devices only, not on {device.type}"
        return None

    @staticmethod
    def no_gradients_reason(device: torch.device) -> str | None:
        """Why FlexAttention computes no gradients on the device, or None."""
        if device.type == "cpu":
            advice = "call it under torch.no_grad() or use another backend"
            return f"FlexAttention computes no gradients on the CPU; {advice}"
        return None


@cache
def compiled_flex_attention():
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def flex_attention(*args, **kwargs) -> Tensor:
    """FlexAttention, compiled for each set of shapes; raises beyond the limit instead of running unfused."""
    if torch.compiler.is_compiling():
        return compiled_flex_attention()(*args, **kwargs)
    with torch._dynamo.config.patch(recompile_limit=256, fail_on_recompile_limit_hit=True):
        return compiled_flex_attention()(*args, **kwargs)


def position_rule(T: int, S: int, is_causal: bool, window: int | None):
    """A mask_mod for positions; queries before the first key see everything; their rows are set to 0 afterwards."""

    def rule(b, h, query, key):
        own = query + (S - T)
        if not is_causal:
            return key < S
        seen = key <= own
        if window is not None:
            seen = seen & (key > own - window)
        return seen | (own < 0)

    return rule


@cache
def position_block_mask(T: int, S: int, is_causal: bool, window: int | None, device: torch.device):
    """The block mask of positions alone; None if every query may see every key."""
    from torch.nn.attention.flex_attention import create_block_mask

    if not is_causal:
        return None
    return create_block_mask(position_rule(T, S, is_causal, window), None, None, T, S, device=str(device))


def dense_block_mask(T, S, is_causal, window, attn_mask: Tensor, fully_masked: Tensor):
    """The block mask of positions and attn_mask, [B|1, H|1, T|1, S|1]."""
    from torch.nn.attention.flex_attention import create_block_mask

    allowed = attn_mask if attn_mask.dtype == torch.bool else attn_mask != float("-inf")
    allowed = (allowed | fully_masked).expand(*attn_mask.shape[:2], T, S).contiguous()
    B, H = allowed.shape[:2]
    positions = position_rule(T, S, is_causal, window)
    unseen_rows = fully_masked.expand(B, H, T, 1).contiguous()

    def rule(b, h, query, key):
        b, h = b * (B > 1), h * (H > 1)
        return allowed[b, h, query, key] & (positions(b, h, query, key) | unseen_rows[b, h, query, 0])

    return create_block_mask(rule, None if B == 1 else B, None if H == 1 else H, T, S, device=str(attn_mask.device))


def additive(attn_mask: Tensor, fully_masked: Tensor):
    """A score_mod that adds attn_mask, [B|1, H|1, T|1, S|1]; 0 in fully masked rows."""
    bias = attn_mask.masked_fill(fully_masked, 0).contiguous()
    B, H, T, S = (size > 1 for size in bias.shape)

    def rule(score, b, h, query, key):
        return score + bias[b * B, h * H, query * T, key * S]

    return rule


# The flash-attn package, where installed. All its generations have one interface.

MODULES = ("flash_attn_interface", "flash_attn.cute", "flash_attn")  # generations 3, 4 and 2
MAX_WIDTH = 256  # of every generation
PROBE_TOKENS = 128


class Flash:
    """The backend "flash": v whole if the installed version takes values wider than the queries (FlashDiffAttn_1),
    otherwise in parts as wide as these (FlashDiffAttn_2). A probe on a few tokens tells which.
    """

    @staticmethod
    def attend(call: Call) -> Tensor:
        """(A1 - lam A2) V."""
        function = flash_function() if call.documents is None else packed_function(call.documents)
        fully_masked = 0
        if call.documents is None and call.is_causal:  # queries before the first key are left out: their rows are 0
            fully_masked = max(0, call.q1.shape[2] - call.k1.shape[2])
            q1, q2, lam = (x[:, :, fully_masked:] for x in (call.q1, call.q2, call.lam))
            call = replace(call, q1=q1, q2=q2, lam=lam)

        def attend(*heads: Tensor) -> Tensor:
            return flash_attention(function, *heads, call.scale, call.is_causal, call.window)

        out = difference(call, attend, *flash_parts(call))
        return pad(out, (0, 0, fully_masked, 0)) if fully_masked else out

    @staticmethod
    def takes_packed(call: Call) -> bool:
        """Whether all packed documents are computed at once."""
        return has_varlen_function()

    @staticmethod
    def unsupported_reason(device: torch.device, dtype: torch.dtype) -> str | None:
        """Why the backend cannot work here, or None."""
        if dtype not in _HALF:
            name = str(dtype).removeprefix("torch.")
            return f"flash-attn takes bfloat16 and float16, not {name}; cast, or give another backend"
        if device.type != "cuda":
            return f"flash-attn runs on CUDA devices, not on {device.type}; give another backend"
        if flash_package() is None:
            return "the flash-attn package is not installed; install it, or give another backend"
        if torch.cuda.is_available() and torch.cuda.get_device_capability(device) < (8, 0):
            return "flash-attn needs a GPU of compute capability 8.0 or more; give another backend"
        return None

    @staticmethod
    def unsupported_call_reason(call: Call) -> str | None:
        """Why the backend cannot compute this call, or None."""
        if call.attn_mask is not None:
            return "flash-attn takes no attn_mask; give backend='sdpa', or pack sequences instead of padding them"
        if call.q1.shape[3] > MAX_WIDTH:
            return f"flash-attn takes queries of width {MAX_WIDTH} at most, not {call.q1.shape[3]}; give backend='sdpa'"
        return None


def flash_attention(function: Callable, q, k, v, scale: float, is_causal: bool, window: int | None) -> Tensor:
    """softmax(q k^T scale) v by a function of the package, [B, heads, T, Dv rounded up to a multiple of 8]."""
    options: dict[str, Any] = {"softmax_scale": scale, "causal": is_causal}
    if window is not None:
        options["window_size"] = (window - 1, 0)
    rows = ((pad(x, (0, -x.shape[3] % 8)) if x.shape[3] % 8 else x).transpose(1, 2) for x in (q, k, v))
    return _output(function(*rows, **options)).transpose(1, 2)


def flash_parts(call: Call) -> tuple[int, int]:
    """In how many parts the installed version takes the values, and the width of a part, which 8 divides."""
    q1, k1, v = call.q1, call.k1, call.v
    D, Dv = _round_up(q1.shape[3]), _round_up(v.shape[3])
    whole = v.shape[3] == q1.shape[3]
    if not whole and v.shape[3] <= MAX_WIDTH:
        gradients = torch.is_grad_enabled() and any(x.requires_grad for x in (q1, call.q2, k1, v))
        groups = {q.shape[1] // k1.shape[1] for q in (q1, call.q2)}
        sizes = (D, Dv, v.dtype, v.device, gradients)
        whole = all(supports_wide_values(flash_function(), group, *sizes) for group in groups)
    return (1, Dv) if whole else (-(-v.shape[3] // D), D)


@cache
def supports_wide_values(
    function: Callable, group: int, D: int, Dv: int, dtype: torch.dtype, device: torch.device, gradients: bool
) -> bool:
    """Whether ``function`` attends from ``group`` heads of width D to one with values of width Dv; found by a probe."""
    with torch.set_grad_enabled(gradients):
        q, k, v = (
            torch.zeros(1, PROBE_TOKENS, heads, width, dtype=dtype, device=device, requires_grad=gradients)
            for heads, width in ((group, D), (1, D), (1, Dv))
        )
        try:
            out = _output(function(q, k, v, softmax_scale=1.0, causal=True))
            if gradients:
                out.sum().backward()
        except Exception:  # each generation raises its own type
            return False
    return out.shape[-1] == Dv


@cache
def flash_package() -> tuple[str, Callable] | None:
    """The first of ``MODULES`` that can be imported, and its flash_attn_func."""
    for name in MODULES:
        try:
            function = getattr(importlib.import_module(name), "flash_attn_func", None)
        except ImportError:
            continue
        if function is not None:
            return name, function
    return None


def flash_function() -> Callable:
    """The package's flash_attn_func."""
    found = flash_package()
    if found is None:
        raise RuntimeError("the flash-attn package is not installed")
    return found[1]


def packed_function(documents: Documents) -> Callable:
    """The package's flash_attn_varlen_func as a function of [1, rows, heads, width]."""
    packed = varlen_function()
    assert packed is not None  # ``takes_packed`` was asked
    return lambda q, k, v, **options: _output(packed(q[0], k[0], v[0], *documents, **options))[None]


def varlen_function() -> Callable | None:
    """The installed package's flash_attn_varlen_func, or None."""
    found = flash_package()
    return None if found is None else getattr(importlib.import_module(found[0]), "flash_attn_varlen_func", None)


@cache
def has_varlen_function() -> bool:
    """Whether the installed package has a function for packed documents."""
    return varlen_function() is not None


def _output(result) -> Tensor:
    """Some versions return the log-sum-exps beside the output."""
    return result[0] if isinstance(result, tuple) else result


def _round_up(width: int) -> int:
    return -(-width // 8) * 8


# Constants for torch.compile, as in triton/__init__.py.
for _function in (kernels_of, varlen_takes_groups, has_varlen_function):
    _function._dynamo_marked_constant = True  # ty: ignore[invalid-assignment]
