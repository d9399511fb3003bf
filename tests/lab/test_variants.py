"""Variants beside the pair of a comparison: equal cost, rows of results, and what can be asked for."""

import pytest
from typer.testing import CliRunner

from diff_transformer import DiffTransformerConfig
from diff_transformer.cli import app
from diff_transformer.lab.compare import compare, comparison_specs
from diff_transformer.lab.recipes import RECIPES, recipe
from diff_transformer.lab.results import read_comparison
from diff_transformer.lab.spec import side_model
from diff_transformer.model.cost import model_cost
from diff_transformer.model.matching import VARIANTS
from diff_transformer.train.config import override

PAIR = ("diff", "softmax")
OTHERS = [name for name in VARIANTS if name not in PAIR]


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("run", [name for name in RECIPES if not recipe(name).model.get("softmax_head_norm")])
def test_parameters_agree_with_both_sides_of_the_pair(run, name):
    """Of every recipe but a control, for which there is no pair either."""
    config = recipe(run)
    count = model_cost(DiffTransformerConfig(**side_model(config, name))).total_parameters
    for side in PAIR:
        pair = model_cost(DiffTransformerConfig(**{**config.model, "attention": side})).total_parameters
        assert count == pytest.approx(pair, rel=0.01)


def test_runs_differ_from_the_pair_in_the_model_alone():
    config = recipe("debug")
    specs = comparison_specs(config, [*PAIR, "softmax_norm", "diff_v2"], seeds=2)
    names = [f"{side}-seed{seed}" for sides in (PAIR, ("softmax_norm", "diff_v2")) for seed in (0, 1) for side in sides]
    assert [spec.name for spec in specs] == names
    for spec in specs:
        assert spec.config.train.seed == config.train.seed + spec.seed
        fields = {"attention": spec.side} if spec.side in PAIR else VARIANTS[spec.side]
        assert fields.items() <= spec.config.model.items()
        assert spec.measure[:5] == ("associative_recall", "needle", "allocation", "outliers", "long_nll")
        spec.config.model, spec.config.train.seed = config.model, config.train.seed
        assert spec.config == config
    assert [spec.name for spec in specs if "explorer" in spec.measure] == ["diff-seed0", "softmax-seed0"]


def test_what_cannot_be_is_said_before_anything_is_made(tmp_path):
    config = override(recipe("debug"), ["model.signal_heads_per_noise_head=2"])
    with pytest.raises(ValueError, match="do not make groups of 2 signal heads"):
        compare(config, tmp_path / "out", variants=["grouped_diff"])
    with pytest.raises(ValueError, match="no variant 'v2'; there are: diff, diff_v2, diff_v3, gated"):
        compare(config, tmp_path / "out", variants=["v2"])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("attention", ["softmax", "diff_v2"])
def test_the_command_line_does_not_take_the_attention_of_a_pair(tmp_path, attention):
    command = ["compare", "--recipe", "debug", "--out", str(tmp_path / "out"), "--set", f"model.attention={attention}"]
    failed = CliRunner().invoke(app, command).exception
    assert isinstance(failed, ValueError)
    assert "compare trains the pair, diff and softmax, whatever model.attention is; leave it out" in str(failed)
    assert "--variants (diff_v2, diff_v3, gated, grouped_diff, dint, fixed_lambda, softmax_norm)" in str(failed)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_whole_of_it(texts, tmp_path):
    """A pair and one variant, then a second variant in the same folder, which leaves the others untouched."""
    settings = [f"data.corpus={texts}", "data.max_bytes=null", "model.vocab_size=384", "train.steps=4"]
    settings += ["evaluation.more={}", "evaluation.samples=1", "evaluation.allocation_samples=1",
                 "evaluation.loss_rows=4", "evaluation.outlier_rows=2", "evaluation.throughput_repeats=1"]  # fmt: skip
    config, out = override(recipe("debug"), settings), tmp_path / "out"
    first = compare(config, out, variants=["dint"])
    assert read_comparison(out).sides == ["diff", "softmax", "dint"]
    weights = out / "members" / "dint-seed0" / "run" / "model" / "model.safetensors"
    before = weights.read_bytes()
    again = compare(config, out, variants=["diff_v2"], resume=True)
    rows = read_comparison(out)
    assert rows.sides == ["diff", "softmax", "diff_v2", "dint"]
    assert weights.read_bytes() == before
    assert sorted(rows["throughput"]["side"]) == ["diff", "diff_v2", "softmax"]  # timed again beside a new one
    assert {id: of["softmax"].difference for id, of in again.items() if id != "throughput"} == {
        id: of["softmax"].difference for id, of in first.items() if id != "throughput"
    }
    assert 'id="variants"' in (out / "report.html").read_text()
