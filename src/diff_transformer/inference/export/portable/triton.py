"""The CUDA kernels of an exported model: the package's own if it is installed, else none."""

import torch
from torch import Tensor

from diff_transformer import __version__
from diff_transformer.inference.export.portable.package import attend_by_package, installed
from diff_transformer.ops.call import Call


def attend(call: Call) -> Tensor:
    """(softmax(q1 k1^T scale) - lam softmax(q2 k2^T scale)) v; the variant "auto" leaves the backend to the package."""
    return attend_by_package(call, call.variant or "triton")


def takes_packed(call: Call) -> bool:
    """Whether all packed documents are computed at once."""
    return True


def unsupported_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the backend cannot work here, or None."""
    package = installed()
    if package is None:
        return f"the exported model brings no kernels of its own; pip install diff-transformer=={__version__} for them"
    return package.triton.unsupported_reason(device, dtype)
