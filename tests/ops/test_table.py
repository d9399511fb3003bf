"""What "auto" means on a GPU, on CPU tensors: the forms are real, the Triton kernels in the interpreter."""

import json
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from diff_transformer.bench import tune
from diff_transformer.bench.contenders import Gate
from diff_transformer.bench.shapes import Shape
from diff_transformer.ops import (
    backends,
    diff_attention,
    diff_attention_decode,
    diff_attention_varlen,
    measuring,
    softmax_calls,
    table,
    triton,
)
from diff_transformer.ops.backends import BACKENDS
from diff_transformer.ops.call import check, replace
from diff_transformer.ops.softmax_calls import Sdpa, SdpaPlan
from diff_transformer.testing import assert_within_budget, make_inputs

pytest.importorskip("triton", reason="without it there is little to choose")
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
JOINED, BY_MAP = "sdpa (cpu, both maps at once)", "sdpa (cpu, one map at a time)"
TWO, ONE = "triton (two passes)", "triton (one pass)"


@pytest.fixture(autouse=True)
def gpu(monkeypatch, tmp_path):
    """The CPU as if it were a GPU that is no Hopper; gives the names of what was computed, in order."""
    torch.use_deterministic_algorithms(False)
    monkeypatch.setenv("DIFF_TRANSFORMER_CACHE", str(tmp_path))
    monkeypatch.delenv(measuring.SWITCH, raising=False)
    monkeypatch.setattr(backends, "LOOKED_UP", ("cpu",))
    monkeypatch.setattr(measuring, "TURNS", (1, 1))
    computed = []
    recorded(monkeypatch, computed)
    next_process(monkeypatch)
    return computed


def recorded(monkeypatch, names):
    """Keep the name of each backend and variant that computes."""

    def named(backend, right):
        def attend(call, **options):
            names.append(table.name_of(backend, call.variant))
            return right(call, **options)

        return attend

    for backend in ("reference", "sdpa", "triton"):
        monkeypatch.setattr(BACKENDS[backend], "attend", named(backend, BACKENDS[backend].attend))


@pytest.fixture
def without_triton(monkeypatch):
    """Its interpreter is slow."""
    monkeypatch.setattr(triton, "unsupported_reason", lambda *device: "it is slow here")


def next_process(monkeypatch):
    monkeypatch.setattr(table, "_found", {})
    monkeypatch.setattr(measuring, "_measurements", {})


def takes(monkeypatch, **seconds):
    """A clock by which forms take these seconds; the others take one."""
    last = []
    recorded(monkeypatch, last)

    def clock(run):
        run()
        return seconds.get(last[-1], 1.0)

    monkeypatch.setattr(tune, "clock", lambda device: clock)


def inputs(**sizes):
    return make_inputs(**{"B": 1, "H": 1, "T": 5, "D": 16, **sizes})


def tuned(is_causal=False, gradients=True, dtype=torch.float32, T=5):
    """As ``bench attention --tune`` does it, for calls like ``inputs()``."""
    return tune.measured(Gate(Shape(1, 1, T, 16, is_causal), dtype, "cpu"), gradients)


