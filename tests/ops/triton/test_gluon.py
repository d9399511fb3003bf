"""The Hopper kernels: which calls they take, that every form compiles well, and (on a Hopper GPU) their results.

What they compute is tested without a GPU in test_gluon_emulated.py.
"""

from itertools import product

import pytest
import torch

from diff_transformer import diff_attention
from diff_transformer.ops.triton import gluon
from diff_transformer.testing import assert_within_budget, eager_diff_attention, make_inputs

pytest.importorskip("triton", reason="the kernels are written in Triton's Gluon")
from diff_transformer.ops.triton.gluon import forward, verify
from diff_transformer.ops.triton.gluon.steps import NOT_SPECIALIZED
from diff_transformer.ops.triton.metadata import assert_ships, compile_in_subprocess

HALF_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def tensors(D=64, dtype=torch.bfloat16, **options):
    """q1, q2, k1, k2, v."""
    return make_inputs(2, 4, 20, D, dtype=dtype, requires_grad=False, **options)[:5]


def moved(x, offset):
    """x at an address ``offset`` elements beyond an aligned one."""
    memory = x.new_empty(x.numel() + offset)
    return memory[offset:].view(x.shape).copy_(x)


@pytest.mark.parametrize("options", [{}, {"D": 128}, {"strided": True}, {"G": 2}, {"Hn": 2, "G": 1}, {"S": 33}])
def test_takes(options):
    assert gluon.why_not_shapes(*tensors(**options), None, None, None) is None


def test_takes_one_key_for_both_maps_and_any_stride_of_a_dimension_of_size_1():
    q1, q2, k1, _, v = (x[:1] for x in tensors())
    k1 = k1.as_strided(k1.shape, (3, *k1.stride()[1:]))
    assert gluon.why_not_shapes(q1, q2, k1, None, v, None, None, None) is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda q1, q2, k1, k2, v: (q1.float(), q2.float(), k1.float(), k2.float(), v.float()), "not torch.float32"),
        (lambda q1, q2, k1, k2, v: (q1, q2, k1, k2, v[..., :64]), r"not \(64, 64\)"),
        (lambda q1, q2, k1, k2, v: tensors(D=96), r"not \(96, 192\)"),
        (lambda q1, q2, k1, k2, v: (q1.mT.contiguous().mT, q2, k1, k2, v), "q1 has a last dimension"),
        (lambda q1, q2, k1, k2, v: (q1, moved(q2, 1), k1, k2, v), "q2 starts 2 bytes beyond"),
        (lambda q1, q2, k1, k2, v: (q1, q2, k1[:, :1].expand_as(k1), k2, v), "k1 has a stride in dimension 1"),
        (
            lambda q1, q2, k1, k2, v: (q1, q2, k1, k2, torch.cat([v, v[..., :3]], -1)[..., :128]),
            "v has a stride in dim",
        ),
    ],
)
def test_refuses(change, said):
    reason = gluon.why_not_shapes(*change(*tensors()), None, None, None)
    with pytest.raises(ValueError, match=said):
        raise ValueError(reason)


@pytest.mark.parametrize("asked", [(torch.ones(1), None, None), (None, torch.ones(1), None), (None, None, 5)])
def test_refuses_masks_packed_documents_and_windows(asked):
    assert "no attn_mask, no window and no packed documents" in str(gluon.why_not_shapes(*tensors(), *asked))


def test_launches_nothing_that_it_refuses():
    q1, q2, k1, k2, v = tensors(D=32)
    with pytest.raises(ValueError, match=r"not \(32, 64\)"):
        gluon.attend_forward(q1, q2, k1, k2, v, torch.zeros(2, 4, 20, 1), False, None, 1.0, True)


@pytest.mark.parametrize(
    ("capability", "version", "switch", "said"),
    [
        ((9, 0), "3.6.0", None, None),
        ((9, 0), "3.7.1", None, None),
        ((9, 0), "3.8.0", None, "tested with Triton 3.6 and 3.7, not 3.8.0"),
        ((9, 0), "3.5.1+git1", None, "not 3.5.1"),
        ((8, 0), "3.7.1", None, "needs compute capability 9.x"),
        ((10, 0), "3.7.1", None, "needs compute capability 9.x"),
        ((9, 0), "3.7.1", "0", "DIFF_TRANSFORMER_GLUON is 0"),
    ],
)
def test_device_and_version(monkeypatch, capability, version, switch, said):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr("triton.__version__", version)
    monkeypatch.delenv("DIFF_TRANSFORMER_GLUON", raising=False)
    if switch is not None:
        monkeypatch.setenv("DIFF_TRANSFORMER_GLUON", switch)
    reason = gluon.why_not_here(torch.device("cuda", 0))
    assert reason is None if said is None else said in str(reason)


def test_no_cuda_device_no_kernel():
    assert gluon.why_not(*tensors(), None, None, True, None) == "the Hopper kernel needs a CUDA device, not cpu"


def test_a_descriptor_sees_the_tensor_where_it_lies():
    q1 = tensors(strided=True)[0]  # [2, 4, 20, 64] in memory [2, 20, 4, 64]
    seen = forward.descriptor(q1, 64)
    assert list(seen.shape) == [2, 4, 20, 64]
    assert list(seen.strides) == [20 * 4 * 64, 64, 4 * 64, 1]
    assert list(seen.block_shape) == [1, 1, 64, 64]


