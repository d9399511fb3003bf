"""Against Motif's decoder written out: lambda_init with the index less one, PolyNorm, halves turned, grouped heads."""

import math

import pytest
import torch
from torch.nn.functional import silu

from diff_transformer import DiffTransformerForCausalLM
from diff_transformer.model.convert import convert_folder, motif
from diff_transformer.testing import assert_within_budget

WIDTH, LAYERS, D, HIDDEN, VOCABULARY, THETA = 32, 3, 4, 40, 96, 5000.0
LAMBDAS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")


def settings(heads=8, keys=4, **fields):
    return {
        "model_type": "motif", "architectures": ["MotifForCausalLM"], "vocab_size": VOCABULARY, "hidden_size": WIDTH,
        "intermediate_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": heads, "head_dim": D,
        "num_key_value_heads": keys, "rms_norm_eps": 1e-3, "attn_rms_norm_eps": 1e-2, "rope_theta": THETA,
        "hidden_act": "poly_norm", "max_position_embeddings": 64, "tie_word_embeddings": False, "use_bias": False,
    } | fields  # fmt: skip


GROUPED = settings(heads=10, keys=4, num_noise_heads=2, k_ratio=1)


def random_state(config):
    def matrix(rows, columns):
        return 1.5 * torch.randn(rows, columns) * columns**-0.5

    heads, keys = config["num_attention_heads"], config["num_key_value_heads"]
    outputs = heads - (config.get("num_noise_heads") or heads // 2)
    state = {"model.embed_tokens.weight": matrix(VOCABULARY, WIDTH), "model.norm.weight": 0.4 + torch.rand(WIDTH)}
    if not config["tie_word_embeddings"]:
        state["lm_head.weight"] = matrix(VOCABULARY, WIDTH)
    for i in range(LAYERS):
        attention, mlp = f"model.layers.{i}.self_attn.", f"model.layers.{i}.mlp."
        state |= {
            f"{attention}q_proj.weight": matrix(heads * D, WIDTH),
            f"{attention}k_proj.weight": matrix(keys * D, WIDTH),
            f"{attention}v_proj.weight": matrix(keys * D, WIDTH),
            f"{attention}o_proj.weight": matrix(WIDTH, outputs * 2 * D),
            f"{attention}subln.weight": 0.4 + torch.rand(2 * D),
            **{f"{attention}{name}": 0.4 * torch.randn(D) for name in LAMBDAS},
            f"{mlp}gate_proj.weight": matrix(HIDDEN, WIDTH),
            f"{mlp}up_proj.weight": matrix(HIDDEN, WIDTH),
            f"{mlp}down_proj.weight": matrix(WIDTH, HIDDEN),
            f"model.layers.{i}.input_layernorm.weight": 0.4 + torch.rand(WIDTH),
            f"model.layers.{i}.post_attention_layernorm.weight": 0.4 + torch.rand(WIDTH),
        }
        if config["hidden_act"] == "poly_norm":
            state |= {f"{mlp}act_fn.weight": torch.rand(3), f"{mlp}act_fn.bias": torch.randn(1)}
    return state


def rms(x, weight, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def poly_norm(x, weight, bias):
    cube, square, line = (rms(x**power, 1.0, 1e-6) for power in (3, 2, 1))
    return weight[0] * cube + weight[1] * square + weight[2] * line + bias


def turn_halves(x):
    """[B, T, heads, d]: channels i and i + d / 2 are turned together."""
    angles = torch.arange(x.shape[1])[:, None].double() * THETA ** (-torch.arange(0, D, 2).double() / D)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    left, right = x[..., : D // 2], x[..., D // 2 :]
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


def logits(state, config, ids):
    state = {name: tensor.double() for name, tensor in state.items()}
    eps, x = config["rms_norm_eps"], state["model.embed_tokens.weight"][ids]
    for i in range(LAYERS):
        prefix = f"model.layers.{i}."
        layer = {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
        x = x + attend(rms(x, layer["input_layernorm.weight"], eps), layer, i, config)
        y = rms(x, layer["post_attention_layernorm.weight"], eps)
        gate = y @ layer["mlp.gate_proj.weight"].T
        poly = config["hidden_act"] == "poly_norm"
        gate = poly_norm(gate, layer["mlp.act_fn.weight"], layer["mlp.act_fn.bias"]) if poly else silu(gate)
        x = x + (gate * (y @ layer["mlp.up_proj.weight"].T)) @ layer["mlp.down_proj.weight"].T
    return rms(x, state["model.norm.weight"], eps) @ state.get("lm_head.weight", state["model.embed_tokens.weight"]).T


def attend(x, layer, index, config):
    """One loop over heads: the signal heads of a group, its noise head, its pair of keys, its value."""
    batch, length, _ = x.shape
    heads, pairs = config["num_attention_heads"], config["num_key_value_heads"] // 2
    groups = config.get("num_noise_heads") or heads // 2
    q, k, v = (x @ layer[f"self_attn.{name}_proj.weight"].T for name in "qkv")
    q = turn_halves(q.view(batch, length, groups, -1, D).flatten(2, 3)).unflatten(2, (groups, -1))
    k = turn_halves(k.view(batch, length, 2 * pairs, D)).unflatten(2, (pairs, 2))
    v = v.view(batch, length, pairs, 2 * D)
    hidden = torch.ones(length, length).triu(1).bool()
    lq1, lk1, lq2, lk2 = (layer[f"self_attn.{name}"] for name in LAMBDAS)
    start = 0.8 - 0.6 * math.exp(-0.3 * (index - 1))
    lam = (lq1 * lk1).sum().exp() - (lq2 * lk2).sum().exp() + start
    out = []
    for group in range(groups):
        pair = group // (groups // pairs)
        *signals, noise = q[:, :, group].unbind(2)
        maps = [
            (query @ k[:, :, pair, which].mT * D**-0.5).masked_fill(hidden, -math.inf).softmax(-1)
            for query, which in [(noise, 1)] + [(signal, 0) for signal in signals]
        ]
        for first in maps[1:]:
            head = (first - lam * maps[0]) @ v[:, :, pair]
            out.append(rms(head, layer["self_attn.subln.weight"], config["attn_rms_norm_eps"]) * (1 - start))
    return torch.cat(out, dim=-1) @ layer["self_attn.o_proj.weight"].T


@pytest.mark.parametrize(
    "config",
    [
        settings(),
        settings(keys=8, tie_word_embeddings=True),
        settings(keys=2, hidden_act="silu"),
        GROUPED,
        GROUPED | {"num_key_value_heads": 2, "tie_word_embeddings": True},
    ],
    ids=["pairs shared", "tied", "silu", "grouped", "grouped, shared"],
)
def test_ours_has_the_logits_of_the_formulas(save, ids, config):
    state = random_state(config)
    folder = save("motif", state, **{"config.json": config})
    out = folder.with_name("ours")
    convert_folder(folder, out)
    ours = DiffTransformerForCausalLM.from_pretrained(out)
    assert ours.model.layers[0].self_attn.core.lam.initial == pytest.approx(0.8 - 0.6 * math.exp(0.3))
    assert_within_budget(ours(ids).logits, logits(state, config, ids), what="logits")


def test_motif_does_not_fit_diffllama(save):
    config = settings()
    folder = save("motif", random_state(config), **{"config.json": config})
    with pytest.raises(
        ValueError, match=r"lambda_depth_offset is -1.*hidden_act is 'poly_norm'.*head_norm_eps is 0.01"
    ):
        convert_folder(folder, folder.with_name("theirs"), target="diffllama")


def test_scaled_positions_are_carried(save):
    scaling = {"type": "linear", "factor": 2.0}
    config = settings(rope_scaling=scaling)
    folder = save("motif", random_state(config), **{"config.json": config})
    convert_folder(folder, folder.with_name("ours"))
    rope = DiffTransformerForCausalLM.from_pretrained(folder.with_name("ours")).config.rope_parameters
    assert rope == {"rope_type": "linear", "factor": 2.0, "rope_theta": THETA}


def test_positions_as_transformers_5_writes_them():
    told = {name: value for name, value in settings().items() if name not in ("rope_theta", "rope_scaling")}
    told["rope_parameters"] = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}
    assert motif.to_package(told).config.rope_parameters == told["rope_parameters"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_bias": True}, "use_bias=True (biases)"),
        ({"kv_lora_rank": 512}, "kv_lora_rank=512 (latent keys and values)"),
        ({"k_ratio": 4, "num_noise_heads": 2}, "k_ratio is 4"),
        ({"hidden_act": "gelu"}, "no hidden_act 'gelu'"),
        ({"num_attention_heads": None}, "lack num_attention_heads"),
    ],
)
def test_other_motif_models_are_refused(save, fields, message):
    config = settings()
    folder = save("motif", random_state(config), **{"config.json": config | fields})
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the message is compared below)
        convert_folder(folder, folder.with_name("ours"))
    assert message in str(caught.value)
    assert not folder.with_name("ours").exists()
