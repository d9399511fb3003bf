"""The studies with swept sides: what the sides of a cell share, and what they cost."""

import pytest
from prose import plan as prose_plan
from recall import plan as recall_plan

from diff_transformer import DiffTransformerConfig
from diff_transformer.model.cost import count_parameters

VARIED = {  # fields of a model that make a side
    "attention", "head_norm", "head_norm_init", "softmax_head_norm", "lambda_init", "lambda_learned",
    "intermediate_size", "num_key_value_heads", "value_head_dim",
}  # fmt: skip
PLANS = {"prose": prose_plan, "recall": recall_plan}


def rate(side, sides):
    return 1e-3 * (1 + list(sides).index(side))


@pytest.fixture(scope="module", params=PLANS)
def study(request):
    """(sides, the compared runs of all stages)"""
    plan = PLANS[request.param]
    rates = {side: rate(side, plan.SIDES) for side in plan.SIDES}
    runs = [spec for stage in plan.stages("python") for spec in stage.specs(rates)]
    return plan.SIDES, [spec for spec in runs if not spec.setting.startswith("sweep/")]


def home(spec, runs):
    """The setting whose Transformer sees what ``spec`` sees: its own without the rate, if it has one."""
    setting = spec.setting.partition("_lr")[0]
    return setting if any(other.setting == setting for other in runs) else spec.setting


def test_sides_differ_in_their_attention_and_rate_alone(study):
    sides, runs = study
    cells = {spec.key: spec for spec in runs}
    assert len(cells) == len(runs)
    for spec in runs:
        at = spec.setting.partition("_lr")[2]
        ours, theirs = spec.config.to_dict(), cells[f"{home(spec, runs)}/softmax-seed{spec.seed}"].config.to_dict()
        fixed = {**prose_plan.RAISED} if spec.setting == "small_higher" else {spec.side: float(at)} if at else {}
        fixed |= dict.fromkeys(recall_plan.RETRIED, recall_plan.RETRIED_RATE)
        assert ours["optim"].pop("lr") == fixed.get(spec.side, rate(spec.side, sides))
        del theirs["optim"]["lr"]
        if spec.side in ("softmax_wide_norm1", "softmax_half_heads"):
            assert 2 * ours["model"].pop("num_attention_heads") == theirs["model"].pop("num_attention_heads")
        for each in (ours, theirs):
            for name in VARIED:
                each["model"].pop(name, None)
        assert ours == theirs, spec.key


def test_sides_cost_the_same(study):
    def parameters(spec):
        return sum(count_parameters(DiffTransformerConfig(**spec.config.model)).values())

    _, runs = study
    of_transformer = {spec.setting: parameters(spec) for spec in runs if spec.side == "softmax"}
    for spec in runs:
        assert parameters(spec) == pytest.approx(of_transformer[home(spec, runs)], rel=0.01), spec.key
