import pytest

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
    return request.param
