"""Products in float8 on the CPU, where their rounding is emulated."""

import importlib.util

import pytest
import torch
from processes import assert_near_in_float8, logged
from transformers import AutoModelForCausalLM

from diff_transformer.lab.recipes import recipe
from diff_transformer.model.modeling import DiffTransformerForCausalLM
from diff_transformer.model.presets import preset
from diff_transformer.train.config import override
from diff_transformer.train.float8 import check_float8, use_float8, without_float8
from diff_transformer.train.initial_model import build_model, check_model, start_model
from diff_transformer.train.loop import train

pytest.importorskip("torchao", reason="the extra `inference` is not installed")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def base(texts):
    return [f"data.corpus={texts}", "data.max_bytes=null", "train.log_every=1"]


def in_float8(model) -> list[str]:
    return [name for name, module in model.named_modules() if type(module).__name__ == "Float8Linear"]


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    scale = 2.0 ** (torch.finfo(dtype).max / x.abs().max()).log2().floor()
    return (x * scale).to(dtype).float() / scale


def test_a_product_and_its_gradients_by_hand():
    torch.manual_seed(0)
    model = DiffTransformerForCausalLM(preset("debug"))
    plain = model.model.layers[0].mlp.down_proj
    use_float8(model, CPU)
    product, weight = model.model.layers[0].mlp.down_proj, plain.weight
    x = torch.randn(7, weight.shape[1], requires_grad=True)
    out = product(x)
    gradient = torch.randn_like(out)
    out.backward(gradient)
    near, w = rounded(x.detach(), torch.float8_e4m3fn), rounded(weight.detach(), torch.float8_e4m3fn)
    back = rounded(gradient, torch.float8_e5m2)
    for found, expected in ((out, near @ w.T), (x.grad, back @ w), (weight.grad, back.T @ near)):
        torch.testing.assert_close(found.detach(), expected, rtol=1e-5, atol=1e-6)
    assert (out - plain(x)).abs().max() > 1e-3


@pytest.mark.parametrize("attention", ["softmax", "diff", "diff_v2", "grouped_diff", "dint"])
def test_which_products_are_in_float8(attention):
    """Those of the layers, but for lambda's; weights stay the same objects, and plain products come back."""
    heads = {"num_attention_heads": 8} if attention == "grouped_diff" else {}
    model = DiffTransformerForCausalLM(preset("debug", attention=attention, head_norm_init=1.0, **heads))
    before = dict(model.named_parameters())
    use_float8(model, CPU)
    products = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    assert sorted(in_float8(model)) == sorted(f"model.layers.{i}.{name}" for i in (0, 1) for name in products)
    after = dict(without_float8(model).named_parameters())
    assert in_float8(model) == []
    assert after.keys() == before.keys()
    assert all(after[name] is weight for name, weight in before.items())


@pytest.mark.slow
def test_a_run_in_float8(base, tmp_path):
    """It learns as one that is not in float8, from the same weights; resumed, it takes the same steps; its model is a
    plain one."""
    exact, whole = override(recipe("debug"), base), override(recipe("debug"), [*base, "train.float8=true"])
    train(exact, tmp_path / "exact")
    trained = train(whole, tmp_path / "float8")
    assert_near_in_float8(tmp_path / "float8", tmp_path / "exact")
    assert logged(tmp_path / "float8", "loss") != logged(tmp_path / "exact", "loss")

    start = start_model(whole, trained.tokenizer)
    use_float8(start.model, CPU)
    start.fill(start.model)
    expected = build_model(exact, trained.tokenizer).state_dict()
    found = start.model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())

    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "float8" / "model")
    ids = torch.arange(32)[None]
    assert in_float8(trained.model) == in_float8(saved) == []
    assert torch.equal(saved(ids).logits, trained.model(ids).logits)

    def stop(step, values):
        if step == 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(whole, tmp_path / "resumed", progress=stop)
    train(whole, tmp_path / "resumed", resume=True)
    assert logged(tmp_path / "resumed", "loss") == logged(tmp_path / "float8", "loss")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["train.parallel.tensor_parallel=2"], r"train\.float8 with train\.parallel\.tensor_parallel=2: the scale"),
        (["train.precision=64-true"], r"precision='64-true': products in float8 are summed in fp32; give '32-true'"),
        (["data.length=88"], r"data\.length is 88; .* give a multiple of 16, or train\.float8=false"),
        (
            ["train.parallel.context_parallel=4"],
            r"data\.length is 96; .* give a multiple of 64, or train\.float8=false",
        ),
        (["model.intermediate_size=100"], r"multiples of 16, and layers\.0\.mlp\.gate_proj has 100 x 32; choose other"),
    ],
)
def test_a_run_that_cannot_be_in_float8(settings, message):
    config = override(recipe("debug"), ["train.float8=true", *settings])
    with pytest.raises(ValueError, match=message):
        check_model(config.validate())
    check_model(override(config, ["train.float8=false", "train.parallel.context_parallel=1"]).validate())


def test_an_initial_model_that_cannot_be_in_float8(tmp_path):
    DiffTransformerForCausalLM(preset("debug", intermediate_size=100)).save_pretrained(tmp_path)
    config = override(recipe("debug"), ["train.float8=true", f"train.initial_model={tmp_path}"])
    with pytest.raises(ValueError, match=r"multiples of 16, and layers\.0\.mlp\.gate_proj has 100 x 32"):
        check_model(config)


def test_a_machine_that_has_no_float8(monkeypatch):
    model = DiffTransformerForCausalLM(preset("debug"))
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "is_available", lambda: True)
        patched.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
        with pytest.raises(ValueError, match=r"needs a GPU of compute capability 8\.9 or more, this one has 8\.0; set"):
            check_float8(model)
        patched.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
        check_float8(model)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torchao" else find(name))
    with pytest.raises(RuntimeError, match=r"train\.float8 needs torchao; install with: pip install .*\[inference\]"):
        check_float8(model)
