"""The CPU backend of an exported model: the package's own if it is installed, else PyTorch's attention."""

from torch import Tensor

from diff_transformer.inference.export.portable.package import attend_by_package, installed
from diff_transformer.ops import sdpa
from diff_transformer.ops.call import Call


def unsupported_reason(call: Call) -> str | None:
    """Why the backend cannot compute this call, or None: it takes one document at a time."""
    return None if call.documents is None else "blockwise takes no packed documents"


def attend(call: Call) -> Tensor:
    """(softmax(q1 k1^T scale) - lam softmax(q2 k2^T scale)) v, [B, H, T, Dv] in the dtype of v."""
    return sdpa.attend(call) if installed() is None else attend_by_package(call, "blockwise")
