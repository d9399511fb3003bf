"""The core and its table of variants: formulas in fp64 head by head, gradients, caches, packing."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from transformers import DynamicCache

from diff_transformer import DiffAttention, DiffTransformerConfig, DiffTransformerForCausalLM, lambda_init
from diff_transformer.errors import UserError
from diff_transformer.model.attention import Attention, core_of
from diff_transformer.model.cost import attention_core_flops, count_parameters
from diff_transformer.model.heads import CORES, Variant, count_heads
from diff_transformer.model.inputs import Packing, Visible
from diff_transformer.model.presets import preset
from diff_transformer.testing import assert_within_budget

HIDDEN, HEADS, D = 96, 8, 12


# Formulas.

FORMULAS = {
    "v3": CORES["diff_v3"],
    "v3, norm": replace(CORES["diff_v3"], head_norm="weighted", head_norm_init=0.3),
    "v3, groups": replace(CORES["diff_v3"], signal_heads=2, initial_ratio=0.5),
    "gated": CORES["gated"],
    "gated, norm after": Variant(maps=1, gate="normed", head_norm="plain", head_scale=[1.0, 1.0, 2.0]),
    "softmax, norm": replace(CORES["softmax"], head_norm="weighted", head_norm_init=0.3),
    "v2, norm": replace(CORES["diff_v2"], head_norm="weighted", head_norm_init=0.3),
    "v2, second map added": replace(CORES["diff_v2"], subtract=False, head_scale=1.9),
    "v1, second map added": replace(CORES["diff"], subtract=False),
    "v2, gate": Variant(shared_keys=True, lam="token", gate="result"),
    "v2, gate after the norm": Variant(shared_keys=True, lam="token", gate="normed", head_norm="weighted"),
    "v1, gate first": Variant(lam="learned", gate="first", head_norm="plain", factor=True),
    "v1, gate": Variant(lam="fixed", lambda_init=0.3, gate="result"),
    "v1, fixed lambda": replace(CORES["diff"], lam="fixed"),
    "v1, no norm": replace(CORES["diff"], head_norm=None),
    "v1, norm without a weight": replace(CORES["diff"], head_norm="plain"),
}
EVERY = {**CORES, **FORMULAS}


def layer_of(variant, kv=4, backend="auto", causal=True, value_dim=None):
    torch.manual_seed(3)
    heads = count_heads(variant, HEADS, kv, D, value_dim)
    core = core_of(variant, HIDDEN, heads, 2, backend=backend)
    core.is_causal = causal
    return Attention(HIDDEN, heads, core, is_causal=causal)


def written_out(layer, x):
    """o [B, T, hidden] in the dtype of the layer, one head after another, from the maps as tensors."""
    core, variant, heads, T = layer.core, layer.core.variant, layer.heads, x.shape[1]
    q, k, v = (
        F.linear(x, w.weight).unflatten(-1, (-1, width)).transpose(1, 2)
        for w, width in ((layer.q_proj, D), (layer.k_proj, D), (layer.v_proj, heads.value_dim))
    )
    hide = torch.full((T, T), float("-inf"), dtype=x.dtype).triu(1) if layer.is_causal else 0.0
    gain = core.scale * (1 - lambda_init(2) if variant.factor else 1)
    r, sigmoids = variant.signal_heads, variant.sigmoids
    token = None if variant.lam in ("learned", "fixed") or not sigmoids else core.lam.proj.weight
    outs = []
    for j in range(heads.outputs):
        value = v[:, j * heads.values // heads.outputs]
        gate = lam = 1.0
        if token is not None:
            logits = F.linear(x, token[sigmoids * j : sigmoids * (j + 1)])
            gate = logits[..., :1].sigmoid() if variant.gate else 1.0
            lam = (logits[..., -1:] + core.lam.offset).sigmoid()
        elif variant.maps == 2:
            lam = core.lam()
            gate = F.linear(x, core.gates.proj.weight[j : j + 1]).sigmoid() if variant.gate else 1.0

        def one_map(query, key):
            return (query @ key.mT / D**0.5 + hide).softmax(-1)

        if variant.maps == 1:
            out = one_map(q[:, j], k[:, j * heads.keys // heads.outputs]) @ value
        else:
            group, place = divmod(j, r)
            key = group * heads.values // (heads.outputs // r)
            k1, k2 = (k[:, key], k[:, key]) if variant.shared_keys else (k[:, 2 * key], k[:, 2 * key + 1])
            first = one_map(q[:, group * (r + 1) + place], k1)
            second = one_map(q[:, group * (r + 1) + r], k2)
            of_first = gate if variant.gate == "first" else 1.0
            out = (of_first * first - (lam if variant.subtract else -lam) * second) @ value
            if variant.means:  # of the rows of the first map so far, or of all
                rows = [first[:, : t + 1 if layer.is_causal else T].mean(1) for t in range(T)]
                out = out + lam * torch.stack(rows, 1) @ value
        out = out * (gate if variant.gate == "result" else 1.0)
        if variant.head_norm:
            weight = 1.0 if core.head_norm.weight is None else core.head_norm.weight
            out = out * (out.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight
        outs.append(out * gain * (gate if variant.gate == "normed" else 1.0))
    return F.linear(torch.cat(outs, -1), layer.o_proj.weight)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize(("kv", "value_dim"), [(8, None), (4, None), (2, None), (4, 7), (4, D)])
@pytest.mark.parametrize("causal", [True, False])
def test_the_layer_is_its_formula(name, causal, kv, value_dim):
    """Outputs and the gradients of the input and of every parameter, in fp64."""
    variant = EVERY[name]
    kv = max(2, kv // 2) if variant.signal_heads > 1 else kv
    layer = layer_of(variant, kv, causal=causal, value_dim=value_dim).double()
    x = torch.randn(2, 23, HIDDEN, dtype=torch.float64, requires_grad=True)
    out, expected = layer(x)[0], written_out(layer, x)
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-10)
    leaves, upstream = [x, *layer.parameters()], torch.randn_like(out)
    found, wanted = (torch.autograd.grad(y, leaves, upstream) for y in (out, expected))
    assert all(gradient.abs().max() > 0 for gradient in wanted)
    torch.testing.assert_close(found, wanted, atol=1e-11, rtol=1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", EVERY)
def test_numerics_budget(name, dtype):
    """fp32 to 1e-5 (a norm amplifies the rounding of small heads); half precision within twice the eager error."""
    kv = 2 if EVERY[name].signal_heads == 3 else 4
    layer, (x, upstream) = layer_of(EVERY[name], kv).to(dtype), torch.randn(2, 2, 23, HIDDEN).to(dtype)
    exact, eager = layer_of(EVERY[name], kv).double(), layer_of(EVERY[name], kv, "reference").to(dtype)
    exact.load_state_dict({key: value.double() for key, value in layer.state_dict().items()})
    eager.load_state_dict(layer.state_dict())
    results = []
    for each in (layer, exact, eager):
        given = x.to(each.q_proj.weight.dtype).requires_grad_()
        out = each(given)[0]
        results.append((out, torch.autograd.grad(out, given, upstream.to(out.dtype))[0]))
    assert results[0][0].dtype == dtype
    for what, mine, true, usual in zip(("out", "dx"), *results, strict=True):
        assert_within_budget(mine, true, None if dtype == torch.float32 and what == "out" else usual, what=what)


@pytest.mark.parametrize("name", [name for name in EVERY if name != "dint"])
def test_cached_steps_packed_documents_and_maps_agree_with_one_pass(name):
    layer, x = layer_of(EVERY[name], 2 if EVERY[name].signal_heads == 3 else 4), torch.randn(2, 23, HIDDEN)
    whole = layer(x)[0]
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            cache = DynamicCache()
            parts = [x[:, :20], *x[:, 20:].split(1, 1)]
            steps = torch.cat([layer(part, cache=cache)[0] for part in parts], 1)
        torch.testing.assert_close(steps, whole, atol=1e-5, rtol=1e-4)
    documents = Packing(torch.tensor([0, 11, 23, 46], dtype=torch.int32), 23)
    packed = layer(x, visible=Visible(None, layer.is_causal, layer.core.window, documents))[0]
    torch.testing.assert_close(packed[:1, :11], layer(x[:1, :11])[0], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(packed[1:], whole[1:], atol=1e-5, rtol=1e-4)
    keep = torch.ones(2, 23, dtype=torch.bool)
    keep[0, :9] = False
    padded = layer(x, attention_mask=keep[:, None, None])[0][:1, 9:]
    torch.testing.assert_close(padded, layer(x[:1, 9:])[0], atol=1e-5, rtol=1e-4)
    eager = layer_of(EVERY[name], 2 if EVERY[name].signal_heads == 3 else 4, "reference")
    torch.testing.assert_close(eager(x, output_attentions=True)[0], whole, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_layers_compile_without_graph_breaks(name):
    torch._dynamo.reset()
    layer, x = layer_of(EVERY[name], 2 if EVERY[name].signal_heads == 3 else 4), torch.randn(2, 23, HIDDEN)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x)[0], layer(x)[0], atol=1e-6, rtol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x[:, :1])[0], layer(x[:, :1])[0], atol=1e-6, rtol=1e-5)


# The limits of V3.


def gates(layer, first=None, second=None):
    """Set the logits of V3's gates for inputs whose first channel is 1."""
    rows = layer.core.lam.proj.weight.data.unflatten(0, (HEADS, -1))  # [head, gate | lambda, hidden]
    for column, value in enumerate((first, second)):
        if value is not None:
            rows[:, column] = 0
            rows[:, column, 0] = value


