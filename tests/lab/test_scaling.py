"""Tables of runs, and the matched-loss ratio on tables made to have a known one."""

import json
from collections.abc import Sequence

import pytest

from diff_transformer import DiffTransformerConfig, DiffTransformerForCausalLM
from diff_transformer.errors import UserError
from diff_transformer.evals.samples import Samples
from diff_transformer.lab.record import Record
from diff_transformer.lab.run_tables import Run, read_runs
from diff_transformer.lab.scaling import QUICK, Settings, evaluate_scaling, run
from diff_transformer.lab.stats import over_seeds

SIZES = (0.83e9, 1.4e9, 2.8e9, 6.8e9, 13.1e9)


def made(shares=(0.6, 0.6), sizes=SIZES, noise=0.0) -> list[Run]:
    """Two equal models, except that the first needs only a share of the parameters and of the tokens."""
    runs = []
    for name, (share, token_share) in (("softmax", (1.0, 1.0)), ("diff", shares)):
        for i, size in enumerate(sizes):
            runs.append(Run(name, size, 1e10, (1.8 + 300 * (size / share) ** -0.28) * (1 + noise * (-1) ** i)))
        for tokens in (40e9, 80e9, 160e9, 240e9, 360e9):
            runs.append(Run(name, 3e9, tokens, 1.7 + 500 * (tokens / token_share) ** -0.27))
    return runs


def test_the_paper_s_ratios_come_back():
    metrics = evaluate_scaling(made(shares=(6.8 / 11, 160 / 251))).metrics
    assert metrics["parameters_ratio_from_ours"] == pytest.approx(6.8 / 11, rel=1e-6)
    assert metrics["parameters_ratio_from_ours_at"] == 6.8e9
    assert metrics["parameters_ratio_from_reference"] == pytest.approx(6.8 / 11, rel=1e-6)
    assert metrics["parameters_ratio_from_reference_at"] == 13.1e9
    assert metrics["tokens_ratio_from_ours"] == pytest.approx(160 / 251, rel=1e-6)


def test_a_match_is_where_the_curves_have_the_same_loss():
    result = evaluate_scaling(made())
    row = next(r for r in result.rows if r.get("measured") == "diff" and r["at"] == 6.8e9)
    assert row["matched"] == pytest.approx(6.8e9 / 0.6)
    assert row["loss"] == pytest.approx(1.8 + 300 * (6.8e9 / 0.6) ** -0.28)
    beyond = next(r for r in result.rows if r.get("measured") == "diff" and r["at"] == 13.1e9)
    assert beyond["matched"] == pytest.approx(13.1e9 / 0.6)
    assert (row["extrapolated"], beyond["extrapolated"]) == (False, True)


def test_no_gain_is_a_ratio_of_one_and_a_loss_is_above():
    assert evaluate_scaling(made((1.0, 1.0))).metrics["tokens_ratio_from_ours"] == pytest.approx(1.0)
    assert evaluate_scaling(made((1.4, 1.4))).metrics["parameters_ratio_from_reference"] > 1.0


@pytest.mark.slow
def test_noise_gives_intervals_around_the_ratio():
    metrics = evaluate_scaling(made(noise=0.002)).metrics
    low, high = (metrics[f"parameters_ratio_from_ours_{end}"] for end in ("low", "high"))
    assert low < metrics["parameters_ratio_from_ours"] < high
    assert high - low > 0.01
    exact = evaluate_scaling(made()).metrics
    assert exact["parameters_ratio_from_ours_high"] - exact["parameters_ratio_from_ours_low"] < 1e-6


def test_a_match_beyond_all_runs_is_called_extrapolated():
    apart = [*made((1e-3, 1e-3))]
    metrics = evaluate_scaling(apart).metrics
    assert "parameters_ratio_from_ours" not in metrics
    assert metrics["parameters_ratio_from_ours_extrapolated"] == pytest.approx(1e-3, rel=1e-3)


def test_a_loss_that_the_other_never_reaches_has_no_ratio():
    runs = [Run("softmax", s, 1e10, 3.0 + 100 * s**-0.3) for s in SIZES]
    runs += [Run("diff", s, 1e10, 1.0 + 100 * s**-0.3) for s in SIZES]
    result = evaluate_scaling(runs)
    assert "parameters_ratio_from_ours" not in result.metrics
    assert all(r["ratio"] is None for r in result.rows if r.get("measured") == "diff")
    json.dumps(result.to_dict(), allow_nan=False)


def test_only_what_the_table_allows_is_fitted():
    result = evaluate_scaling([one for one in made() if one.tokens == 1e10])
    assert "parameters_ratio_from_ours" in result.metrics
    assert not any(name.startswith("tokens") for name in result.metrics)
    assert "Loss against tokens: both models need runs at 3 values or more" in result.provenance["notes"][0]


