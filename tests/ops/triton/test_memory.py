"""What the kernels read and what a call allocates, counted in the interpreter."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytest.importorskip("triton", reason="the kernels are written in Triton")

from triton.runtime.interpreter import InterpreterBuilder

from diff_transformer.ops import diff_attention, diff_attention_decode, diff_attention_varlen
from diff_transformer.ops.triton import interpreted, operator
from diff_transformer.ops.triton.launching import Launch
from diff_transformer.testing import Inputs, make_inputs

pytestmark = pytest.mark.skipif(not interpreted(), reason="counts what the interpreter does: TRITON_INTERPRET=1")

H, G, T, S, D = 4, 1, 64, 256, 8
KEYS = G * S * D


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
    return diff_attention_varlen(*x, ends_q, ends_k, T // 2, S // 2, is_causal=True, backend="triton")


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

    for name in ("plan_forward", "launch_backward"):
        monkeypatch.setattr(operator, name, watched(getattr(operator, name)))
    with outside:
        torch.autograd.grad(attend(x).sum(), x)
    for counted in (inside, outside):
        assert H * T * D in counted.sizes, "not even the output was counted"
        assert max(counted.sizes) < min(T * S, H // G * KEYS)
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


@pytest.fixture
def reads(monkeypatch):
    """Counts the elements of a tensor that kernels load: call it with the tensor once they ran."""
    addresses = []
    load = InterpreterBuilder.create_masked_load

    def record(builder, pointers, mask, *rest):
        addresses.append(pointers.data[mask.data])
        return load(builder, pointers, mask, *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", record)

    def count(x):
        begin = x.data_ptr()
        end = begin + x.numel() * x.element_size()
        return sum(int(((begin <= found) & (found < end)).sum()) for found in addresses)

    return count


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("width", [D, 64])
def test_keys_that_both_maps_share_are_read_once(reads, width, gradients):
    """Where both maps are computed at once: as often as one of two keys, in the forward and in the backward."""
    x = make_inputs(B=1, H=1, T=70, S=70, D=width, Dv=width, requires_grad=gradients)

    def attend(k2):
        out = diff_attention(*x[:3], k2, x.v, x.lam, is_causal=True, backend="triton")
        if gradients:
            out.sum().backward()

    attend(x.k2)
    apart, values = [reads(x.k1), reads(x.k2)], reads(x.v)
    attend(x.k1)
    assert apart[0] == apart[1] > 0
    assert reads(x.k1) - apart[0] == apart[0]
    assert reads(x.k2) == apart[1]
    assert reads(x.v) == 2 * values
    if not gradients:
        assert values == apart[0], "of one width, values are read as often as keys: once for both maps"


def test_wide_heads_read_keys_and_values_once_a_map(reads):
    """Their forward goes through the keys twice; see forward.py."""
    narrow, wide = (make_inputs(B=1, H=1, T=70, D=D, Dv=D, requires_grad=False) for D in (64, 72))
    for x in (narrow, wide):
        diff_attention(x.q1, x.q2, x.k1, x.k1, x.v, x.lam, is_causal=True, backend="triton")
    for of_narrow, of_wide in ((narrow.k1, wide.k1), (narrow.v, wide.v)):
        assert reads(of_wide) / 72 == 2 * reads(of_narrow) / 64


def test_decoding_reads_shared_keys_once(reads):
    x = make_inputs(B=1, H=2, T=1, S=300, G=1, D=16, requires_grad=False)
    diff_attention_decode(x.q1, x.q2, x.k1, x.k1, x.v, x.lam, backend="triton")
    assert reads(x.k1) == x.k1.numel()
    assert reads(x.v) == x.v.numel()