@torch.no_grad()
def test_v3_becomes_v2_and_gated_attention():
    x = torch.randn(2, 23, HIDDEN)
    x[..., 0] = 1.0
    v3, v2, gated = (layer_of(CORES[name]) for name in ("diff_v3", "diff_v2", "gated"))
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        getattr(v2, name).weight.copy_(getattr(v3, name).weight)
        source = getattr(v3, name).weight
        getattr(gated, name).weight.copy_(
            source.unflatten(0, (HEADS, 2, D))[:, 0].flatten(0, 1) if name == "q_proj" else source
        )
    columns = v3.core.lam.proj.weight.unflatten(0, (HEADS, 2)).clone()
    v2.core.lam.proj.weight.copy_(columns[:, 1])
    gated.core.lam.proj.weight.copy_(columns[:, 0])
    gates(v3, first=20.0)
    torch.testing.assert_close(v3(x)[0], v2(x)[0], atol=1e-6, rtol=0)
    v3.core.lam.proj.weight.copy_(columns.flatten(0, 1))
    gates(v3, second=-20.0)
    torch.testing.assert_close(v3(x)[0], gated(x)[0], atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("logit", [-3.0, -10.0, -20.0, -80.0, -200.0])
def test_closed_gates_of_v3_leave_the_noise_map(logit, dtype):
    """Outputs and the gates' gradients keep their digits, however far the first map is closed."""
    layer, x = layer_of(CORES["diff_v3"]), torch.randn(2, 23, HIDDEN)
    x[..., 0] = 1.0
    gates(layer, first=logit)
    layer, x = layer.to(dtype), x.to(dtype)
    exact, eager = layer_of(CORES["diff_v3"]).double(), layer_of(CORES["diff_v3"], backend="reference").to(dtype)
    exact.load_state_dict({key: value.double() for key, value in layer.state_dict().items()})
    eager.load_state_dict(layer.state_dict())
    outs = layer(x)[0], written_out(exact, x.double()), eager(x)[0]
    assert_within_budget(outs[0], outs[1], None if dtype == torch.float32 else outs[2])
    found, wanted, plain = (
        torch.autograd.grad(out.square().sum(), one.core.lam.proj.weight)[0].unflatten(0, (HEADS, 2))[:, 0]
        for out, one in zip(outs, (layer, exact, eager), strict=True)
    )
    scale = wanted.abs().max().clamp_min(1e-30)
    if scale > torch.finfo(dtype).tiny:
        error, eager_error = ((x.double() - wanted).abs().max() / scale for x in (found, plain))
        assert error <= max(2 * eager_error, 1e-4)
    assert found.isfinite().all()


@torch.no_grad()
def test_rows_of_v3_sum_to_the_difference_of_its_weights():
    x = torch.randn(1, 9, HIDDEN)
    for ratio, expected in ((None, 0.0), (0.5, 0.25)):
        layer = layer_of(replace(CORES["diff_v3"], initial_ratio=ratio))
        layer.core.lam.proj.weight.zero_()
        sums = layer.attention_maps(x).difference.sum(-1)
        torch.testing.assert_close(sums, torch.full_like(sums, expected), atol=1e-6, rtol=0)


# Lambda and maps of a layer.


@torch.no_grad()
@pytest.mark.parametrize("attention", [name for name in CORES if name != "softmax"])
def test_lambdas_and_maps_of_a_layer(attention):
    torch.manual_seed(0)
    layer, x = DiffAttention(32, 8, attention=attention, is_causal=True), torch.randn(2, 6, 32)
    lam, (first, second, difference) = layer.lambdas(x), layer.attention_maps(x)
    assert first.shape == (2, layer.heads.outputs, 6, 6)
    torch.testing.assert_close(first.sum(-1), torch.ones(first.shape[:3]))
    if attention == "gated":
        assert lam is None
        assert not second.any()
    elif attention != "dint":
        weight = layer.core.weights(x)[1]
        torch.testing.assert_close(difference, (1.0 if weight is None else weight) * first - lam * second)
        assert lam.dtype == torch.float32
        assert lam.shape == ((2, 8, 6, 1) if "v" in attention else ())
    torch.testing.assert_close(layer(x, output_attentions=True)[1], difference)


@pytest.mark.parametrize("attention", ["diff", "diff_v2", "diff_v3"])
def test_gradients_of_each_example_by_torch_func(attention):
    layer, x = DiffAttention(32, 4, attention=attention, is_causal=True), torch.randn(3, 6, 32)

    def loss(weights, row):
        return torch.func.functional_call(layer, weights, row[None])[0].square().sum()

    weights = dict(layer.named_parameters())
    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, x)
    loss(weights, x[1]).backward()
    for name, weight in weights.items():
        torch.testing.assert_close(each[name][1], weight.grad, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_lambdas_without_the_input():
    """A scalar lambda needs no input, one map has no lambda, and a lambda of each token says that it needs one."""
    gated = DiffAttention(32, 8, attention=replace(CORES["diff"], gate="normed"))
    torch.testing.assert_close(gated.lambdas(), gated.core.lam())
    assert DiffAttention(32, 8, attention="gated").lambdas() is None
    for attention in ("diff_v2", "diff_v3"):
        with pytest.raises(UserError, match=r"without hidden_states.*give the layer's input \[batch, length"):
            DiffAttention(32, 8, attention=attention).lambdas()


@torch.no_grad()
def test_maps_of_a_model_s_layer_need_its_positions():
    model, positions = DiffTransformerForCausalLM(preset("debug", initializer_range=0.2)).eval(), torch.arange(9)[None]
    out = model.model(torch.arange(9)[None], output_attentions=True, output_hidden_states=True, use_cache=False)
    layer = model.model.layers[1]
    x = layer.input_layernorm(out.hidden_states[1])
    tables = model.model.rotary_emb(x, position_ids=positions)
    maps = layer.self_attn.attention_maps(x, position_embeddings=tables)
    torch.testing.assert_close(maps.difference, out.attentions[1])
    with pytest.raises(UserError, match="a layer of a model was called without position_embeddings"):
        layer.self_attn.attention_maps(x, position_ids=positions)


# Sizes, cost, refusals.


def test_heads_of_shared_keys_with_a_shared_noise_head():
    row = replace(CORES["diff_v2"], signal_heads=3)
    assert DiffAttention(36, 9, attention=row)(torch.randn(1, 4, 36))[0].shape == (1, 4, 36)
    with pytest.raises(ValueError, match="that divides num_attention_heads / 3, a whole number"):
        DiffAttention(32, 8, attention=row)


@pytest.mark.parametrize("name", EVERY)
def test_a_row_of_the_table_is_an_argument_of_the_layer(name):
    layer = DiffAttention(HIDDEN, HEADS, attention=EVERY[name], num_key_value_heads=4)
    assert layer.core.variant is EVERY[name]
    assert layer(torch.randn(1, 5, HIDDEN))[0].shape == (1, 5, HIDDEN)


def test_what_v3_and_a_gate_cost_at_3b():
    """Beside softmax attention: parameters and FLOPs of a layer at 2K keys, as the table of the third version says."""
    sizes = {"hidden_size": 3072, "num_attention_heads": 24, "num_hidden_layers": 1, "vocab_size": 8}

    def layer(attention):
        config = DiffTransformerConfig(attention=attention, **sizes)
        parts = count_parameters(config)
        parameters = parts["attention"] + parts["lambda"] + parts["head norm"]
        matrices = parts["attention"] + (parts["lambda"] if config.variant.sigmoids else 0)
        return parameters, 2 * matrices + attention_core_flops(config, 4095)

    base, more = layer("softmax"), {}
    for name in ("diff", "gated", "diff_v2", "diff_v3"):
        more[name] = tuple(round(100 * (a / b - 1), 2) for a, b in zip(layer(name), base, strict=True))
    assert more == {"diff": (0.0, 0.06), "gated": (0.2, 0.15), "diff_v2": (25.2, 31.49), "diff_v3": (25.39, 31.64)}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"maps": 3}, "maps is 3; accepted: 1, 2"),
        ({"maps": 1, "lam": "token"}, "lam and gate='first' need maps=2"),
        ({"maps": 1, "gate": "first"}, "lam and gate='first' need maps=2"),
        ({}, "needs a weight: give lam"),
        ({"lam": "token", "factor": True}, "which lam='token' lacks; set factor=False"),
        ({"lam": "token", "initial_ratio": 1.0}, "initial_ratio is 1.0; give one between 0 and 1"),
        ({"maps": 1, "initial_ratio": 0.3}, "initial_ratio is of lam='token'; leave it out"),
        ({"lam": "token", "head_norm_init": 0.3}, "head_norm_init=0.3 sets the weight of a head norm"),
        ({"maps": 1, "subtract": False}, "subtract=False needs maps=2"),
        ({"lam": "token", "gate": "result", "head_norm": "plain"}, "the head norm cancels a gate before it"),
        ({"lam": "learned", "means": True, "gate": "normed"}, "attention='dint' takes no gate"),
        ({"lam": "token", "head_scale": "larger"}, "head_scale is 'larger'; give a number"),
        ({"lam": "tokens"}, "lam is 'tokens'; accepted: None, learned, fixed, token"),
        ({"lam": "token", "gate": "both"}, "gate is 'both'; accepted: None, first, result, normed"),
        ({"lam": "token", "head_norm": True}, "head_norm is True; accepted: None, plain, weighted"),
    ],
)
def test_rows_that_make_no_sense_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Variant(**fields)


