"""The CPU backend of an exported model: the package's own if it is installed, else PyTorch's attention."""

from torch import Tensor

from diff_transformer.inference.export.portable.package import attend_by_package, installed
from diff_transformer.ops.call import Call
from diff_transformer.ops.softmax_calls import Sdpa


def unsupported_reason(device, dtype) -> None:
    """None: it computes everything."""


def attend(call: Call) -> Tensor:
    """(softmax(q1 k1^T scale) - lam softmax(q2 k2^T scale)) v, [B, H, T, Dv] in the dtype of v."""
    return Sdpa.attend(call) if installed() is None else attend_by_package(call, "blockwise")