@pytest.mark.usefixtures("without_triton")
def test_nothing_is_timed_in_a_call(monkeypatch, gpu, caplog):
    """Not by force either, which is said once; inside activation checkpointing the forward is computed twice."""
    monkeypatch.setattr(measuring, "in_turns", lambda *given: pytest.fail("a call was timed"))
    diff_attention(*inputs())
    assert gpu == [BY_MAP]
    out = checkpoint(lambda *x: diff_attention(*x).sin(), *inputs(), use_reentrant=False)
    out.sum().backward()
    assert gpu == [BY_MAP] * 3
    table._say_what_replaced_it.cache_clear()
    for _ in range(2):
        next_process(monkeypatch)
        monkeypatch.setenv(measuring.SWITCH, "force")
        diff_attention(*inputs())
    (message,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert message.endswith("run once on this machine: diff-transformer bench attention --tune")


@pytest.mark.parametrize("form", [JOINED, ONE])
def test_the_form_that_tuning_found_fastest_computes_from_then_on(monkeypatch, gpu, form):
    takes(monkeypatch, **{form: 0.1})
    x = inputs()
    diff_attention(*x, is_causal=True)
    assert gpu == [BY_MAP], "the default"
    assert tuned(is_causal=True).fastest == form
    expected = torch.autograd.grad(diff_attention(*x, is_causal=True, backend="reference").sum(), x)
    for _ in range(2):
        gpu.clear()
        out = diff_attention(*x, is_causal=True)
        for actual, exact in zip(torch.autograd.grad(out.sum(), x), expected, strict=True):
            assert_within_budget(actual, exact)
        assert gpu == [form]
        next_process(monkeypatch)  # which finds it on the disk
    monkeypatch.setenv(measuring.SWITCH, "0")
    diff_attention(*x, is_causal=True)
    assert gpu[-1] == BY_MAP, "what was kept is not read"


@pytest.mark.usefixtures("without_triton")
def test_tuning_measures_again(monkeypatch, gpu):
    takes(monkeypatch, **{JOINED: 0.1})
    assert tuned().fastest == JOINED
    takes(monkeypatch, **{BY_MAP: 0.1})
    assert tuned().fastest == BY_MAP
    diff_attention(*inputs())
    assert gpu[-1] == BY_MAP


def offered_for(call):
    ours = backends.unsupported_reason("triton", call) is None
    return [table.name_of(*each) for each in table.candidates(call, ours)]


def test_what_is_offered(monkeypatch):
    def offered(x=None, **options):
        x = x or inputs()
        call = check(*x, **{"is_causal": True, **options})
        return offered_for(call)

    assert offered() == [BY_MAP, JOINED, TWO, ONE], "training is over SDPA where no record says otherwise"
    assert offered(window=3) == [TWO, ONE, BY_MAP, JOINED]
    x = inputs()
    assert offered(x._replace(k2=x.k1)) == [JOINED, BY_MAP, TWO, ONE]
    assert offered(inputs(D=160)) == [BY_MAP, JOINED], "too wide for the Triton kernels"
    assert offered(inputs(H=2), attn_mask=torch.ones(1, 2, 5, 5, dtype=torch.bool)) == [TWO, ONE, BY_MAP]
    with triton.backward_form("one_pass"):
        assert offered()[2:] == [ONE]
    with triton.backward_form("two_pass"):
        assert offered()[2:] == [TWO]
    torch.use_deterministic_algorithms(True)
    assert offered() == [TWO]
    monkeypatch.setattr(softmax_calls, "kernels_of", lambda *device: ("cudnn", "flash", "efficient"))
    assert offered(inputs(D=160)) == [
        "sdpa (efficient, one map at a time)",
        "sdpa (efficient, both maps at once)",
    ], "flash and cuDNN add in any order"
    monkeypatch.setattr(softmax_calls, "kernels_of", lambda *device: ("cpu",))
    with torch.no_grad():
        assert offered() == [TWO, BY_MAP, JOINED]
    torch.use_deterministic_algorithms(False)
    monkeypatch.setattr(table, "capability", lambda *device: (9, 0))
    assert offered(inputs(D=64, dtype=torch.bfloat16))[0] == TWO, "a record says so"
    assert offered(inputs(D=32, dtype=torch.bfloat16))[0] == BY_MAP
    assert offered(inputs(D=64, Dv=64, dtype=torch.bfloat16))[0] == BY_MAP
    assert offered(inputs(D=64))[0] == BY_MAP, "fp32 is not on record"
    monkeypatch.setattr(triton, "_gluon_device", lambda *device: True)
    x = inputs(D=128, dtype=torch.bfloat16, requires_grad=False)
    assert offered(x) == [TWO, "triton (two passes, without Gluon)", BY_MAP, JOINED]
    assert offered(x, window=3)[:2] == [TWO, BY_MAP], "which the Hopper kernels do not take"
    assert offered(inputs(D=64, dtype=torch.bfloat16, requires_grad=False))[:2] == [TWO, BY_MAP]


def test_what_auto_takes_on_a_measured_gpu_is_the_fastest_on_record():
    """Of forms that are there: those that were measured and removed have "gluon" in their names."""
    record = json.loads((RESULTS / "attention_gpu.json").read_text())
    assert tuple(map(int, record["provenance"]["machine"]["capability"].split("."))) in table.MEASURED
    fastest = {}
    for row in record["rows"]:
        there = row["role"] != "baseline" and row["gate"] == "passed" and "gluon" not in row["backend"]
        if there and "both_ms" in row:
            fastest.setdefault((row["width"], row["length"], row["causal"]), []).append(
                (row["both_ms"], row["backend"])
            )
    measured = {key: min(times)[1] for key, times in fastest.items() if "triton" in dict(map(reversed, times))}
    assert {width for width, *_ in measured} == set(table.MEASURED[9, 0])
    assert set(measured.values()) == {"triton"}


def test_a_wrong_kernel_is_left_out_with_a_warning(monkeypatch, gpu, caplog):
    takes(monkeypatch, **{TWO: 0.1, ONE: 0.2})
    right = triton.attend
    monkeypatch.setattr(triton, "attend", lambda call: right(call) * (1 if call.variant.one_pass else 1.001))
    tuned()
    diff_attention(*inputs())
    assert gpu[-1] == ONE
    assert [record.message.split(":")[0] for record in caplog.records if record.levelname == "WARNING"] == [
        f"{TWO} is wrong on cpu and is not used"
    ]


@pytest.mark.usefixtures("without_triton")
def test_a_wrong_public_form_is_left_out_too(monkeypatch, gpu, caplog):
    """A package may count keys in another way."""
    takes(monkeypatch, **{JOINED: 0.1})
    right = Sdpa.attend

    def shorter(call):
        return right(replace(call, window=3) if call.variant.joined else call)

    monkeypatch.setattr(Sdpa, "attend", shorter)
    tuned(is_causal=True, dtype=torch.bfloat16)
    diff_attention(*inputs(dtype=torch.bfloat16), is_causal=True)
    assert gpu[-1] == BY_MAP
    (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith(f"{JOINED} is wrong on cpu and is not used: out (torch.bfloat16) is off by ")


def test_a_step_over_a_cache_takes_the_decoding_kernel(monkeypatch, gpu):
    """One query needs no mask, so every candidate competes; what is timed is the call as it is."""
    from diff_transformer.ops.triton import decode

    decoded = []
    right = decode.attend_decode
    monkeypatch.setattr(decode, "attend_decode", lambda *a: decoded.append(a[2].shape[2]) or right(*a))
    x = inputs(H=2, T=1, S=300, requires_grad=False)
    call = check(*x, is_causal=True)
    assert offered_for(call) == [TWO, BY_MAP, JOINED]
    assert_within_budget(diff_attention_decode(*x), diff_attention(*x, is_causal=True, backend="reference"))
    assert gpu == [TWO, "reference"]
    assert decoded == [300]


@pytest.mark.usefixtures("without_triton")
def test_a_form_without_memory_is_left_out_and_nothing_is_kept(monkeypatch, gpu, tmp_path):
    takes(monkeypatch, **{JOINED: 0.1})
    right = Sdpa.attend

    def full(call):
        if call.variant.joined:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return right(call)

    with monkeypatch.context() as patched:
        patched.setattr(Sdpa, "attend", full)
        assert tuned().left_out == {JOINED: "out of memory"}
    assert not list(tmp_path.glob("fastest/*.json"))
    assert tuned().fastest == JOINED


@pytest.mark.usefixtures("without_triton")
def test_calls_of_one_kind_share_a_verdict_and_others_do_not(gpu, monkeypatch):
    measured = []

    def kept(device, index, kind, names):
        measured.append(kind)
        return names[0]

    monkeypatch.setattr(table, "_kept", kept)
    x = inputs(T=9, B=3)
    kinds = [
        (x, {}), (inputs(T=11, B=2), {}), (inputs(T=70), {}), (inputs(B=9), {}), (inputs(D=32), {}),
        (inputs(dtype=torch.bfloat16), {}), (inputs(requires_grad=False), {}), (x, {"is_causal": True}),
    ]  # fmt: skip
    for y, options in kinds:
        diff_attention(*y, **options)
    assert len(set(measured)) == len(measured) == len(kinds) - 1
    never_tuned = [
        (inputs(S=70), {}), (inputs(Dv=16), {}), (inputs(H=4, Hn=2), {}), (inputs(H=2, G=1), {}),
        (x._replace(k2=x.k1), {}), (x, {"is_causal": True, "window": 3}), (x, {"attn_mask": torch.ones(9, 9)}),
    ]  # fmt: skip
    for y, options in never_tuned:
        diff_attention(*y, **options)
    assert len(measured) == len(kinds) - 1


@pytest.mark.usefixtures("without_triton")
def test_under_compile_the_kept_verdict_holds_and_nothing_is_measured(monkeypatch, gpu):
    x = inputs()
    torch.compile(lambda *x: diff_attention(*x, is_causal=True), backend="eager", fullgraph=True)(*x)
    assert gpu[-1] == BY_MAP
    assert len(gpu) == 1
    assert not table._found
    takes(monkeypatch, **{JOINED: 0.1})
    tuned(is_causal=True)
    for _ in range(2):
        torch._dynamo.reset()
        gpu.clear()
        torch.compile(lambda *x: diff_attention(*x, is_causal=True), backend="eager", fullgraph=True)(*x)
        assert gpu == [JOINED]
        next_process(monkeypatch)


@pytest.mark.usefixtures("without_triton")
@pytest.mark.parametrize(
    "sizes",
    [
        ({"T": 5}, {"T": 7}, {"T": 70}),
        ({"T": 5, "S": 9}, {"T": 7, "S": 30}),
        ({"H": 2}, {"H": 4}),
        ({"D": 8}, {"D": 16}),
    ],
    ids=["length", "both lengths", "heads", "width"],
)
def test_sizes_that_vary_compile_to_one_graph(gpu, sizes):
    """The second call makes the size symbolic; its choice must be a constant still."""
    compiled = torch.compile(lambda *x: diff_attention(*x, is_causal=True), backend="eager", fullgraph=True)
    for size in sizes:
        x = inputs(**size)
        assert_within_budget(compiled(*x), diff_attention(*x, is_causal=True, backend="reference"), None, what="out")
    assert gpu.count(BY_MAP) == len(sizes)


def test_the_switch_of_the_hopper_kernels_belongs_to_the_verdict(monkeypatch, gpu):
    monkeypatch.setenv("DIFF_TRANSFORMER_GLUON", "yes")
    with pytest.raises(ValueError, match="DIFF_TRANSFORMER_GLUON is 'yes'; give 0, 1, or some of"):
        diff_attention(*inputs())
    assert gpu == []
    kind = table.kind_of(check(*inputs()))
    keys = []
    for given in ("1", "0", "forward", "forward,one_pass"):
        monkeypatch.setenv("DIFF_TRANSFORMER_GLUON", given)
        keys.append(table.key_of("cpu", None, kind)["gluon"])
    assert keys == ["forward,two_pass", "", "forward", "forward"]


@pytest.mark.usefixtures("without_triton")
def test_tuning_changes_nothing_else(gpu):
    x = inputs()
    state = torch.get_rng_state()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        tuned()
        assert diff_attention(*x).dtype == torch.bfloat16
    assert torch.equal(torch.get_rng_state(), state)
    assert all(t.grad is None for t in x)
    with torch.inference_mode():
        tuned()


def test_packed_documents_take_the_public_form_in_training_where_nothing_is_on_record(monkeypatch, gpu, varlen):
    by_map = "sdpa (flash, one map at a time)"
    monkeypatch.setattr(softmax_calls, "kernels_of", lambda *device: ("flash", "efficient"))
    rows = [t[0].transpose(0, 1) for t in inputs(T=3, D=64, dtype=torch.bfloat16)]
    ends = torch.tensor([0, 2, 3], dtype=torch.int32)
    varlen()

    def attend(*rows):
        return diff_attention_varlen(*rows, ends, ends, 2, 2, is_causal=True)

    out = attend(*rows)
    assert gpu == [by_map]
    exact = diff_attention_varlen(*rows, ends, ends, 2, 2, is_causal=True, backend="reference")
    torch.testing.assert_close(out, exact, rtol=0.02, atol=0.01)  # maps are rounded to bf16 before they are subtracted
    monkeypatch.setattr(table, "capability", lambda *device: (9, 0))
    next_process(monkeypatch)
    attend(*rows)
    assert gpu[-1] == TWO
    gpu.clear()
    compiled = torch.compile(attend, backend="eager", fullgraph=True)
    compiled(*rows)
    assert set(gpu) == {TWO}


def test_a_bad_switch_is_named(monkeypatch):
    monkeypatch.setenv(measuring.SWITCH, "no")
    with pytest.raises(ValueError, match="DIFF_TRANSFORMER_TUNE is 'no'"):
        diff_attention(*inputs())


def test_variants_have_names_that_a_file_can_hold():
    assert table.name_of("sdpa", SdpaPlan("flash", True, 1, 128)) == "sdpa (flash, both maps at once)"
