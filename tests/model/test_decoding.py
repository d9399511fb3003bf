"""Decoding in one native call equals the same layer in parts, in fp64 as the judge, and is left where it must be."""

import pytest
import torch

from diff_transformer.model.attention import DiffAttention
from diff_transformer.model.inputs import Visible
from diff_transformer.model.modeling import DiffTransformerForCausalLM
from diff_transformer.model.presets import preset
from diff_transformer.ops.cpu import layer
from diff_transformer.ops.cpu.build import library
from diff_transformer.testing import assert_within_budget

pytestmark = pytest.mark.skipif(library() is None, reason="no C++ compiler here: there is no native form to test")


def make_core(dtype, **settings):
    torch.manual_seed(0)
    core = DiffAttention(64, 8, num_key_value_heads=4, head_dim=24, head_norm_init=0.7, layer_index=2, **settings).core
    for parameter in core.parameters():
        torch.nn.init.normal_(parameter, mean=0.3, std=0.4)
    return core.to(dtype).requires_grad_(False)


def inputs(dtype, T, *, side_by_side=False, seed=0):
    torch.manual_seed(seed)
    q = torch.randn(2, T, 8, 24, dtype=dtype).transpose(1, 2)
    k = torch.randn(2, 31, 4, 24, dtype=dtype).transpose(1, 2)
    v = torch.randn(2, 31, 2, 48, dtype=dtype).transpose(1, 2)
    return (q, torch.cat((k[:, 0::2], k[:, 1::2]), dim=-1), v) if side_by_side else (q, k, v)


