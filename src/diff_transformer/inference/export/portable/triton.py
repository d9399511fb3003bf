"""The CUDA kernels of an exported model: the package's own if it is installed, else none."""

from torch import Tensor

from diff_transformer import __version__
from diff_transformer.inference.export.portable.package import attend_by_package, installed
from diff_transformer.ops.call import Call


def attend(call: Call) -> Tensor:
    """(softmax(q1 k1^T scale) - lam softmax(q2 k2^T scale)) v."""
    return attend_by_package(call, "triton")


def unsupported_reason(call: Call) -> str | None:
    """Why the backend cannot work here, or None."""
    package = installed()
    if package is None:
        return f"the exported model brings no kernels of its own; pip install diff-transformer=={__version__} for them"
    return package.triton.unsupported_reason(call)
