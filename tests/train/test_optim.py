import pytest
import torch

from diff_transformer import DiffTransformerForCausalLM
from diff_transformer.model.presets import preset
from diff_transformer.train.config import OptimConfig
from diff_transformer.train.step import learning_rate, make_optimizer, schedule_warning


@pytest.mark.parametrize("attention", ["diff", "diff_v2", "grouped_diff", "softmax"])
def test_decay_touches_matrices_only(attention):
    heads = {"num_attention_heads": 8} if attention == "grouped_diff" else {}
    model = DiffTransformerForCausalLM(preset("debug", attention=attention, **heads))
    optimizer = make_optimizer(model, OptimConfig(weight_decay=0.1))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        spared = "norm" in name or ".lam." in name
        assert decay[id(parameter)] == (0.0 if spared else 0.1), name
    assert any(".lam." in name for name, _ in model.named_parameters()) == (attention != "softmax")


def test_schedule_warms_up_and_decays_linearly():
    config = OptimConfig(lr=1.0, warmup_steps=4, final_lr_ratio=0.1)
    rates = [learning_rate(step, 14, config) for step in range(14)]
    assert rates[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert rates[-1] == pytest.approx(0.1)
    falls = torch.tensor(rates[3:]).diff()
    torch.testing.assert_close(falls, torch.full((10,), -0.09), atol=1e-6, rtol=0)


def test_no_warm_up():
    assert learning_rate(0, 10, OptimConfig(lr=1.0, warmup_steps=0, final_lr_ratio=0.0)) == pytest.approx(0.9)


def test_a_run_that_ends_in_its_warm_up_is_told():
    config = OptimConfig(lr=8e-5, warmup_steps=1000)
    said = schedule_warning(358, config)
    assert said is not None
    assert (
        "optim.warmup_steps 1000 is not less than train.steps 358: the learning rate ends at 2.86e-05 of 8e-05" in said
    )
    assert schedule_warning(1000, config) is not None
    assert schedule_warning(1001, config) is None
