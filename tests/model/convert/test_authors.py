"""Against the authors' layer written out: neighbouring heads, interleaved rotary embedding, both groupings of keys."""

import json
import math

import pytest
import torch
from torch.nn.functional import silu

from diff_transformer import DiffTransformerForCausalLM
from diff_transformer.model.convert import attention_from_authors, convert_folder
from diff_transformer.model.convert.authors import naive_sources
from diff_transformer.testing import assert_within_budget

DIM, LAYERS, HEADS, D, HIDDEN, VOCABULARY, THETA = 48, 3, 6, 4, 40, 96, 5000.0
LAMBDAS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")


def rms(x, weight=None, eps=1e-5):
    normed = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return normed if weight is None else normed * weight


def rotate_neighbours(x):
    """[B, T, heads, d]: channels 2i and 2i + 1 are turned by t * theta ** (-2 i / d)."""
    angles = torch.arange(x.shape[1])[:, None].double() * THETA ** (-torch.arange(0, D, 2).double() / D)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


def attend(x, layer, depth, pairs, naive, rotary=True):
    """The layer of the authors in fp64; ``naive``: keys repeated before heads are paired."""
    batch, length, _ = x.shape
    repeat = HEADS // pairs
    q, k, v = (x @ layer[f"{name}_proj.weight"].T for name in "qkv")
    q, k = q.view(batch, length, 2 * HEADS, D), k.view(batch, length, 2 * pairs, D)
    v = v.view(batch, length, pairs, 2 * D).repeat_interleave(repeat, dim=2)
    if rotary:
        q, k = rotate_neighbours(q), rotate_neighbours(k)
    if naive:
        k = k.repeat_interleave(repeat, dim=2).unflatten(2, (HEADS, 2))
    else:
        k = k.unflatten(2, (pairs, 2)).repeat_interleave(repeat, dim=2)
    scores = torch.einsum("bthmd,bshmd->bhmts", q.unflatten(2, (HEADS, 2)), k) * D**-0.5
    scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf)
    first, second = scores.softmax(-1).unbind(2)
    start = 0.8 - 0.6 * math.exp(-0.3 * depth)
    lq1, lk1, lq2, lk2 = (layer[name] for name in LAMBDAS)
    lam = (lq1 * lk1).sum().exp() - (lq2 * lk2).sum().exp() + start
    out = torch.einsum("bhts,bshe->bthe", first - lam * second, v)
    out = rms(out, layer.get("subln.weight")) * (1 - start)
    return out.flatten(2) @ layer["out_proj.weight"].T


