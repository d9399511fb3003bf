"""Which backend is called: "auto" decides once and says so, a named backend works or raises with the reason."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from diff_transformer.errors import UserError
from diff_transformer.ops import available_backends, diff_attention, table, triton
from diff_transformer.ops.backends import BACKENDS, of_auto
from diff_transformer.ops.call import Call
from diff_transformer.testing import make_inputs


@pytest.fixture
def called(monkeypatch):
    """The names of the backends that compute, in order."""
    names = []
    for name in ("reference", "blockwise", "sdpa"):
        backend = BACKENDS[name]

        def attend(call, name=name, compute=backend.attend):
            names.append(name)
            return compute(call)

        monkeypatch.setattr(backend, "attend", attend)
    return names


def test_auto_is_the_same_compiled():
    x = make_inputs(T=5, requires_grad=False)
    graphs = []

    def keep(graph, example_inputs):
        graphs.append(graph)
        return graph

    expected = diff_attention(*x)
    assert torch.equal(torch.compile(diff_attention, backend=keep, fullgraph=True)(*x), expected)
    assert any("diff_transformer.blockwise" in str(node.target) for graph in graphs for node in graph.graph.nodes)


@pytest.mark.parametrize("name", ["reference", "blockwise", "sdpa", "auto"])
def test_a_named_backend_is_the_one_that_computes(called, name):
    diff_attention(*make_inputs(T=5), backend=name)
    assert called == ["blockwise" if name == "auto" else name]


def test_gradient_of_the_mask_needs_the_reference(called):
    bias = torch.randn(5, 5, requires_grad=True)
    diff_attention(*make_inputs(T=5), attn_mask=bias).sum().backward()
    assert called == ["reference"]
    assert bias.grad is not None
    assert bias.grad.any()
    with torch.no_grad():
        diff_attention(*make_inputs(T=5), attn_mask=bias)
    assert called == ["reference", "blockwise"]


@pytest.mark.parametrize("name", ["blockwise", "sdpa"])
def test_named_backends_refuse_a_gradient_of_the_mask(name):
    bias = torch.randn(5, 5, requires_grad=True)
    with pytest.raises(UserError, match=f"attn_mask requires grad, which backend='{name}' does not compute"):
        diff_attention(*make_inputs(T=5, requires_grad=False), attn_mask=bias, backend=name)


def test_a_named_backend_that_cannot_work_here_says_why_and_what_can(monkeypatch):
    monkeypatch.setattr(triton, "interpreted", lambda: False)
    here = "; available here: reference, blockwise, sdpa"
    with pytest.raises(UserError, match=f"'triton' is not available: .*run on CUDA .*backend='blockwise'.*{here}"):
        diff_attention(*make_inputs(T=5), backend="triton")


def test_available_backends():
    assert {"reference", "blockwise", "sdpa"} <= set(available_backends("cpu", torch.bfloat16))
    assert available_backends("cpu", torch.float64) == ["reference", "sdpa"]
    assert "triton" not in available_backends("cpu", torch.float32), "not even where the interpreter would take it"
    assert available_backends("cpu", torch.int32) == []


def test_a_device_that_is_not_here_has_no_backends(monkeypatch):
    assert available_backends("meta", torch.float32) == ["reference", "blockwise", "sdpa"]
    assert available_backends("cuda:99", torch.bfloat16) == []
    on_a_gpu(monkeypatch)
    with FakeTensorMode():
        assert "sdpa" in available_backends("cuda:1", torch.bfloat16)


def on_a_gpu(monkeypatch, capability=(9, 0)):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: capability)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)  # a CUDA build looks for it on the GPU


class Elsewhere:
    """A tensor's width, dtype and device, of a GPU that need not be there."""

    def __init__(self, width: int, dtype: torch.dtype = torch.bfloat16, length: int = 9):
        self.shape, self.dtype, self.device = (1, 1, length, width), dtype, torch.device("cuda", 0)


