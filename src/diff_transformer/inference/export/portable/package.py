"""What an exported model leaves to the package, if the version that exported it is installed."""

from functools import cache
from importlib import import_module
from types import ModuleType

from torch import Tensor

from diff_transformer import __version__
from diff_transformer.ops.call import Call


@cache
def installed() -> ModuleType | None:
    """The package's operator if the version that exported this file is installed, else None."""
    try:
        package = import_module("diff_transformer")
        return import_module("diff_transformer.ops") if package.__version__ == __version__ else None
    except ImportError:
        return None


def attend_by_package(call: Call, backend: str) -> Tensor:
    """[B, H, T, Dv] by the installed package's public functions."""
    package = installed()
    inputs = (call.q1, call.q2, call.k1, call.k1 if call.k2 is None else call.k2, call.v, call.lam)
    assert package is not None
    options = {"is_causal": call.is_causal, "window": call.window, "scale": call.scale, "backend": backend}
    if call.documents is None:
        return package.diff_attention(*inputs, attn_mask=call.attn_mask, **options)
    rows = [x[0].transpose(0, 1) for x in inputs]
    rows[3] = rows[2] if call.k2 is None else rows[3]
    return package.diff_attention_varlen(*rows, *call.documents, **options).transpose(0, 1)[None]


# Constant for torch.compile, which cannot import a module.
installed._dynamo_marked_constant = True  # ty: ignore[missing-attribute]


# In place of ops/table.py.


def prefers_triton(call: Call) -> bool:
    """True: the package, which has the kernels, is faster."""
    return True


# In place of ops/cpu/decode.py.


def can_decode(*arguments) -> bool:
    """False."""
    return False


def decode_heads(*arguments) -> None:
    """Leave decoding to the modules."""
