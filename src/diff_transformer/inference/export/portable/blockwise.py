"""The CPU backend of an exported model: the package's own if it is installed, else PyTorch's attention."""

import torch
from torch import Tensor

from diff_transformer.inference.export.portable.installed import installed
from diff_transformer.ops.sdpa import attend as attend_in_torch

_package = installed("ops.cpu")


def attend(q1, q2, k1, k2, v, lam, attn_mask, is_causal, window, scale) -> Tensor:
    """(softmax(q1 k1^T scale) - lam softmax(q2 k2^T scale)) v of checked arguments, [B, H, T, Dv] in the dtype of v."""
    form = attend_in_torch if _package is None else _package.attend
    return form(q1, q2, k1, k2, v, lam, attn_mask, is_causal, window, scale)


def unsupported_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the backend cannot work here, or None."""
    return None