@pytest.mark.slow
def test_runs_of_other_tokens_stay_out_of_the_parameter_fit():
    odd = [Run(name, 5e9, 1e12, 0.5) for name in ("diff", "softmax")]
    assert evaluate_scaling([*made(), *odd]).metrics == evaluate_scaling(made()).metrics


@pytest.mark.slow
def test_a_rise_is_noted():
    runs = made()
    place = next(i for i, one in enumerate(runs) if one.model == "diff" and one.parameters == 2.8e9)
    runs[place] = Run("diff", 2.8e9, 1e10, 2.9)
    notes = evaluate_scaling(runs).provenance["notes"]
    assert any(note.startswith("The loss of diff rises at 1 of 4 steps in parameters") for note in notes)


@pytest.mark.parametrize(
    ("runs", "options", "message"),
    [
        ([], {}, "no run of 'diff'; the table has: none"),
        (made(), {"ours": "mamba"}, "no run of 'mamba'; the table has: diff, softmax"),
        (made(sizes=SIZES[:2])[:2] + made(sizes=SIZES[:2])[7:9], {}, "nothing to fit.*there are 2"),
        (made(), {"form": "line"}, "form is 'line'"),
        ([Run(m, s, 1e10, 2 + s / 1e9) for m in ("diff", "softmax") for s in SIZES], {}, "parameters: the loss does"),
    ],
)
def test_what_cannot_be_fitted_is_said(runs, options, message):
    with pytest.raises(ValueError, match=message):
        evaluate_scaling(runs, Settings(**options))


def test_tables_of_all_kinds_are_read(tmp_path):
    header = "\ufeffModel,note,Parameters,tokens,loss"
    lines = [header, "Transformer,x,6.8B,10_000_000,2.5", "", "DIFF,y,13.1b,1e7,2.25"]
    (tmp_path / "a.csv").write_text("\n".join(lines))
    (tmp_path / "b.json").write_text(json.dumps([{"model": "wide", "parameters": 830e6, "tokens": "160B", "loss": 3}]))
    runs = read_runs([tmp_path / "a.csv", tmp_path / "b.json"])
    assert runs == [Run("softmax", 6.8e9, 1e7, 2.5), Run("diff", 13.1e9, 1e7, 2.25), Run("wide", 8.3e8, 1.6e11, 3.0)]


def comparison(parameters: int, losses: tuple[float, float]) -> dict:
    curve = {"validation_step": [0, 10, 20], "validation_loss": [9.0, 5.0, 4.0]}
    return {
        "schema": 1,
        "pair": {side: {"parameters": parameters + (side == "diff")} for side in ("diff", "softmax")},
        "train": {"batch_size": 4, "sequence_length": 8, "tokens": 640, "config": {"optim": {"warmup_steps": 5}}},
        "evals": [
            {"eval": "associative_recall", "attention": side, "metrics": {"validation": loss}}
            for side, loss in zip(("diff", "softmax"), losses, strict=True)
        ],
        "curves": [{"attention": side, **curve} for side in ("diff", "softmax")],
    }


def test_a_folder_of_comparisons_is_a_table(tmp_path):
    for size, losses in ((1000, (3.0, 3.1)), (2000, (2.5, 2.7))):
        (tmp_path / str(size)).mkdir()
        (tmp_path / str(size) / "results.json").write_text(json.dumps(comparison(size, losses)))
    runs = read_runs([tmp_path])
    finals = [(r.model, r.parameters, r.tokens, r.loss) for r in runs if r.part == "final"]
    assert finals == [
        ("diff", 1001, 640, 3.0), ("softmax", 1000, 640, 3.1), ("diff", 2001, 640, 2.5), ("softmax", 2000, 640, 2.7)
    ]  # fmt: skip
    curves = [(r.tokens, r.loss) for r in runs if r.part == "curve" and r.parameters == 1001]
    assert curves == [(320, 5.0), (640, 4.0)]


def along(shares: Sequence[float]) -> list[Run]:
    """Curves of several trainings; in each DIFF needs this share of the Transformer's tokens."""
    steps = [1e6 * k for k in range(1, 12)]
    return [
        Run(model, 1e6, step, 2 + 50 * (step / part) ** -0.3, "curve", f"seed {seed}")
        for seed, share in enumerate(shares)
        for model, part in (("softmax", 1.0), ("diff", share))
        for step in steps
    ]


def test_points_of_one_curve_give_no_interval():
    metrics = evaluate_scaling(along([0.7])).metrics
    assert metrics["tokens_ratio_from_reference"] == pytest.approx(0.7, rel=0.01)
    assert not [name for name in metrics if name.endswith(("_low", "_high"))]


