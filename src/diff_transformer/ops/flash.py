"""FlashDiffAttn (arXiv 2410.05258, appendix A) on the flash-attn package, where installed: one or two calls a map.

If the installed version takes values wider than the queries, v is passed whole (FlashDiffAttn_1). Otherwise it is
passed in parts as wide as the queries, two for the paper's Dv = 2 D (FlashDiffAttn_2). A probe on a few tokens tells
which. All generations of the package have one interface: ``flash_attn_interface`` (3), ``flash_attn.cute`` (4),
``flash_attn`` (2). Packed documents take the same calls of ``flash_attn_varlen_func``.

Shapes: B batch, H signal heads, Hn noise heads, G key/value heads, T queries, S keys, D query width, Dv value width.
"""

import importlib
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

MODULES = ("flash_attn_interface", "flash_attn.cute", "flash_attn")
MAX_WIDTH = 256  # of every generation
PROBE_TOKENS = 128


def attend(q1, q2, k1, k2, v, lam, attn_mask, is_causal, window, scale) -> Tensor:
    """(softmax(q1 k1^T scale) - lam softmax(q2 k2^T scale)) v of checked arguments, [B, H, T, Dv] in the dtype of v."""
    T, S = q1.shape[2], k1.shape[2]
    fully_masked = max(0, T - S) if is_causal else 0  # queries before the first key: their rows are 0
    q1, q2, lam = q1[:, :, fully_masked:], q2[:, :, fully_masked:], lam[:, :, fully_masked:]
    out = _difference(_function(), q1, q2, k1, k2, v, lam, is_causal, window, scale)
    return pad(out, (0, 0, fully_masked, 0))


def attend_varlen(
    q1, q2, k1, k2, v, lam, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, is_causal, window, scale
) -> Tensor:
    """``attend`` within each document: tensors packed as [1, heads, total, width], lam [1, H, total, 1]."""
    packed, documents = varlen_function(), (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    assert packed is not None  # checked before

    def function(q: Tensor, k: Tensor, values: Tensor, **options) -> Tensor:
        return _output(packed(q[0], k[0], values[0], *documents, **options))[None]

    return _difference(function, q1, q2, k1, k2, v, lam, is_causal, window, scale)


def _difference(function: Callable, q1, q2, k1, k2, v, lam, is_causal, window, scale) -> Tensor:
    """Both maps by calls of ``function`` on tensors [B, length, heads, width], and their difference, [B, H, T, Dv]."""
    Dv, repeat = v.shape[3], q1.shape[1] // q2.shape[1]
    parts = [part.transpose(1, 2) for part in value_parts(q1, q2, k1, v)]  # each [B, S, G, D or Dv]
    options = {"softmax_scale": scale, "causal": is_causal}
    if window is not None:
        options["window_size"] = (window - 1, 0)

    def softmax_attention(q: Tensor, k: Tensor) -> Tensor:
        q, k = (_multiple_of_eight(x).transpose(1, 2) for x in (q, k))
        outs = [_output(function(q, k, part, **options)) for part in parts]
        return torch.cat(outs, dim=-1)[..., :Dv].transpose(1, 2).to(lam.dtype)

    second = softmax_attention(q2, k2).repeat_interleave(repeat, dim=1)
    return (softmax_attention(q1, k1) - lam * second).to(v.dtype)


def form(q1: Tensor, q2: Tensor, k1: Tensor, v: Tensor) -> int:
    """1 if the installed version takes the values whole, 2 if they are passed in parts as wide as the queries."""
    D, Dv = q1.shape[3], v.shape[3]
    if Dv > MAX_WIDTH:
        return 2
    if Dv == D:
        return 1
    gradients = torch.is_grad_enabled() and any(x.requires_grad for x in (q1, q2, k1, v))
    groups = {q.shape[1] // k1.shape[1] for q in (q1, q2)}
    sizes = (_round_up(D), _round_up(Dv), v.dtype, v.device, gradients)
    return 1 if all(supports_wide_values(_function(), group, *sizes) for group in groups) else 2


def value_parts(q1: Tensor, q2: Tensor, k1: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """v whole or in parts [B, G, S, width], padded with zeros to a width that the kernels take."""
    if form(q1, q2, k1, v) == 1:
        return (_multiple_of_eight(v),)
    width = _round_up(q1.shape[3])
    return pad(v, (0, -v.shape[3] % width)).split(width, dim=-1)


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
def installed() -> tuple[str, Callable] | None:
    """The first of ``MODULES`` that can be imported, and its flash_attn_func."""
    for name in MODULES:
        try:
            function = getattr(importlib.import_module(name), "flash_attn_func", None)
        except ImportError:
            continue
        if function is not None:
            return name, function
    return None


def varlen_function() -> Callable | None:
    """The installed package's flash_attn_varlen_func, or None."""
    found = installed()
    return None if found is None else getattr(importlib.import_module(found[0]), "flash_attn_varlen_func", None)


@cache
def takes_packed() -> bool:
    """Whether the installed package has a function for packed documents."""
    return varlen_function() is not None


# A constant for torch.compile, as in triton/__init__.py.
takes_packed._dynamo_marked_constant = True  # ty: ignore[missing-attribute]


def unsupported_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the backend cannot work here, or None."""
    if dtype not in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        return f"flash-attn takes bfloat16 and float16, not {name}; cast, or give another backend"
    if device.type != "cuda":
        return f"flash-attn runs on CUDA devices, not on {device.type}; give another backend"
    if installed() is None:
        return "the flash-attn package is not installed; install it, or give another backend"
    if torch.cuda.is_available() and torch.cuda.get_device_capability(device) < (8, 0):
        return "flash-attn needs a GPU of compute capability 8.0 or more; give another backend"
    return None


def unsupported_call_reason(q1, q2, k1, k2, v, lam, attn_mask, is_causal, window, scale) -> str | None:
    """Why the backend cannot take these arguments, which ``attend`` takes, or None."""
    if attn_mask is not None:
        return "flash-attn takes no attn_mask; give backend='sdpa', or pack sequences instead of padding them"
    if q1.shape[3] > MAX_WIDTH:
        return f"flash-attn takes queries of width {MAX_WIDTH} at most, not {q1.shape[3]}; give backend='sdpa'"
    return None


def _function() -> Callable:
    found = installed()
    if found is None:
        raise RuntimeError("the flash-attn package is not installed")
    return found[1]


def _output(result) -> Tensor:
    """Some versions return the log-sum-exps beside the output."""
    return result[0] if isinstance(result, tuple) else result


def _round_up(width: int) -> int:
    return -(-width // 8) * 8


def _multiple_of_eight(x: Tensor) -> Tensor:
    return x if x.shape[3] % 8 == 0 else pad(x, (0, -x.shape[3] % 8))
