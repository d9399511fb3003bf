"""Products in float8 on the CPU, where their rounding is emulated."""

import importlib.util

import pytest
import torch

from diff_transformer.lab.recipes import recipe
from diff_transformer.model.modeling import DiffTransformerForCausalLM
from diff_transformer.model.presets import preset
from diff_transformer.train.config import override
from diff_transformer.train.float8 import check_float8, use_float8, without_float8
from diff_transformer.train.initial_model import check_model
from diff_transformer.train.loop import train
from diff_transformer.train.metrics import read_metrics

CPU = torch.device("cpu")


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    scale = torch.finfo(dtype).max / x.abs().max()
    return (x * scale).to(dtype).to(x.dtype) / scale


def test_a_product_and_its_gradients_by_hand():
    torch.manual_seed(0)
    model = DiffTransformerForCausalLM(preset("debug", attention="diff_v2", head_norm_init=1.0))
    plain, weight = model.model.layers[0].mlp.down_proj, model.model.layers[0].mlp.down_proj.weight
    use_float8(model, CPU)
    product = model.model.layers[0].mlp.down_proj
    assert product is not plain
    assert product.weight is weight
    kinds = {name: type(module).__name__ for name, module in model.named_modules() if hasattr(module, "in_features")}
    exact = [name for name, kind in kinds.items() if kind != "Float8Linear"]
    assert [name for name in exact if ".lam" not in name] == ["lm_head"]
    assert len(exact) > 1

    x = torch.randn(7, weight.shape[1], requires_grad=True)
    out = product(x)
    gradient = torch.randn_like(out)
    out.backward(gradient)
    near, w = rounded(x.detach(), torch.float8_e4m3fn), rounded(weight.detach(), torch.float8_e4m3fn)
    back = rounded(gradient, torch.float8_e5m2)
    for found, expected in ((out, near @ w.T), (x.grad, back @ w), (weight.grad, back.T @ near)):
        torch.testing.assert_close(found.detach(), expected, rtol=1e-4, atol=1e-4)
    assert (out - plain(x)).abs().max() > 1e-3

    assert without_float8(model).model.layers[0].mlp.down_proj.weight is weight
    assert not any(type(module).__name__ == "Float8Linear" for module in model.modules())


def test_a_run_in_float8_learns_as_one_that_is_not(texts, tmp_path):
    settings = [f"data.corpus={texts}", "data.max_bytes=null", "train.log_every=1"]
    losses = {}
    for float8 in (False, True):
        config = override(recipe("debug"), [*settings, f"train.float8={str(float8).lower()}"])
        trained = train(config, tmp_path / str(float8))
        losses[float8] = [
            line["loss"] for line in read_metrics(tmp_path / str(float8) / "metrics.jsonl") if "loss" in line
        ]
    assert not any(type(module).__name__ == "Float8Linear" for module in trained.model.modules())
    assert losses[True] != losses[False]
    assert losses[True] == pytest.approx(losses[False], rel=0.01)


def test_what_cannot_be_in_float8(monkeypatch):
    with pytest.raises(ValueError, match=r"train\.float8 with train\.parallel\.tensor_parallel=2"):
        override(recipe("debug"), ["train.float8=true", "train.parallel.tensor_parallel=2"]).validate()
    odd = override(recipe("debug"), ["train.float8=true", "model.intermediate_size=100"])
    with pytest.raises(ValueError, match=r"multiples of 16, and layers\.0\.mlp\.gate_proj has 100 x \d+; choose other"):
        check_model(odd)
    model = DiffTransformerForCausalLM(preset("debug"))
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "is_available", lambda: True)
        patched.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
        with pytest.raises(ValueError, match=r"needs a GPU of compute capability 8\.9 or more, this one has 8\.0; set"):
            check_float8(model)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torchao" else find(name))
    with pytest.raises(RuntimeError, match=r"train\.float8 needs torchao; install with: pip install"):
        check_float8(model)
