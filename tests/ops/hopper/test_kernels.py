"""The Hopper kernels: which calls they take, that every form compiles well, and (on a Hopper GPU) their results.

What they compute is tested without a GPU in test_forward_emulated.py and test_backward_emulated.py.
"""

import json
from itertools import product
from pathlib import Path

import pytest
import torch

from diff_transformer import diff_attention
from diff_transformer.testing import assert_within_budget, eager_diff_attention, make_inputs

pytest.importorskip("triton", reason="the kernels are written in Triton's Gluon")
import hopper_check
from kernel_compiler import assert_ships, compile_in_subprocess, describe, executed_over_needed

from diff_transformer.ops.call import OPERANDS, Call
from diff_transformer.ops.hopper import backward, forward, support
from diff_transformer.ops.triton import operator
from diff_transformer.ops.triton.launching import INTERPRETED, launched

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
D = support.D
HALF_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def tensors(D=D, dtype=torch.bfloat16, H=4, **options):
    """q1, q2, k1, k2, v."""
    return make_inputs(2, H, 20, D, dtype=dtype, requires_grad=False, **options)[:5]


def call_of(q1, q2, k1, k2, v, **options):
    lam = torch.zeros(*q1.shape[:3], 1, device=q1.device)
    return Call(q1, q2, k1, k2, v, lam, **{"scale": 1.0, "is_causal": True} | options)


def moved(x, offset):
    """x at an address ``offset`` elements beyond an aligned one."""
    memory = x.new_empty(x.numel() + offset)
    return memory[offset:].view(x.shape).copy_(x)


@pytest.mark.parametrize("options", [{}, {"strided": True}, {"G": 2}, {"Hn": 2, "G": 1}, {"S": 33}])
def test_takes(options):
    assert support.unsupported_tensors(call_of(*tensors(**options))) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda q1, q2, k1, k2, v: (q1.float(), q2.float(), k1.float(), k2.float(), v.float()),
        lambda q1, q2, k1, k2, v: (q1, q2, k1, k2, v[..., :128]),
        lambda q1, q2, k1, k2, v: tensors(D=64),
        lambda q1, q2, k1, k2, v: (q1.mT.contiguous().mT, q2, k1, k2, v),
        lambda q1, q2, k1, k2, v: (q1, moved(q2, 1), k1, k2, v),
        lambda q1, q2, k1, k2, v: (q1, q2, k1[:, :1].expand_as(k1), k2, v),
        lambda q1, q2, k1, k2, v: (q1, q2, k1, k2, torch.cat([v, v[..., :3]], -1)[..., :256]),
    ],
)
def test_refuses(change):
    assert "take bfloat16 and float16 of widths 128" in support.unsupported_tensors(call_of(*change(*tensors())))


@pytest.mark.parametrize(
    "asked",
    [
        {"attn_mask": torch.ones(1)},
        {"cu_seqlens_q": torch.ones(1), "cu_seqlens_k": torch.ones(1)},
        {"window": 5},
        {"first": torch.ones(1)},
    ],
)
def test_refuses_masks_packed_documents_windows_and_weights(asked):
    assert "without attn_mask, window, packed" in support.unsupported_tensors(call_of(*tensors(), **asked))


@pytest.mark.parametrize(
    ("capability", "version", "switch", "said"),
    [
        ((9, 0), "3.6.0", None, None),
        ((9, 0), "3.7.1", None, "no Hopper kernel ran with Triton 3.7.1 yet; DIFF_TRANSFORMER_HOPPER=1 runs it"),
        ((9, 0), "3.7.1", "1", None),
        ((9, 0), "3.5.1+git1", None, "no Hopper kernel ran with Triton 3.5.1"),
        ((8, 0), "3.7.1", None, "need compute capability 9.x"),
        ((10, 0), "3.7.1", None, "need compute capability 9.x"),
    ],
)
def test_device_and_version(monkeypatch, capability, version, switch, said):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr("triton.__version__", version)
    monkeypatch.delenv("DIFF_TRANSFORMER_HOPPER", raising=False)
    if switch is not None:
        monkeypatch.setenv("DIFF_TRANSFORMER_HOPPER", switch)
    reason = support.unsupported_installation(0)
    assert reason is None if said is None else said in str(reason)


