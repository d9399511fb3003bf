"""The CUDA kernels of an exported model: the package's own if it is installed, else none."""

import torch
from torch import Tensor

from diff_transformer import __version__
from diff_transformer.inference.export.portable.installed import installed

_package = installed("ops.triton")


def attend(*arguments, **options) -> Tensor:
    """As in the package."""
    assert _package is not None  # unsupported_reason says so first
    return _package.attend(*arguments, **options)


def attend_varlen(*arguments, **options) -> Tensor:
    """As in the package."""
    assert _package is not None
    return _package.attend_varlen(*arguments, **options)


def forms(*arguments) -> list:
    """As in the package."""
    assert _package is not None
    return _package.forms(*arguments)


def chosen_passes() -> bool | None:
    """As in the package."""
    return None if _package is None else _package.chosen_passes()


def gluon_switches() -> str:
    """As in the package."""
    return "" if _package is None else _package.gluon_switches()


def untried() -> bool:
    """As in the package."""
    return _package is not None and _package.untried()


def unsupported_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the backend cannot work here, or None."""
    if _package is None:
        return f"the exported model brings no kernels of its own; pip install diff-transformer=={__version__} for them"
    return _package.unsupported_reason(device, dtype)


# For torch.compile the answer is a constant, as it is in the package.
unsupported_reason._dynamo_marked_constant = True  # ty: ignore[missing-attribute]


def unsupported_call_reason(*arguments) -> str | None:
    """Why the backend cannot compute this call, or None."""
    return None if _package is None else _package.unsupported_call_reason(*arguments)
