import pytest
import torch

from diff_transformer.ops import triton
from diff_transformer.ops.cpu import library


@pytest.fixture(autouse=True)
def _poisoned_memory(poisoned_memory):
    """Operator tests fail where a backend reads memory that it did not write."""


@pytest.fixture
def backend(request):
    """A backend's name."""
    if request.param == "blockwise" and not library.available():
        pytest.skip("the CPU kernel is not built on this machine")
    if request.param == "triton":
        pytest.importorskip("triton", reason="the kernels are written in Triton")
        if "device" not in request.fixturenames and not triton.interpreted():
            pytest.skip("with tensors on the CPU, in Triton's interpreter: without a GPU, or with TRITON_INTERPRET=1")
    return request.param


@pytest.fixture
def device(backend):
    """Where a backend's tensors are: on the GPU for "triton", if there is one."""
    return "cuda" if backend == "triton" and torch.cuda.is_available() else "cpu"