def test_the_kernels_that_run_unasked_are_those_that_win_on_record():
    record = json.loads((RESULTS / "attention_gpu.json").read_text())
    version = record["provenance"]["machine"]["triton"].split(".")
    assert tuple(map(int, version[:2])) in support.RECORDED_TRITON
    times = {}
    for row in record["rows"]:
        if row["backend"] in ("triton", "triton[plain]") and row["gate"] == "passed":
            kind = row["width"], row["length"], row["causal"]
            times.setdefault(kind, {})[row["backend"]] = row["forward_ms"], row["backward_ms"]
    found = {kind: both for kind, both in times.items() if len(both) == 2}
    assert {width for width, *_ in found} == {support.D}
    for both in found.values():
        forward_and_backward = zip(both["triton"], both["triton[plain]"], strict=True)
        assert all(ours < plain / 1.1 for ours, plain in forward_and_backward)


@pytest.mark.skipif(not INTERPRETED, reason="the plain kernels run on the CPU in the interpreter")
@pytest.mark.parametrize(
    ("switch", "asked"), [(None, ["forward", "backward"]), ("1", ["forward", "backward"]), ("0", [])]
)
def test_a_backward_keeps_to_what_its_forward_was_told(monkeypatch, switch, asked):
    seen = []

    def records(direction, call):
        seen.append(direction)
        return False

    monkeypatch.setattr(operator, "_by_hopper", records)
    monkeypatch.delenv(support.SWITCH, raising=False)
    x = make_inputs(1, 1, 5, 16)
    if switch is not None:
        monkeypatch.setenv(support.SWITCH, switch)
    out = diff_attention(*x, backend="triton")
    monkeypatch.delenv(support.SWITCH, raising=False)
    out.sum().backward()
    assert seen == asked


def test_a_descriptor_sees_the_tensor_where_it_lies():
    q1 = tensors(strided=True)[0]  # [2, 4, 20, 128] in memory [2, 20, 4, 128]
    seen = forward.descriptor(q1, 64)
    assert list(seen.shape) == [2, 4, 20, 128]
    assert list(seen.strides) == [20 * 4 * 128, 128, 4 * 128, 1]
    assert list(seen.block_shape) == [1, 1, 64, 128]


def compiled(dtype, causal, save=True, grouped=False, one_key=False, gradients=False):
    """(launch, compiled kernel) of all that a call's forward launches on a Hopper GPU, or its gradients."""
    heads = {"H": 6, "Hn": 2, "G": 2} if grouped else {}  # three signal heads share a noise head
    q1, q2, k1, k2, v = tensors(dtype=HALF_TYPES[dtype], **heads)
    call = call_of(q1, q2, k1, None if one_key else k2, v, is_causal=causal)
    (_, *saved), launches = forward.plan_forward(call, save)
    if gradients:
        launches = backward.plan_backward(call, saved[0], saved)[1][1:]  # without the sums of rows, by plain Triton
    described = [describe(launch) for launch in launches]
    return [(launch, compile_in_subprocess(*launch[:3], capability=90, **launch.options)) for launch in described]


def check_compiled(launch, kernel):
    assert_ships(kernel)
    assert kernel.num_warps == 12  # two computing warpgroups and one that loads, of whose warps one works
    assert 1 <= executed_over_needed(launch, kernel) <= 1.1


TRAINING = ("bf16", True, True)


@pytest.mark.parametrize(
    "form",  # dtype, causal, save
    [
        pytest.param(form, marks=() if form == TRAINING else pytest.mark.slow)
        for form in product(HALF_TYPES, (True, False), (True, False))
    ],
    ids=str,
)
def test_every_form_compiles_without_spills_or_serialised_wgmma(form):
    [(launch, kernel)] = compiled(*form)
    check_compiled(launch, kernel)
    scores, values = 128 // 16, forward.KEYS // 16  # wgmma of depth 16 in one product
    # Of each consumer: scores of the first tile and in both loops, without masks and with; values there and after them.
    assert kernel.wgmma == 2 * 3 * (scores + values)


GRADIENT_FORMS = [  # dtype, causal, save, grouped, one key for both maps
    form
    for form in product(HALF_TYPES, (True, False), (True,), (False, True), (False, True))
    if not (form[3] and form[4])
]


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(form, marks=() if form == (*TRAINING, False, False) else pytest.mark.slow)
        for form in GRADIENT_FORMS
    ],
    ids=str,
)
def test_every_gradient_form_compiles_without_spills_or_serialised_wgmma(form):
    found = compiled(*form, gradients=True)
    assert len(found) == 2
    for launch, kernel in found:
        check_compiled(launch, kernel)
        # Products of depth 16. Twice, before or after the loop and in it: scores, dP, dK or dQ. In the loop: dV.
        wgmma = 2 * (2 * D // 16 + 2 * D // 16 + 2 * 64 // 16)
        if launch.kernel.endswith("dkdv"):
            wgmma += 64 // 16
        assert kernel.wgmma == wgmma


hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)


