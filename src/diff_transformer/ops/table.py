"""The choice of ``backend="auto"`` on a GPU: the Triton kernels where records show that they are fastest, else SDPA."""

from operator import index as concrete

import torch

from diff_transformer.ops import sdpa, triton
from diff_transformer.ops.call import Call

# By compute capability: widths D, with values of 2 D, at which the Triton kernels take less time than every call of
# public kernels, forward and forward + backward. From benchmarks/results/attention_gpu.json, half precision; a test
# holds them equal.
MEASURED = {(9, 0): (64, 96, 128)}


def prefers_triton(call: Call) -> bool:
    """True if the Triton kernels compute a call that they support; otherwise PyTorch's attention does.

    They do where they were measured, where SDPA would need a mask of all pairs or a call for each document, and for a
    few queries over many keys.
    """
    if call.documents is not None or sdpa.needs_mask(call) or triton.decodes(call):
        return True
    D, device = concrete(call.q1.shape[3]), call.q1.device
    if call.v.shape[3] != 2 * D or call.q1.dtype not in (torch.bfloat16, torch.float16):
        return False
    return D in MEASURED.get(capability(device.type, device.index), ())


def capability(device: str, index: int | None) -> tuple[int, int]:
    """The compute capability of a GPU; (0, 0) for another device, or where there is none."""
    if device != "cuda" or not torch.cuda.is_available():
        return 0, 0
    return torch.cuda.get_device_capability(index)


capability._dynamo_marked_constant = True  # ty: ignore[missing-attribute]  (as in triton/__init__.py)