def logits(state, ids, pairs, naive=False, norm_eps=1e-5, attention="attention"):
    state = {name: tensor.double() for name, tensor in state.items()}
    x = state["tok_embeddings.weight"][ids]
    for depth in range(LAYERS):
        prefix = f"layers.{depth}."
        layer = {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
        inner = {name.removeprefix(f"{attention}."): tensor for name, tensor in layer.items()}
        x = x + attend(rms(x, layer["attention_norm.weight"], norm_eps), inner, depth, pairs, naive)
        y = rms(x, layer["ffn_norm.weight"], norm_eps)
        gated = silu(y @ layer["feed_forward.w1.weight"].T) * (y @ layer["feed_forward.w3.weight"].T)
        x = x + gated @ layer["feed_forward.w2.weight"].T
    return rms(x, state["norm.weight"], norm_eps) @ state.get("output.weight", state["tok_embeddings.weight"]).T


def random_layer(pairs, weight=True):
    def matrix(rows, columns):
        return 1.5 * torch.randn(rows, columns) * columns**-0.5

    layer = {
        "q_proj.weight": matrix(2 * HEADS * D, DIM),
        "k_proj.weight": matrix(2 * pairs * D, DIM),
        "v_proj.weight": matrix(2 * pairs * D, DIM),
        "out_proj.weight": matrix(DIM, 2 * HEADS * D),
        **{name: 0.4 * torch.randn(D) for name in LAMBDAS},
    }
    return layer | ({"subln.weight": 0.4 + torch.rand(2 * D)} if weight else {})


def random_state(pairs, *, weight=True, tied=False, attention="attention"):
    def matrix(rows, columns):
        return 1.5 * torch.randn(rows, columns) * columns**-0.5

    state = {"tok_embeddings.weight": matrix(VOCABULARY, DIM), "norm.weight": 0.4 + torch.rand(DIM)}
    if not tied:
        state["output.weight"] = matrix(VOCABULARY, DIM)
    for i in range(LAYERS):
        state |= {f"layers.{i}.{attention}.{name}": x for name, x in random_layer(pairs, weight).items()}
        state |= {f"layers.{i}.{name}_norm.weight": 0.4 + torch.rand(DIM) for name in ("attention", "ffn")}
        state |= {f"layers.{i}.feed_forward.w{n}.weight": matrix(HIDDEN, DIM) for n in (1, 3)}
        state[f"layers.{i}.feed_forward.w2.weight"] = matrix(DIM, HIDDEN)
    return state


def params(pairs, **fields):
    return {
        "dim": DIM, "n_layers": LAYERS, "n_heads": HEADS, "n_kv_heads": pairs, "head_dim": D, "hidden_dim": HIDDEN,
        "vocab_size": VOCABULARY, "norm_eps": 1e-5, "rope_theta": THETA, "max_seq_len": 64,
    } | fields  # fmt: skip


def ours_of(folder, **options):
    out = folder.with_name(f"{folder.name}-ours")
    notes = convert_folder(folder, out, **options)
    return DiffTransformerForCausalLM.from_pretrained(out), notes


@pytest.mark.parametrize("pairs", [6, 3, 2, 1])
@pytest.mark.parametrize("naive", [False, True])
def test_ours_has_the_logits_of_the_formulas(save, ids, pairs, naive):
    state = random_state(pairs)
    folder = save("authors", state, **{"params.json": params(pairs)})
    ours, notes = ours_of(folder, naive_grouped_query=naive)
    assert_within_budget(ours(ids).logits, logits(state, ids, pairs, naive), what="logits")
    assert any("repeated" in note for note in notes) == (naive and pairs != 6)


def test_the_two_ways_of_grouping_differ(ids):
    state = random_state(3)
    assert (logits(state, ids, 3, False) - logits(state, ids, 3, True)).abs().max() > 0.5
    same = random_state(6)
    assert torch.equal(logits(same, ids, 6, False), logits(same, ids, 6, True))


@pytest.mark.parametrize("pairs", [6, 2])
def test_the_authors_formulas_have_the_logits_of_ours(make, ids, tmp_path, pairs):
    from safetensors.torch import load_file

    ours = make(
        hidden_size=DIM, intermediate_size=HIDDEN, num_attention_heads=2 * HEADS, head_dim=D,
        num_key_value_heads=2 * pairs, rope_parameters={"rope_type": "default", "rope_theta": THETA},
    )  # fmt: skip
    ours.save_pretrained(tmp_path / "ours")
    convert_folder(tmp_path / "ours", tmp_path / "theirs", target="authors")
    told = json.loads((tmp_path / "theirs" / "params.json").read_text())
    assert told == params(pairs, n_layers=3)
    state = load_file(tmp_path / "theirs" / "model.safetensors")
    assert_within_budget(ours(ids).logits, logits(state, ids, pairs), what="logits")


@pytest.mark.parametrize(("pairs", "naive"), [(6, False), (2, False), (6, True), (3, True), (1, True)])
@pytest.mark.parametrize(("weight", "tied"), [(True, False), (False, True)])
def test_there_and_back_is_bit_exact(save, pairs, naive, weight, tied):
    """r = 2 (pairs 3) of the naive file comes back as what it became: as many pairs as heads."""
    from safetensors.torch import load_file

    state = {name: tensor.bfloat16() for name, tensor in random_state(pairs, weight=weight, tied=tied).items()}
    state |= {name: tensor.float() for name, tensor in state.items() if "lambda" in name}
    folder = save("authors", state, **{"params.json": params(pairs)})
    out, back = folder.with_name("ours"), folder.with_name("back")
    convert_folder(folder, out, naive_grouped_query=naive)
    convert_folder(out, back, target="authors", naive_grouped_query=naive)
    again = load_file(back / "model.safetensors")
    assert set(again) == set(state)
    repeated = naive and pairs == 3
    for name, tensor in state.items():
        if not (repeated and name.endswith(("k_proj.weight", "v_proj.weight"))):
            assert again[name].dtype == tensor.dtype
            assert torch.equal(again[name], tensor), name
    assert json.loads((back / "params.json").read_text()) == params(6 if repeated else pairs)


@pytest.mark.parametrize(
    ("heads", "pairs", "keys", "values"),
    [
        (4, 4, [0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3]),  # r = 1: as it is
        (4, 2, [0, 0, 1, 1, 2, 2, 3, 3], [0, 0, 1, 1]),  # r = 2: every head meets one key twice
        (8, 2, [0, 0, 1, 1, 2, 2, 3, 3], [0, 0, 1, 1]),  # r = 4: two heads share what they meet
        (3, 1, [0, 0, 0, 1, 1, 1], [0, 0, 0]),  # r = 3: the head in the middle has both keys
    ],
)
def test_what_the_naive_file_pairs(heads, pairs, keys, values):
    assert naive_sources(heads, pairs) == (keys, values)


def test_the_naive_file_cannot_hold_two_different_keys(make, tmp_path):
    ours = make(hidden_size=DIM, num_attention_heads=12, head_dim=D, num_key_value_heads=4)
    ours.save_pretrained(tmp_path / "ours")
    with pytest.raises(ValueError, match="the two maps of a key/value pair have different keys"):
        convert_folder(tmp_path / "ours", tmp_path / "theirs", target="authors", naive_grouped_query=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours"]


@pytest.mark.parametrize("dialect", ["self_attn", "hugging face"])
def test_other_names_around_the_layer(save, ids, dialect):
    state = random_state(3, attention="self_attn")
    expected = logits(state, ids, 3, attention="self_attn")
    if dialect == "hugging face":
        for old, new in (
            ("tok_embeddings", "embed_tokens"), ("output", "lm_head"), ("attention_norm", "input_layernorm"),
            ("ffn_norm", "post_attention_layernorm"), ("feed_forward.w1", "mlp.gate_proj"),
            ("feed_forward.w3", "mlp.up_proj"), ("feed_forward.w2", "mlp.down_proj"),
        ):  # fmt: skip
            state = {name.replace(old, new): tensor for name, tensor in state.items()}
        state = {name if name.startswith("lm_head") else f"model.{name}": tensor for name, tensor in state.items()}
    folder = save("authors", state, **{"config.json": {"rope_theta": THETA}})
    assert_within_budget(ours_of(folder)[0](ids).logits, expected, what="logits")


@pytest.mark.parametrize(
    "rope", [{"rope_theta": THETA}, {"rope_parameters": {"rope_type": "default", "rope_theta": THETA}}]
)
def test_settings_under_hugging_face_names_are_read(save, ids, rope):
    state = random_state(3)
    told = {"rms_norm_eps": 0.1, "max_position_embeddings": 64, "num_attention_heads": 12, "rope_scaling": None, **rope}
    ours, notes = ours_of(save("authors", state, **{"config.json": told}))
    assert_within_budget(ours(ids).logits, logits(state, ids, 3, norm_eps=0.1), what="logits")
    assert ours.config.max_position_embeddings == 64
    assert not [note for note in notes if "otherwise" in note]


def test_settings_that_nobody_told_are_noted(save):
    _, notes = ours_of(save("authors", random_state(3), **{"params.json": {"norm_eps": 1e-5}}))
    assert "neither params.json nor config.json says otherwise, so rope_theta 10000, max_seq_len 4096" in notes


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, r"rotary embedding is linear \(\{'factor': 4.0\}\)"),
        ({"rope_parameters": {"type": "yarn", "rope_theta": THETA}}, "rotary embedding is yarn"),
        ({"rope_parameters": {"rope_theta": THETA, "partial_rotary_factor": 0.5}}, "'partial_rotary_factor': 0.5"),
        (
            {"rope_theta": 1e4, "rope_parameters": {"rope_theta": THETA}},
            "rope_theta is 5000.0, but rope_theta is 10000.0",
        ),
        ({"rms_norm_eps": 1e-6, "norm_eps": 1e-5}, "rms_norm_eps is 1e-06, but norm_eps is 1e-05"),
        ({"hidden_size": 64}, "dim is 64, the tensors have 48"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; the authors' layout has"),
        ({"sliding_window": 8}, "sliding_window is 8; the authors' layout has"),
    ],
)
def test_settings_that_the_layout_cannot_hold_are_refused(save, told, message):
    folder = save("authors", random_state(3), **{"config.json": told})
    with pytest.raises(ValueError, match=message):
        convert_folder(folder, folder.with_name("ours"))