@pytest.mark.parametrize(
    ("attention", "lam", "head_norm", "factor"),
    [("diff", "fixed", None, True), ("diff", "learned", None, True), ("diff_v2", "learned", "plain", False)],
)
def test_other_fields_hold_beside_another_lambda(attention, lam, head_norm, factor):
    core = {"lam": lam} if attention == "diff" else {"lam": lam, "head_norm": "plain"}
    found = DiffTransformerConfig(attention=attention, core=core, lambda_init=0.5, head_norm=False).variant
    assert (found.lam, found.lambda_init, found.head_norm, found.factor) == (lam, 0.5, head_norm, factor)
    assert DiffTransformerConfig(attention="diff_v2", core={"lam": lam}).variant.head_norm is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"head_norm_eps": 0}, "head_norm_eps is 0; it must be positive"),
        ({"qk_clip": 0}, "qk_clip is 0; it must be positive"),
        ({"rms_norm_eps": -1}, "rms_norm_eps is -1; it must be positive"),
        ({"core": {"head_norm_init": 0.5}}, "no field of core 'head_norm_init'"),  # two of them would disagree
        ({"core": {"initial_ratio": "a"}}, "initial_ratio is 'a'; give a number"),
        ({"core": {"factor": "no"}}, "factor is 'no'; give True or False"),
        ({"core": "diff"}, "core is 'diff'; give a dictionary"),
    ],
)
def test_wrong_values_are_refused(fields, message):
    with pytest.raises(UserError, match=message):
        DiffTransformerConfig(num_hidden_layers=3, **fields)