def in_parts(core, q, k, v, is_causal):
    out = core.attend(q, k, v, core.lam(), Visible(None, is_causal)).transpose(1, 2)
    gain = 1.0 - core.lam.initial
    return out * gain if core.head_norm is None else core.head_norm(out, gain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("T", [1, 3])
@pytest.mark.parametrize("side_by_side", [False, True])
@pytest.mark.parametrize(
    "settings", [{}, {"head_norm": False, "head_norm_init": 1.0}, {"head_norm": "no_weight", "head_norm_init": 1.0}]
)
def test_one_call_equals_the_parts(dtype, T, side_by_side, settings, monkeypatch):
    settings = {"head_norm_init": 0.7, **settings}
    torch.manual_seed(0)
    core = DiffAttention(64, 8, num_key_value_heads=4, head_dim=24, layer_index=2, **settings).core
    for parameter in core.parameters():
        torch.nn.init.normal_(parameter, mean=0.1, std=0.2)
    core = core.to(dtype).requires_grad_(False)
    q, k, v = inputs(dtype, T, side_by_side=side_by_side)
    called = []
    decode = layer.decode
    monkeypatch.setattr(layer, "decode", lambda *a: called.append(1) or decode(*a))
    fused = core(q, k, v, Visible())
    assert called
    exact = core.double()
    exact = in_parts(exact, q.double(), k.double(), v.double(), True)
    eager = in_parts(core.to(dtype), q, k, v, True)
    assert fused.shape == eager.shape == (2, T, 4, 48)
    assert_within_budget(fused, exact, eager)


def test_new_weights_are_seen_at_once():
    core, (q, k, v) = make_core(torch.float32), inputs(torch.float32, 1)
    for change in (
        lambda: core.lam.lambda_q1.data.mul_(2),
        lambda: setattr(core.lam.lambda_k2, "data", torch.randn(24)),
        lambda: core.head_norm.weight.data.add_(1),
        lambda: setattr(core.lam, "initial", 0.1),
    ):
        before = core(q, k, v, Visible())
        change()
        after = core(q, k, v, Visible())
        assert not torch.allclose(before, after)
        torch.testing.assert_close(after, in_parts(core, q, k, v, True))


def test_it_leaves_alone_what_it_does_not_compute():
    core, (q, k, v) = make_core(torch.float32), inputs(torch.float32, 1)
    head = core.decode_weights()
    assert head is not None
    assert layer.supports(q, k, v, head)
    assert not layer.supports(q.requires_grad_(), k, v, head)
    with torch.no_grad():
        assert layer.supports(q, k, v, head)
    assert not layer.supports(*(x.double() for x in (q, k, v)), head)
    assert not layer.supports(*inputs(torch.float32, 5), head)  # ten rows of a map share a key/value head
    assert not layer.supports(q, k, v[..., ::2], head)
    core.requires_grad_(True)
    assert core.decode_weights() is None
    with torch.no_grad():
        assert core.decode_weights() is not None
        handle = core.head_norm.register_forward_hook(lambda *_: None)
        assert core.decode_weights() is None
        handle.remove()
        core.attend = core.attend  # what an experiment does that looks inside
        assert core.decode_weights() is None
        del core.attend
        core.backend = "reference"
        assert core.decode_weights() is None


@pytest.mark.parametrize("window", [None, 7])
def test_the_window_holds(window):
    core, (q, k, v) = make_core(torch.float32), inputs(torch.float32, 2)
    seen = Visible(None, True, window)
    out = core.attend(q, k, v, core.lam(), seen).transpose(1, 2)
    torch.testing.assert_close(core(q, k, v, seen), core.head_norm(out, 1.0 - core.lam.initial))
    assert torch.equal(core(q, k, v, seen), core(q, k, v, Visible())) == (window is None)


def v2(dtype, T, num_heads=4, num_key_value_heads=2):
    """A core of the second version, its q, k, v, and the hidden states that lambda is computed from."""
    torch.manual_seed(3)
    layer_of = DiffAttention(
        64, num_heads, attention="diff_v2", num_key_value_heads=num_key_value_heads, head_dim=24, is_causal=True
    )
    core = layer_of.core.to(dtype).requires_grad_(False)
    q = torch.randn(2, T, 2 * num_heads, 24, dtype=dtype).transpose(1, 2)
    k, v = (torch.randn(2, 31, num_key_value_heads, 24, dtype=dtype).transpose(1, 2) for _ in range(2))
    return core, (q, k, v), torch.randn(2, T, 64, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("T", "heads"), [(1, (4, 4)), (3, (4, 2)), (1, (8, 2))])
@pytest.mark.parametrize("window", [None, 7])
def test_the_second_version_in_one_call_equals_its_parts(dtype, T, heads, window, monkeypatch):
    core, given, hidden = v2(dtype, T, *heads)
    called, decode = [], layer.decode
    monkeypatch.setattr(layer, "decode", lambda *a: called.append(1) or decode(*a))
    seen = Visible(None, True, window)
    fused = core(*given, seen, hidden_states=hidden)
    assert called
    eager = core.in_parts(*given, core.lam(hidden), seen)
    exact = core.double().in_parts(*(x.double() for x in given), core.lam(hidden.double()), seen)
    assert fused.shape == exact.shape == (2, T, heads[0], 24)
    assert_within_budget(fused, exact, eager)


def test_the_second_version_leaves_alone_what_it_does_not_compute(monkeypatch):
    core, given, hidden = v2(torch.float32, 1)
    called, decode = [], layer.decode
    monkeypatch.setattr(layer, "decode", lambda *a: called.append(1) or decode(*a))

    def taken():
        called.clear()
        out = core(*given, Visible(), hidden_states=hidden)
        lam = core.lam(hidden)
        torch.testing.assert_close(out, core.in_parts(*given, lam, Visible()))
        return bool(called)

    assert taken()
    handle = core.lam.register_forward_hook(lambda module, inputs, lam: lam / 2)
    assert taken()  # lambda is called as a module, so its hooks count
    handle.remove()
    core.attend = lambda *a, **k: type(core).attend(core, *a, **k) * 2  # what an experiment does
    assert not taken()
    del core.attend
    core.normalise = lambda out: out + 1
    assert not taken()
    del core.normalise
    core.requires_grad_(True)
    assert not taken()
    with torch.no_grad():
        assert taken()
    core.backend = "reference"
    with torch.no_grad():
        assert not taken()


def test_cached_steps_equal_the_whole(monkeypatch):
    torch.manual_seed(0)
    model = DiffTransformerForCausalLM(preset("debug")).eval()
    ids = torch.randint(0, 512, (2, 17))
    calls = []
    decode = layer.decode
    monkeypatch.setattr(layer, "decode", lambda *a: calls.append(a[0].shape[2]) or decode(*a))
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        out = model(ids[:, :12], use_cache=True)
        steps = [out.logits]
        for i in range(12, 17):
            out = model(ids[:, i : i + 1], past_key_values=out.past_key_values)
            steps.append(out.logits)
    assert calls == [1] * 5 * 2
    torch.testing.assert_close(torch.cat(steps, 1), whole, atol=1e-5, rtol=1e-4)