def test_the_norms_of_the_model_have_an_epsilon_of_their_own(save, ids):
    state = random_state(3)
    folder = save("authors", state, **{"params.json": params(3, norm_eps=0.1)})
    ours, _ = ours_of(folder)
    assert (ours.config.rms_norm_eps, ours.config.head_norm_eps) == (0.1, 1e-5)
    assert_within_budget(ours(ids).logits, logits(state, ids, 3, norm_eps=0.1), what="logits")


def test_heads_counted_twice_are_noticed(save):
    folder = save("authors", random_state(3), **{"params.json": params(3, n_heads=12)})
    with pytest.raises(
        ValueError, match="n_heads is 12, the tensors have 6; n_heads and n_kv_heads count differential"
    ):
        convert_folder(folder, folder.with_name("ours"))


def test_a_missing_and_an_extra_tensor_are_listed(save):
    state = random_state(3)
    del state["layers.1.attention.subln.weight"]
    state["layers.0.attention.gate.weight"] = torch.zeros(2)
    folder = save("authors", state, **{"params.json": params(3)})
    with pytest.raises(
        ValueError, match=r"1 missing: layers.1.attention.subln.weight\n.*1 not known: layers.0.att.*gate"
    ):
        convert_folder(folder, folder.with_name("ours"))