def test_the_interval_along_curves_is_over_trainings():
    shares = [0.6, 0.7, 0.8, 0.75]
    metrics = evaluate_scaling(along(shares)).metrics
    expected = over_seeds(shares)
    low, high = (metrics[f"tokens_ratio_from_reference_{end}"] for end in ("low", "high"))
    assert (low, high) == pytest.approx((expected.low, expected.high), rel=0.01)
    assert low < metrics["tokens_ratio_from_reference"] < high


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.csv", "model,parameters,loss\n", "has no tokens; needed: model, parameters, tokens, loss"),
        ("t.csv", "model,parameters,tokens,loss\na,1,1,zero\n", r"line 2: loss is 'zero'; give a positive number"),
        ("t.csv", "model,parameters,tokens,loss\na,1,-5,2\n", "line 2: tokens is '-5'"),
        ("t.csv", "model,parameters,tokens,loss\n ,1,5,2\n", "line 2: model is empty"),
        ("t.json", "{}", "is not a table of runs; give a list of objects"),
        ("t.json", "[1", "is not JSON"),
        ("t.json", '{"schema": 1, "pair": {}}', "does not hold the results of a comparison: KeyError"),
    ],
)
def test_bad_tables_are_said_to_be_bad(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        read_runs([tmp_path / name])


def test_a_folder_of_a_study_is_a_table(tmp_path):
    """A study gives its finished models by side; its sweep has other lengths and is left out, as is what diverged."""
    model = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 256}
    config = {"model": model, "data": {"length": 100}, "train": {"batch_size": 1}}
    curves = {"validation": {"step": [0, 50, 100], "loss": [6.0, 4.0, 3.0]}}
    for where, side, seed in (("novels", "softmax", 0), ("novels", "diff_norm1", 1), ("sweep/lr0.001", "diff", 100)):
        record = Record(where, side, seed, config, curves=curves)
        record.save(tmp_path / where / f"{side}-seed{seed}" / "record.json")
    lost = Record(
        "novels", "diff", 0, config, curves={"validation": {"step": [], "loss": []}}, diverged="step 9: loss 55"
    )
    lost.save(tmp_path / "novels" / "diff-seed0" / "record.json")
    runs = read_runs([tmp_path])
    size = DiffTransformerForCausalLM(DiffTransformerConfig(**model)).num_parameters()
    assert Run("softmax", size, 10_000, 3.0, pair=f"{tmp_path / 'novels'} 0") in runs
    assert Run("diff_norm1", size, 5_000, 4.0, "curve", f"{tmp_path / 'novels'} 1") in runs
    assert len(runs) == 6
    (tmp_path / "novels" / "softmax-seed0" / "record.json").write_text("{}")
    with pytest.raises(ValueError, match="does not hold the record of a study's run"):
        read_runs([tmp_path])


def test_a_comparison_that_is_not_finished_is_a_table_of_its_models_alone(tmp_path):
    """Not of the small models of recall."""
    (tmp_path / "compare.json").write_text('{"config": {"name": "demo"}}')
    model = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 256}
    config = {"model": model, "data": {"length": 100}, "train": {"batch_size": 1}}
    for place, loss in (("members", 3.0), ("recall", 0.1)):
        curves = {"validation": {"step": [0, 100], "loss": [6.0, loss]}}
        Record("demo", "diff", 0, config, curves=curves).save(tmp_path / place / "diff-seed0" / "record.json")
    assert {run.loss for run in read_runs([tmp_path])} == {3.0}


def test_missing_tables(tmp_path):
    with pytest.raises(UserError, match="no table of runs at"):
        read_runs([tmp_path / "no.csv"])
    with pytest.raises(ValueError, match=r"holds no results\.json"):
        read_runs([tmp_path])
    with pytest.raises(ValueError, match="needs a table of runs: --set runs"):
        run(None, Settings(), Samples())


def test_quick_says_that_its_runs_are_made_up():
    result = run(None, Settings(**QUICK), Samples())
    assert result.metrics["parameters_ratio_from_ours"] == pytest.approx(0.622)
    assert result.metrics["tokens_ratio_from_reference"] == pytest.approx(0.637)
    assert result.provenance["synthetic"] is True
    assert result.model == "synthetic"


def test_an_interrupted_run_goes_on(tmp_path):
    class Stop(Exception):
        pass

    def stop(part, done, total):
        if part == "tokens matches" and done:
            raise Stop

    journal = tmp_path / "journal"
    with pytest.raises(Stop):
        evaluate_scaling(made(), samples=Samples(journal, bar=stop))
    resumed = evaluate_scaling(made(), samples=Samples(journal, resume=True))
    whole = evaluate_scaling(made())
    assert (resumed.metrics, resumed.rows) == (whole.metrics, whole.rows)


def test_a_table_that_is_not_there_leaves_nothing_behind(tmp_path):
    from diff_transformer.lab.evaluate import run_eval

    with pytest.raises(UserError, match="no table of runs"):
        run_eval("scaling", None, Settings(runs=str(tmp_path / "nofile.csv")), tmp_path / "out" / "scaling.json")
    assert list(tmp_path.iterdir()) == []
