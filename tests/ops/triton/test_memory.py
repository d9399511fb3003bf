"""The memory that a call allocates, and where its kernels read."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytest.importorskip("triton", reason="the kernels are written in Triton")


from diff_transformer.ops import diff_attention, diff_attention_varlen
from diff_transformer.ops.triton import interpreted, operator
from diff_transformer.ops.triton.launching import Launch
from diff_transformer.testing import Inputs, make_inputs

pytestmark = pytest.mark.skipif(not interpreted(), reason="counts what the interpreter does: TRITON_INTERPRET=1")

H, G, T, S, D = 4, 1, 64, 256, 8


class Allocations(TorchDispatchMode):
    """Counts the elements of what PyTorch's operators allocate; what shares the memory of ``given`` is not counted."""

    def __init__(self, given):
        super().__init__()
        self.given = memory(given)
        self.sizes: list[int] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        for x in tree_leaves(results):
            if isinstance(x, torch.Tensor) and not memory([x]) <= self.given:
                self.sizes.append(x.untyped_storage().nbytes() // x.element_size())
        return results


def memory(tensors):
    return {x.untyped_storage().data_ptr() for x in tensors}


def by_diff_attention(x):
    return diff_attention(*x, is_causal=True, backend="triton")


def by_varlen(x):
    """Two documents."""
    ends_q, ends_k = (torch.tensor([0, n // 2, n], dtype=torch.int32) for n in (T, S))
    return diff_attention_varlen(*x, ends_q, ends_k, is_causal=True, backend="triton")


def inputs(attend, **sizes):
    """Inputs in the layout of a layer's projections; packed documents form one batch entry."""
    x = make_inputs(**({"B": 1, "H": H, "Hn": 2, "G": G, "T": T, "S": S, "D": D, "Dv": D, "strided": True} | sizes))
    return Inputs(*(y.detach()[0].transpose(0, 1).requires_grad_() for y in x)) if attend is by_varlen else x


@pytest.fixture
def launched(monkeypatch):
    """Every launch; nothing is computed."""
    found = []

    def start(launch):
        found.append(launch)

    monkeypatch.setattr(Launch, "start", start)
    return found


@pytest.mark.parametrize("attend", [by_diff_attention, by_varlen])
def test_neither_maps_nor_repeated_heads_are_allocated(monkeypatch, launched, attend):
    x = inputs(attend)
    inside, outside = Allocations(x), Allocations(x)  # a mode does not look into an operator that it sees

    def watched(launcher):
        def launches(*arguments):
            with inside:
                return launcher(*arguments)

        return launches

    for name in ("plan_forward", "plan_backward"):
        monkeypatch.setattr(operator, name, watched(getattr(operator, name)))
    with outside:
        torch.autograd.grad(attend(x).sum(), x)
    for counted in (inside, outside):
        assert H * T * D in counted.sizes, "not even the output was counted"
        assert max(counted.sizes) < min(T * S, H * S * D)
    assert len(launched) == 4


@pytest.mark.parametrize("attend", [by_diff_attention, by_varlen])
def test_kernels_read_the_inputs_where_they_lie(launched, attend):
    """Also queries whose heads alternate between both maps, as those of the second version do."""
    x = inputs(attend, Hn=H)
    q = torch.stack([x.q1, x.q2], dim=2).flatten(1, 2).detach()
    x = x._replace(q1=q[:, 0::2].requires_grad_(), q2=q[:, 1::2].requires_grad_())
    torch.autograd.grad(attend(x).sum(), x)
    reading = [launch.arguments["inputs"] for launch in launched if launch.kernel.__name__ != "delta_kernel"]
    assert len(reading) == 3
    for inputs_of_kernel in reading:
        assert [y.data_ptr() for y in inputs_of_kernel[:5]] == [y.data_ptr() for y in x[:5]]
        assert [y.shape[1] for y in inputs_of_kernel[:5]] == [H, H, G, G, G]
