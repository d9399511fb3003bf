import pytest

from diff_transformer.ops.cpu import native

IN_TORCH = "blockwise in PyTorch"  # the form of the backend that runs where nothing can be compiled


@pytest.fixture(autouse=True)
def _poisoned_memory(poisoned_memory):
    """Operator tests fail where a backend reads memory that it did not write."""


@pytest.fixture
def backend(request, monkeypatch):
    """A backend's name; ``IN_TORCH`` is "blockwise" with its native form taken away."""
    if request.param == IN_TORCH:
        monkeypatch.setattr(native, "library", lambda: None)
        return "blockwise"
    if request.param == "blockwise" and native.library() is None:
        pytest.skip("no C++ compiler with OpenMP: the native form cannot be built here")
    return request.param
