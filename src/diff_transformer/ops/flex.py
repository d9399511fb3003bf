"""Differential attention on FlexAttention, compiled: one call for each map, masks as functions of positions.

On the CPU FlexAttention has no backward, and the compiled forward needs a C++ compiler.
Shapes: B batch, H signal heads, Hn noise heads, G key/value heads, T queries, S keys, D query width, Dv value width.
"""

import os
import shutil
from functools import cache

import torch
from torch import Tensor

from diff_transformer.ops.masking import fully_masked_rows


def attend(q1, q2, k1, k2, v, lam, attn_mask, is_causal, window, scale) -> Tensor:
    """(softmax(q1 k1^T scale) - lam softmax(q2 k2^T scale)) v of checked arguments, [B, H, T, Dv] in the dtype of v."""
    T, S, repeat = q1.shape[2], k1.shape[2], q1.shape[1] // q2.shape[1]
    if attn_mask is not None and attn_mask.shape[1] > 1:
        q2, repeat = q2.repeat_interleave(repeat, dim=1), 1  # each signal head then has its own second map
    fully_masked = fully_masked_rows(T, S, is_causal, window, attn_mask, q1.device)
    if attn_mask is None or fully_masked is None:
        mask = position_block_mask(T, S, is_causal, window, q1.device)
        bias = None
    else:
        mask = dense_block_mask(T, S, is_causal, window, attn_mask, fully_masked)
        bias = None if attn_mask.dtype == torch.bool else additive(attn_mask, fully_masked)

    def softmax_attention(q, k):
        grouped = q.shape[1] != k.shape[1]
        # On the CPU FlexAttention refuses tensors that require gradients, even under no_grad.
        q, k, values = (x.contiguous() if torch.is_grad_enabled() else x.detach().contiguous() for x in (q, k, v))
        return flex_attention(q, k, values, bias, mask, scale=scale, enable_gqa=grouped).to(lam.dtype)

    second = softmax_attention(q2, k2).repeat_interleave(repeat, dim=1)
    out = softmax_attention(q1, k1) - lam * second
    return (out if fully_masked is None else out.masked_fill(fully_masked, 0)).to(v.dtype)


@cache
def compiled():
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def flex_attention(*args, **kwargs) -> Tensor:
    """FlexAttention, compiled for each set of shapes; raises beyond the limit instead of running unfused."""
    if torch.compiler.is_compiling():
        return compiled()(*args, **kwargs)
    with torch._dynamo.config.patch(recompile_limit=256, fail_on_recompile_limit_hit=True):
        return compiled()(*args, **kwargs)


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


def unsupported_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the backend cannot work here, or None."""
    if dtype == torch.float64:
        return "FlexAttention has no float64 kernels; give backend='reference' or 'blockwise'"
    if device.type == "cpu" and torch.compiler.is_compiling():
        return "FlexAttention on the CPU cannot be part of a compiled function; give backend='blockwise'"
    if device.type == "cpu" and shutil.which(os.environ.get("CXX", "g++")) is None:
        return "FlexAttention on the CPU is compiled with a C++ compiler, and none was found; install g++ or set CXX"
    if device.type not in ("cpu", "cuda"):
        return f"FlexAttention is used here on CPU and CUDA devices only, not on {device.type}"
    return None


def no_gradients_reason(device: torch.device) -> str | None:
    """Why FlexAttention computes no gradients on the device, or None."""
    if device.type == "cpu":
        return "FlexAttention computes no gradients on the CPU; call it under torch.no_grad() or use another backend"
    return None