LENGTHS = [(1, 1), (1, 1000), (63, 63), (64, 128), (111, 333), (200, 63), (1000, 1000), (2048, 2048)]


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_results_on_the_gpu(dtype, lengths, causal):
    hopper_check.compare(torch.device("cuda"), HALF_TYPES[dtype], causal, *lengths)


@pytest.mark.gpu
@hopper
def test_16k_tokens():
    inputs = make_inputs(1, 1, 16384, D, dtype=torch.bfloat16, device="cuda", strided=True, requires_grad=False)
    out, *saved = launched(*forward.plan_forward(Call(*inputs, scale=D**-0.5, is_causal=True), True))
    hopper_check.wait(torch.device("cuda"))
    last = 128  # rows, which see all keys
    tail = inputs._replace(q1=inputs.q1[:, :, -last:], q2=inputs.q2[:, :, -last:], lam=inputs.lam[:, :, -last:])
    expected = hopper_check.expected_results(*tail, is_causal=True, scale=D**-0.5)
    for (name, (exact, eager)), result in zip(expected.items(), (out.transpose(1, 2), *saved), strict=True):
        assert_within_budget(result[:, :, -last:], exact, eager, what=name)


@pytest.mark.gpu
@hopper
def test_many_launches_agree():
    """A race would show as a difference between launches of the same problem, on a full GPU."""
    inputs = make_inputs(4, 16, 1000, D, dtype=torch.bfloat16, device="cuda", strided=True, requires_grad=False)
    call = Call(*inputs, scale=D**-0.5, is_causal=True)
    first = launched(*forward.plan_forward(call, True))
    for _ in range(100):
        for one, other in zip(first, launched(*forward.plan_forward(call, True)), strict=True):
            assert torch.equal(one, other)


GRADIENT_LENGTHS = [(1, 1000), (63, 63), (64, 128), (111, 333), (200, 63), (1000, 1000), (2048, 2048)]


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lengths", GRADIENT_LENGTHS)
@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_gradients_on_the_gpu(dtype, lengths, causal):
    hopper_check.compare_gradients(torch.device("cuda"), HALF_TYPES[dtype], causal, *lengths)


def gradients(call, dout, saved):
    """Those that the launcher returns."""
    return backward.summed(call, launched(*backward.plan_backward(call, dout, saved)))


def backward_arguments(B, H, T):
    """Of ``gradients``."""
    inputs = make_inputs(B, H, T, D, dtype=torch.bfloat16, device="cuda", strided=True, requires_grad=False)
    _, *saved = operator.forward(*inputs, None, None, None, None, True, None, D**-0.5, True, True)
    dout = torch.randn(saved[0].shape, generator=torch.Generator().manual_seed(1)).to(saved[0])
    return [Call(*inputs, scale=D**-0.5, is_causal=True), dout, saved]


@pytest.mark.gpu
@hopper
def test_many_backwards_agree():
    """A race would show as a difference between launches of the same problem, on a full GPU."""
    arguments = backward_arguments(4, 16, 1000)
    first = gradients(*arguments)
    for _ in range(100):
        for one, other in zip(first, gradients(*arguments), strict=True):
            assert torch.equal(one, other)


@pytest.mark.gpu
@hopper
def test_gradients_of_16k_tokens():
    call, dout, saved = backward_arguments(1, 2, 16384)
    *plain, _ = operator.backward(dout, *call[:OPERANDS], False, *saved)  # the last is the gradient of ``first``
    for a, b in zip(gradients(call, dout, saved), plain, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-2 * float(b.abs().max()))


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("G", [1, 4])
def test_gradients_through_the_operator(G, caplog):
    inputs = make_inputs(2, 4, 333, D, G=G, dtype=torch.bfloat16, device="cuda", strided=True)
    assert support.unsupported_reason(call_of(*inputs[:5])) is None

    def gradients(attention, given, **options):
        out = attention(*given, is_causal=True, **options)
        dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
        return out, *torch.autograd.grad(out, list(given), dout)

    operator._announce.cache_clear()
    with caplog.at_level("INFO", logger="diff_transformer"):
        ours = gradients(diff_attention, inputs, backend="triton")
    for direction in ("forward", "backward"):
        assert f"{direction} on cuda:0, bfloat16: Hopper kernels" in caplog.text
    exact = gradients(diff_attention, inputs.to(torch.float64), backend="reference")
    eager = gradients(eager_diff_attention, inputs)
    for what, *three in zip(("out", *inputs._fields), ours, exact, eager, strict=True):
        assert_within_budget(*three, what=f"d{what}")
