"""Against the authors' second version written out: pairs that share keys and values, lambda of each token and head."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import silu

from diff_transformer import DiffTransformerForCausalLM
from diff_transformer.model.convert import convert_folder, layout_of
from diff_transformer.model.convert.checkpoint import Checkpoint
from diff_transformer.testing import assert_within_budget

DIM, LAYERS, HEADS, D, HIDDEN, VOCABULARY, THETA = 48, 2, 4, 6, 40, 96, 5000.0


def random_state(keys):
    def matrix(rows, columns):
        return 1.5 * torch.randn(rows, columns) * columns**-0.5

    state = {"tok_embeddings.weight": matrix(VOCABULARY, DIM), "output.weight": matrix(VOCABULARY, DIM)}
    state["norm.weight"] = 0.4 + torch.rand(DIM)
    for i in range(LAYERS):
        attention, mlp = f"layers.{i}.attention.", f"layers.{i}.feed_forward."
        state |= {
            f"{attention}q_proj.weight": matrix(2 * HEADS * D, DIM),
            f"{attention}k_proj.weight": matrix(keys * D, DIM),
            f"{attention}v_proj.weight": matrix(keys * D, DIM),
            f"{attention}o_proj.weight": matrix(DIM, HEADS * D),
            f"{attention}lambda_proj.weight": matrix(HEADS, DIM),
            f"{mlp}w1.weight": matrix(HIDDEN, DIM),
            f"{mlp}w2.weight": matrix(DIM, HIDDEN),
            f"{mlp}w3.weight": matrix(HIDDEN, DIM),
            f"layers.{i}.attention_norm.weight": 0.4 + torch.rand(DIM),
            f"layers.{i}.ffn_norm.weight": 0.4 + torch.rand(DIM),
        }
    return state


def params(keys):
    return {
        "dim": DIM, "n_layers": LAYERS, "n_heads": HEADS, "n_kv_heads": keys, "head_dim": D, "hidden_dim": HIDDEN,
        "vocab_size": VOCABULARY, "norm_eps": 1e-5, "rope_theta": THETA, "max_seq_len": 64,
    }  # fmt: skip


def rms(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def turn_neighbours(x):
    angles = torch.arange(x.shape[1])[:, None].double() * THETA ** (-torch.arange(0, D, 2).double() / D)
    turns = torch.polar(torch.ones_like(angles), angles)[:, None]  # a pair of channels as a complex number
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * turns).flatten(-2)


def attend(x, layer, keys):
    batch, length, _ = x.shape
    q, k, v = (x @ layer[f"attention.{name}_proj.weight"].T for name in "qkv")
    q = turn_neighbours(q.view(batch, length, 2 * HEADS, D))
    k = turn_neighbours(k.view(batch, length, keys, D)).repeat_interleave(2 * HEADS // keys, dim=2)
    v = v.view(batch, length, keys, D).repeat_interleave(2 * HEADS // keys, dim=2)
    scores = torch.einsum("bthd,bshd->bhts", q, k) * D**-0.5
    scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf)
    heads = torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v)
    lam = (x @ layer["attention.lambda_proj.weight"].T).sigmoid()[..., None]
    return (heads[:, :, 0::2] - lam * heads[:, :, 1::2]).flatten(2) @ layer["attention.o_proj.weight"].T


def logits(state, ids, keys):
    state = {name: tensor.double() for name, tensor in state.items()}
    x = state["tok_embeddings.weight"][ids]
    for i in range(LAYERS):
        prefix = f"layers.{i}."
        layer = {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
        x = x + attend(rms(x, layer["attention_norm.weight"]), layer, keys)
        y = rms(x, layer["ffn_norm.weight"])
        gated = silu(y @ layer["feed_forward.w1.weight"].T) * (y @ layer["feed_forward.w3.weight"].T)
        x = x + gated @ layer["feed_forward.w2.weight"].T
    return rms(x, state["norm.weight"]) @ state["output.weight"].T


@pytest.mark.parametrize("keys", [4, 2, 1])
def test_ours_has_the_logits_of_the_formulas_and_back_is_bit_exact(save, ids, keys):
    state = random_state(keys)
    folder = save("theirs", state, **{"params.json": params(keys)})
    assert layout_of(Checkpoint(folder)) == "authors-v2"
    out, back = folder.with_name("ours"), folder.with_name("back")
    convert_folder(folder, out)
    ours = DiffTransformerForCausalLM.from_pretrained(out)
    assert_within_budget(ours(ids).logits, logits(state, ids, keys), what="logits")
    convert_folder(out, back, target="authors-v2")
    again = load_file(back / "model.safetensors")
    assert set(again) == set(state)
    assert all(torch.equal(again[name], tensor) for name, tensor in state.items())
    assert json.loads((back / "params.json").read_text()) == params(keys)


def test_the_versions_are_not_taken_for_one_another(make, save, tmp_path):
    make().save_pretrained(tmp_path / "first")
    with pytest.raises(ValueError, match="second layout cannot hold this model: attention is 'diff', it"):
        convert_folder(tmp_path / "first", tmp_path / "out", target="authors-v2")
    make(attention="diff_v2").save_pretrained(tmp_path / "second")
    with pytest.raises(ValueError, match="the authors' layout cannot hold this model: attention is 'diff_v2'"):
        convert_folder(tmp_path / "second", tmp_path / "out", target="authors")
    folder = save("theirs", random_state(2), **{"params.json": params(2)})
    with pytest.raises(ValueError, match=r"is the authors' layout of the second version .*; give --from authors-v2"):
        convert_folder(folder, tmp_path / "out", origin="authors")