FORMS = [  # D, causal, save, k2 is k1, dtype; where both widths treat k2 = k1 alike it is left out
    (D, causal, save, one_key, dtype)
    for D, causal, save, one_key, dtype in product((64, 128), (True, False), (True, False), (False, True), HALF_TYPES)
    if forward.CONFIGURATIONS[D].one_key or not one_key
]
TRAINING = [(64, True, True, False, "bf16"), (128, True, True, False, "bf16")]


@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=() if form in TRAINING else pytest.mark.slow) for form in FORMS]
)
def test_every_form_compiles_without_spills_or_serialised_wgmma(form):
    D, causal, save, one_key, dtype = form
    configuration, Dv = forward.CONFIGURATIONS[D], gluon.WIDTHS[D]

    def described(rows, width):
        return f"tensordesc<{dtype}[1,1,{rows},{width}],{forward.layout(rows, width, HALF_TYPES[dtype])!r}>"

    query, key, value = (
        described(rows, width) for rows, width in ((forward.ROWS, D), (configuration.keys, D), (configuration.keys, Dv))
    )
    signature = {"q1": query, "q2": query, "k1": key, "k2": key, "v": value, "out": f"*{dtype}", "out2": f"*{dtype}"}
    signature |= {"lse1": "*fp32", "lse2": "*fp32", "lam": "*fp32", "scale": "fp32"}
    signature |= dict.fromkeys(NOT_SPECIALIZED, "i32")
    constants = {"ROWS": forward.ROWS, "BN": configuration.keys, "D": D, "DV": Dv, "STAGES": configuration.stages}
    constants |= {"CAUSAL": causal, "SAVE": save} | ({"ONE_KEY": one_key} if configuration.one_key else {})
    kernel = f"{configuration.kernel.__module__}:{configuration.kernel.__name__}"
    compiled = compile_in_subprocess(kernel, signature, constants, capability=90, **forward.OPTIONS)
    assert_ships(compiled)
    assert compiled.num_warps == 12  # two computing warpgroups and one that loads, of whose warps one works
    scores, values = D // 16, configuration.keys // 16  # wgmma of depth 16 in one product
    # First tile, loop without masks, loop with masks, last tile; the maps together take both maps' products in each.
    maps = 2 if configuration.one_key else 1
    assert compiled.wgmma == 2 * maps * 3 * (scores + values)


hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)
LENGTHS = [(1, 1), (1, 1000), (63, 63), (64, 128), (111, 333), (200, 63), (1000, 1000), (2048, 2048)]


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("dtype", HALF_TYPES)
@pytest.mark.parametrize("D", [64, 128])
def test_results_on_the_gpu(D, dtype, lengths, causal):
    verify.compare(torch.device("cuda"), D, HALF_TYPES[dtype], causal, *lengths)


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("D", [64, 128])
def test_16k_tokens(D):
    inputs = make_inputs(1, 1, 16384, D, dtype=torch.bfloat16, device="cuda", strided=True, requires_grad=False)
    out, out2, lse1, lse2 = gluon.attend_forward(*inputs, True, None, D**-0.5, True)
    verify.wait(torch.device("cuda"))
    last = 128  # rows, which see all keys
    tail = inputs._replace(q1=inputs.q1[:, :, -last:], q2=inputs.q2[:, :, -last:], lam=inputs.lam[:, :, -last:])
    expected = verify.expected_results(*tail, is_causal=True, scale=D**-0.5)
    for (name, (exact, eager)), result in zip(expected.items(), (out, out2, lse1, lse2), strict=True):
        assert_within_budget(result[:, :, -last:], exact, eager, what=name)


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("D", [64, 128])
def test_many_launches_agree(D):
    """A race would show as a difference between launches of the same problem, on a full GPU."""
    inputs = make_inputs(4, 16, 1000, D, dtype=torch.bfloat16, device="cuda", strided=True, requires_grad=False)
    first = gluon.attend_forward(*inputs, True, None, D**-0.5, True)
    for _ in range(100):
        for one, other in zip(first, gluon.attend_forward(*inputs, True, None, D**-0.5, True), strict=True):
            assert torch.equal(one, other)


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("G", [1, 4])
def test_gradients_through_the_operator(D, G):
    """The Gluon forward saves what the backward of the Triton backend needs."""
    inputs = make_inputs(2, 4, 333, D, G=G, dtype=torch.bfloat16, device="cuda", strided=True)
    assert gluon.why_not(*inputs[:5], None, None, True, None) is None

    def gradients(attention, given, **options):
        out = attention(*given, is_causal=True, **options)
        dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
        return out, *torch.autograd.grad(out, list(given), dout)

    ours = gradients(diff_attention, inputs, backend="triton")
    exact = gradients(diff_attention, inputs.to(torch.float64), backend="reference")
    eager = gradients(eager_diff_attention, inputs)
    for what, *three in zip(("out", *inputs._fields), ours, exact, eager, strict=True):
        assert_within_budget(*three, what=f"d{what}")