@pytest.mark.parametrize(("pairs", "naive"), [(6, False), (3, False), (3, True), (2, True)])
@pytest.mark.parametrize("rotary", [True, False])
@pytest.mark.parametrize("weight", [True, False])
def test_one_layer_by_itself(pairs, naive, rotary, weight):
    layer = random_layer(pairs, weight)
    x = torch.randn(2, 11, DIM)
    theta = THETA if rotary else None
    ours = attention_from_authors(layer, depth=4, rope_theta=theta, naive_grouped_query=naive)
    exact = attend(x.double(), {k: v.double() for k, v in layer.items()}, 4, pairs, naive, rotary)
    assert_within_budget(ours(x)[0], exact, what="out")
    wide = {name: tensor.double() + 1e-9 for name, tensor in layer.items()}
    ours = attention_from_authors(wide, depth=4, rope_theta=theta, naive_grouped_query=naive)
    assert torch.equal(ours.o_proj.weight, wide["out_proj.weight"])


def test_a_layer_of_another_kind_is_refused():
    v2 = {f"{name}_proj.weight": torch.zeros(4, 4) for name in ("q", "k", "v", "o", "lambda")}
    with pytest.raises(ValueError, match=r"the layer has \['k_proj.weight', 'lambda_proj.weight'.*expected \['k_proj"):
        attention_from_authors(v2, depth=0)


def test_to_diffllama_in_one_step(save, ids, tmp_path):
    from transformers import DiffLlamaForCausalLM

    state = random_state(3)
    folder = save("authors", state, **{"params.json": params(3)})
    convert_folder(folder, tmp_path / "theirs", target="diffllama")
    theirs = DiffLlamaForCausalLM.from_pretrained(tmp_path / "theirs")
    assert_within_budget(theirs(ids).logits, logits(state, ids, 3), what="logits")
