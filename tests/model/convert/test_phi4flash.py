"""Phi-4-mini-flash: its attention layers against the formulas; the whole model is refused by name."""

import math

import pytest
import torch

from diff_transformer.model.convert import convert_folder, phi4flash_attention
from diff_transformer.testing import assert_within_budget

WIDTH, LAYERS, HEADS, KEYS, WINDOW = 32, 8, 8, 4, 5
D = WIDTH // HEADS
LAMBDAS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")
SETTINGS = {
    "model_type": "phi4flash", "architectures": ["Phi4FlashForCausalLM"], "hidden_size": WIDTH, "mb_per_layer": 2,
    "num_attention_heads": HEADS, "num_key_value_heads": KEYS, "num_hidden_layers": LAYERS, "sliding_window": WINDOW,
}  # fmt: skip


def random_state():
    state = {"model.embed_tokens.weight": torch.randn(96, WIDTH), "model.layers.0.attn.A_log": torch.randn(64, 16)}
    for i in (1, 3, 5, 7):
        rows = HEADS * D if i == 7 else (HEADS + 2 * KEYS) * D
        prefix = f"model.layers.{i}.attn."
        state |= {
            f"{prefix}Wqkv.weight": 1.5 * torch.randn(rows, WIDTH) * WIDTH**-0.5,
            f"{prefix}Wqkv.bias": torch.randn(rows),
            f"{prefix}out_proj.weight": torch.randn(WIDTH, HEADS * D) * WIDTH**-0.5,
            f"{prefix}out_proj.bias": torch.randn(WIDTH),
            f"{prefix}inner_cross_attn.subln.weight": 0.4 + torch.rand(2 * D),
            **{f"{prefix}inner_cross_attn.{name}": 0.4 * torch.randn(D) for name in LAMBDAS},
        }
    return state


def attend(state, i, x, source=None):
    """Layer i in fp64, without positions; ``source``: the input of the layer whose keys and values it takes."""
    layer = {
        name.removeprefix(f"model.layers.{i}.attn."): tensor.double()
        for name, tensor in state.items()
        if name.startswith(f"model.layers.{i}.attn.")
    }
    fused = x @ layer["Wqkv.weight"].T + layer["Wqkv.bias"]
    if source is None:
        q, k, v = fused.split([HEADS * D, KEYS * D, KEYS * D], dim=-1)
    else:
        shared = source @ state["model.layers.5.attn.Wqkv.weight"].double().T + state["model.layers.5.attn.Wqkv.bias"]
        q, (_, k, v) = fused, shared.split([HEADS * D, KEYS * D, KEYS * D], dim=-1)
    shape = (*x.shape[:2], -1, 2, D)
    repeat = HEADS // KEYS
    q, k, v = q.view(shape), k.view(shape).repeat_interleave(repeat, 2), v.view(shape).repeat_interleave(repeat, 2)
    scores = torch.einsum("bthmd,bshmd->bhmts", q, k) * D**-0.5
    length = x.shape[1]
    seen = torch.ones(length, length).tril().bool()
    if i < LAYERS // 2:
        seen &= torch.ones(length, length).triu(1 - WINDOW).bool()
    first, second = scores.masked_fill(~seen, -math.inf).softmax(-1).unbind(2)
    start = 0.8 - 0.6 * math.exp(-0.3 * i)
    lq1, lk1, lq2, lk2 = (layer[f"inner_cross_attn.{name}"] for name in LAMBDAS)
    lam = (lq1 * lk1).sum().exp() - (lq2 * lk2).sum().exp() + start
    out = torch.einsum("bhts,bshe->bthe", first - lam * second, v.flatten(3))
    out = out / (out.square().mean(-1, keepdim=True) + 1e-5).sqrt() * layer["inner_cross_attn.subln.weight"]
    return (out * (1 - start)).flatten(2) @ layer["out_proj.weight"].T + layer["out_proj.bias"]


def test_every_attention_layer_has_the_outputs_of_the_formulas(save):
    state = random_state()
    layers = phi4flash_attention(save("phi", state, **{"config.json": SETTINGS}))
    assert sorted(layers) == [1, 3, 5, 7]
    x, source = torch.randn(2, 2, 13, WIDTH)
    for i in (1, 3, 5):
        assert layers[i].core.window == (WINDOW if i < 4 else None)
        assert_within_budget(layers[i](x)[0], attend(state, i, x.double()), what=f"layer {i}")
    expected = attend(state, 7, x.double(), source.double())
    assert_within_budget(layers[7](x, source)[0], expected, what="layer 7")


def test_bf16_layers_stay_bf16_with_lambda_in_fp32(save):
    state = {name: tensor.bfloat16() for name, tensor in random_state().items()}
    layer = phi4flash_attention(save("phi", state, **{"config.json": SETTINGS}))[1]
    assert layer.q_proj.bias.dtype == torch.bfloat16
    assert layer.core.lam.lambda_q1.dtype == torch.float32
    assert torch.equal(layer.core.lam.lambda_q1, state["model.layers.1.attn.inner_cross_attn.lambda_q1"].float())


def test_the_whole_model_is_refused_with_what_is_missing(save):
    folder = save("phi", random_state(), **{"config.json": SETTINGS})
    with pytest.raises(ValueError, match="Phi-4-mini-flash") as caught:
        convert_folder(folder, folder.with_name("ours"))
    for part in (
        "Mamba",
        "gated memory units",
        "keys and values of layer 5",
        "LayerNorm with biases",
        "phi4flash_attention",
    ):
        assert part in str(caught.value)
    assert not folder.with_name("ours").exists()


def test_a_missing_bias_is_named(save):
    state = random_state()
    del state["model.layers.3.attn.Wqkv.bias"]
    with pytest.raises(ValueError, match=r"attention layer 3\n  1 missing: model.layers.3.attn.Wqkv.bias"):
        phi4flash_attention(save("phi", state, **{"config.json": SETTINGS}))


def test_another_model_is_not_taken_for_it(save):
    folder = save("other", random_state(), **{"config.json": SETTINGS | {"model_type": "phi3"}})
    with pytest.raises(ValueError, match="holds a 'phi3' model; expected 'phi4flash'"):
        phi4flash_attention(folder)
