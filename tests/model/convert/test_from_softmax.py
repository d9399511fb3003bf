"""A softmax Transformer as a DIFF Transformer: the same logits, and gradients for all that is new."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from diff_transformer import DiffTransformerForCausalLM
from diff_transformer.model.convert import convert_folder, convert_model
from diff_transformer.model.lambdas import LearnedLambda
from diff_transformer.testing import assert_within_budget

WAYS = {"diff": {}, "diff .2": {"lambda_init": 0.2}, "diff .8": {"lambda_init": 0.8}, "diff_v2": {}, "diff_v3": {}}
SOURCES = {"all heads": {}, "grouped keys": {"num_key_value_heads": 2}, "one key head": {"num_key_value_heads": 1},
           "window": {"sliding_window": 5}, "tied": {"tie_word_embeddings": True}}  # fmt: skip


@pytest.fixture
def source(make):
    return lambda **fields: make(attention="softmax", **fields)


def converted(model, way):
    return convert_model(model, way.split()[0], **WAYS[way])


def logits(model, ids):
    with torch.no_grad():
        return model(ids).logits


def gradients(model, ids):
    """Gradients of the mean loss in fp64: by the last part of the parameter's name, a list over layers."""
    model = model.double()
    model(ids, labels=ids).loss.backward()
    layers = [layer.self_attn for layer in model.model.layers]
    found = {"q": [layer.q_proj.weight.grad for layer in layers], "k": [layer.k_proj.weight.grad for layer in layers]}
    for layer in layers:
        for name, parameter in layer.core.named_parameters():
            found.setdefault(name, []).append(parameter.grad)
    return found


def halves(gradient, head_dim):
    """The parts that belong to the first maps' heads and to the second maps' heads."""
    by_head = gradient.unflatten(0, (-1, 2, head_dim))
    return by_head[:, 0], by_head[:, 1]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", SOURCES)
def test_logits_are_equal_in_fp32(source, ids, way, kind):
    model = source(**SOURCES[kind])
    diff = converted(model, way)
    assert diff.config.attention == way.split()[0]
    assert_within_budget(logits(diff, ids), logits(model.double(), ids), what="logits")


@pytest.mark.parametrize("way", WAYS)
def test_logits_are_equal_in_bf16(source, ids, way):
    """As near to the exact logits of the bf16 weights as the source itself computes them, up to a factor of 2."""
    model = source(num_key_value_heads=4).to(torch.bfloat16)
    diff, half = converted(model, way), logits(model, ids)
    assert diff.dtype == torch.bfloat16
    assert_within_budget(logits(diff, ids), logits(model.double(), ids), half, what="logits")


@pytest.mark.parametrize("lambda_init", [0.2, 0.5, 0.8])
def test_all_that_is_new_has_a_gradient(source, ids, lambda_init):
    """The first map's queries and keys have the source's gradient times 1 / (1 - c), the second's times -c / (1 - c);
    that of lambda is minus that of a factor on the attention's output, over 1 - c."""
    model = source(num_key_value_heads=4).double()
    diff, d = convert_model(model, "diff", lambda_init=lambda_init), model.config.head_dim
    new, old = gradients(diff, ids), gradients(model, ids)
    kept = 1 - lambda_init
    for role in ("q", "k"):
        for both, one in zip(new[role], old[role], strict=True):
            first, second = halves(both, d)
            torch.testing.assert_close(first, one.unflatten(0, (-1, d)) / kept, rtol=1e-6, atol=1e-9)
            torch.testing.assert_close(second, -lambda_init / kept * one.unflatten(0, (-1, d)), rtol=1e-6, atol=1e-9)
            assert second.abs().amin(dim=(1, 2)).max() > 0
    for i, layer in enumerate(model.model.layers):
        lam, out = diff.model.layers[i].self_attn.core.lam, layer.self_attn.o_proj.weight
        slope = -(out * out.grad).sum() / kept
        assert slope.abs() > 1e-4
        scale = torch.dot(lam.lambda_q1, lam.lambda_k1).exp()
        torch.testing.assert_close(new["lam.lambda_q1"][i], slope * scale * lam.lambda_k1, rtol=1e-5, atol=1e-9)
        torch.testing.assert_close(new["lam.lambda_q2"][i], -slope * scale * lam.lambda_k2, rtol=1e-5, atol=1e-9)
        assert all(new[f"lam.{name}"][i].any() for name in ("lambda_k1", "lambda_k2"))


def test_all_that_is_new_has_a_gradient_in_v2(source, ids):
    model = source(num_key_value_heads=4)
    new, old = gradients(convert_model(model, "diff_v2"), ids), gradients(model, ids)
    for both, one in zip(new["q"], old["q"], strict=True):
        first, second = halves(both, model.config.head_dim)
        torch.testing.assert_close(first, 2 * one.unflatten(0, (-1, model.config.head_dim)), rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(second, -first / 2, rtol=1e-6, atol=1e-9)
    for gradient in new["lam.proj.weight"]:
        assert (gradient.norm(dim=1) > 1e-4).all()  # every head's


@pytest.mark.parametrize("target", ["diff", "diff_v2", "diff_v3"])
@pytest.mark.parametrize("origin", ["llama", "diff-transformer"])
def test_folders(source, ids, tmp_path, origin, target):
    """In bf16, as the conversion in memory."""
    model = source(num_key_value_heads=4).to(torch.bfloat16)
    (convert_model(model, "llama") if origin == "llama" else model).save_pretrained(tmp_path / "source")
    convert_folder(tmp_path / "source", tmp_path / "out", target)
    saved = DiffTransformerForCausalLM.from_pretrained(tmp_path / "out")
    expected = convert_model(model, target)
    assert saved.config.attention == target
    assert saved.dtype == torch.bfloat16
    assert all(torch.equal(value, expected.state_dict()[name]) for name, value in saved.state_dict().items())
    assert torch.equal(logits(saved, ids), logits(expected, ids))
    assert {p.dtype for m in saved.modules() if isinstance(m, LearnedLambda) for p in m.parameters()} <= {torch.float32}
    convert_folder(tmp_path / "source", tmp_path / "fp32", target=target, dtype="float32")
    whole = load_file(tmp_path / "fp32" / "model.safetensors")
    assert {tensor.dtype for tensor in whole.values()} == {torch.float32}


def test_lambda_init_of_a_folder(source, tmp_path):
    source().save_pretrained(tmp_path / "source")
    convert_folder(tmp_path / "source", tmp_path / "out", target="diff", lambda_init=0.25)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["lambda_init"] == 0.25
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert saved.lambdas().tolist() == [0.25] * 3


@pytest.mark.parametrize(
    ("fields", "options", "message"),
    [
        ({"attention": "diff"}, {}, "attention='diff' already; give a softmax Transformer"),
        ({"attention": "softmax", "softmax_head_norm": True}, {}, "a norm, a gate or a scale"),
        ({"attention": "softmax", "core": {"head_norm": "weighted"}}, {}, "a norm, a gate or a scale"),
        ({"attention": "softmax"}, {"lambda_init": 0.0}, "lambda_init is 0.0; .* at 0 the second map has no gradient"),
    ],
)
def test_refused(make, fields, options, message):
    with pytest.raises(ValueError, match=message):
        convert_model(make(**fields), **{"target": "diff", **options})