def chosen(D=64, Dv=128, dtype=torch.bfloat16, T=300, S=300, mask_gradient=False, train=False, **options):
    queries, keys = (Elsewhere(D, dtype, length) for length in (T, S))
    tensors = queries, queries, keys, keys, Elsewhere(Dv, dtype, S), Elsewhere(1)
    gradients = ("q1",) * train + ("attn_mask",) * mask_gradient
    return of_auto(Call(*tensors, is_causal=True, gradients=gradients, **options))


RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def test_auto_takes_the_fastest_on_record(monkeypatch):
    """In forward and in forward + backward; names with brackets are of kernels that are gone, or of rivals' kernels."""
    pytest.importorskip("triton", reason="without it there is nothing to choose")
    record = json.loads((RESULTS / "attention_gpu.json").read_text())
    capability = tuple(map(int, record["provenance"]["machine"]["capability"].split(".")))
    times = {}
    for row in record["rows"]:
        if row["role"] != "baseline" and row["gate"] == "passed" and not row["backend"].startswith("triton["):
            for kind in ("forward_ms", "both_ms"):
                key = row["width"], row["length"], row["causal"], kind
                times.setdefault(key, []).append((row[kind], row["backend"]))
    fastest = {key: min(each)[1] for key, each in times.items() if "triton" in dict(map(reversed, each))}
    assert set(fastest.values()) == {"triton"}
    assert {capability: tuple(sorted({width for width, *_ in fastest}))} == table.MEASURED
    on_a_gpu(monkeypatch, capability)
    for D in table.MEASURED[capability]:
        for train in (False, True):
            assert chosen(D=D, Dv=2 * D, train=train) == chosen(D, 2 * D, torch.float16, train=train) == ("triton", "")
    assert chosen(D=32, Dv=64) == chosen(Dv=64) == chosen(dtype=torch.float32) == ("sdpa", "")
    with FakeTensorMode():
        assert available_backends(torch.device("cuda"), torch.bfloat16)[-1] == "triton"


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)])
def test_where_nothing_is_measured_pytorch_computes_unless_it_lacks_a_kernel(monkeypatch, capability):
    pytest.importorskip("triton", reason="without it there is nothing to choose")
    on_a_gpu(monkeypatch, capability)
    ends = {"cu_seqlens_q": torch.tensor([0, 9]), "cu_seqlens_k": torch.tensor([0, 9])}
    for train in (False, True):
        assert chosen(train=train) == ("sdpa", "")
        assert chosen(train=train, T=40) == ("triton", ""), "SDPA aligns to the upper left corner"
        assert chosen(train=train, window=5) == ("triton", "")
        assert chosen(train=train, attn_mask=torch.ones(1, 1, 1, 1)) == ("triton", "")
        assert chosen(train=train, **ends) == ("triton", ""), "one call for each document otherwise"
    assert chosen(T=1) == ("triton", ""), "the decoding kernel"
    assert chosen(T=1, train=True) == ("sdpa", "")


def test_auto_on_cuda_is_sdpa_elsewhere_and_says_why(monkeypatch):
    pytest.importorskip("triton", reason="without it there is nothing to choose")
    on_a_gpu(monkeypatch)
    assert chosen(mask_gradient=True) == ("reference", "attn_mask requires grad")
    name, because = chosen(D=160, Dv=128)
    assert name == "sdpa"
    assert because.startswith("not 'triton', since q1 has width 160 and v width 128; the Triton kernels take at most")
    name, because = chosen(dtype=torch.float64)
    assert name == "sdpa"
    assert "the Triton kernels take float32, bfloat16 and float16" in because
    on_a_gpu(monkeypatch, (7, 5))
    name, because = chosen()
    assert name == "sdpa"
    assert "the GPU has compute capability 7.5, and the Triton kernels need 8.0 or more" in because


def test_auto_without_triton_is_sdpa(monkeypatch):
    on_a_gpu(monkeypatch)
    monkeypatch.setattr(triton, "find_spec", lambda name: None)
    assert chosen() == (
        "sdpa",
        "not 'triton', since triton is not installed; pip install triton (PyTorch's CUDA builds for Linux bring it)",
    )


def test_importing_the_operator_does_not_import_triton():
    code = "import sys; import diff_transformer.ops; sys.exit('triton' in sys.modules)"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
