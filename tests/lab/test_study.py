"""The plan and the driver of a study: finished runs are skipped, interrupted ones continue, failures are reported."""

from pathlib import Path

import pytest

from diff_transformer.errors import UserError
from diff_transformer.lab.recipes import recipe
from diff_transformer.lab.record import load_records
from diff_transformer.lab.rows import FILE, row, write_rows
from diff_transformer.lab.spec import RunSpec
from diff_transformer.lab.stages import SWEPT, Stage, load_stages
from diff_transformer.lab.study import Progressed, best_rates, run_study
from diff_transformer.lab.worker import gradient_metrics, losses_by_source, run
from diff_transformer.train.config import override

EXAMPLE = Path(__file__).parents[2] / "examples" / "my_plan.py"
PAIR = {side: {"attention": side} for side in ("diff", "softmax")}


def tiny(texts, *more):
    settings = [f"data.corpus={texts}", "data.max_bytes=null", "train.steps=4", "train.checkpoint_every=2"]
    return override(recipe("debug"), [*settings, "evaluation.more={}", *more])


def sweep(texts, *more, score=lambda record: record.metrics["validation_loss"]):
    return Stage({"": tiny(texts, *more)}, PAIR, (0,), (1e-3, 1e-2), "sweep/lr{rate:g}", (), score)


def study(texts, *more):
    return [sweep(texts, *more), Stage({"main": tiny(texts, *more)}, PAIR, range(1), SWEPT)]


def keep(out, specs, *finals, name="validation", key="loss", diverged=()):
    """The rows of finished runs, each with the last value of its curve."""
    for spec, final in zip(specs, finals, strict=True):
        facts = {"config": spec.config.to_dict()} | ({"diverged": "step 3: loss nan"} if final in diverged else {})
        points = ((0, 0.9), (4, final))
        rows = [row(name, *spec.identity, example=step, step=step, **{key: value}) for step, value in points]
        rows += [row("about", *spec.identity, of="run", example=k, key=k, value=value) for k, value in facts.items()]
        write_rows(out / spec.key / FILE, rows)


def test_each_side_takes_its_own_best_rate(texts, tmp_path):
    stage = sweep(texts)
    keep(tmp_path, stage.specs({}), 3.0, 2.0, 4.0, 5.0)
    assert best_rates(stage, {}, tmp_path) == {"diff": 1e-2, "softmax": 1e-3}


def test_rates_of_a_stage(texts):
    def rates(of, swept, **more):
        return [(s.setting, s.config.optim.lr) for s in Stage({"a": tiny(texts)}, PAIR, (0,), of, **more).specs(swept)]

    swept = {"diff": 2e-3, "softmax": 4e-3}
    assert rates(None, {}) == [("a", 3e-3)] * 2
    assert rates(SWEPT, swept) == [("a", 2e-3), ("a", 4e-3)]
    assert rates("softmax", swept) == [("a", 4e-3)] * 2
    assert rates({"diff": 1e-3, "softmax": (1e-3, 5e-3)}, {}, folder="{setting}_lr{rate:g}") == [
        ("a_lr0.001", 1e-3), ("a_lr0.001", 1e-3), ("a_lr0.005", 5e-3),
    ]  # fmt: skip


def test_a_side_may_be_a_variant_of_equal_cost(texts):
    (spec,) = Stage({"a": tiny(texts)}, {"mine": {"variant": "softmax_norm", "head_norm_init": 0.3}}, (7,)).specs({})
    fields = {"attention": "softmax", "softmax_head_norm": True, "head_norm_init": 0.3}
    assert fields.items() <= spec.config.model.items()
    assert (spec.key, spec.config.train.seed) == ("a/mine-seed7", 7)


def test_a_side_may_go_on_from_a_model_and_change_other_settings(texts):
    start = {"train.initial_model": "runs/start", "train.weights": "attention"}
    (spec,) = Stage({"a": override(tiny(texts), ["model={}"])}, {"mine": start}, (7,)).specs({})
    train = spec.config.train
    assert (train.initial_model, train.weights, train.seed, spec.config.model) == ("runs/start", "attention", 7, {})
    with pytest.raises(UserError, match="models that are compared start from random weights"):
        Stage({"a": tiny(texts, "train.initial_model=runs/start")}, PAIR, (7,)).specs({})


def test_seeds_may_come_from_a_generator(texts):
    stage = Stage({"a": tiny(texts)}, {"diff": PAIR["diff"]}, (seed for seed in (3, 4)))
    assert [spec.seed for spec in stage.specs({})] == [spec.seed for spec in stage.specs({})] == [3, 4]


def test_a_plan_of_a_user_is_named_by_its_file(texts, tmp_path):
    sweep, main = load_stages(str(EXAMPLE), str(texts))
    keep(tmp_path, sweep.specs({}), *[3.0, 2.0, 4.0] * 3)
    assert best_rates(sweep, {}, tmp_path) == {"softmax": 2e-3, "diff": 2e-3, "control": 2e-3}
    specs = main.specs({"softmax": 1e-3, "diff": 2e-3, "control": 4e-3})
    assert [spec.key for spec in specs][:4] == [
        "width64/softmax-seed0", "width64/diff-seed0", "width64/control-seed0", "width128/softmax-seed0",
    ]  # fmt: skip
    assert specs[0].config.data.corpus == str(texts)
    assert specs[5].config.optim.lr == 4e-3
    path = tmp_path / "my_plan.py"
    path.write_text("")
    with pytest.raises(ValueError, match=r"my_plan.py is no plan; give it stages\(corpus\)"):
        load_stages(str(path))
    path.write_text("def stages(corpus):\n    return []\n")
    with pytest.raises(ValueError, match="is an empty plan"):
        load_stages(str(path))


def test_short_names_are_those_of_a_clone(monkeypatch, tmp_path):
    with pytest.raises(ValueError, match=r"no study 'recal' .*'recall'\?\); there are: ablation, .*desk, .*, or"):
        load_stages("recal")
    monkeypatch.setattr("diff_transformer.lab.stages.FIGURES", tmp_path)  # as an installed package has none
    with pytest.raises(ValueError, match="no study 'recall'; there are: ablation, or the Python file of a plan"):
        load_stages("recall")


def test_what_cannot_work_is_said_before_anything_is_written(texts, tmp_path):
    out = tmp_path / "study"
    with pytest.raises(ValueError, match="attention"):
        run_study([Stage({"a": tiny(texts)}, {"mine": {"attention": "difff"}}, (0,))], out)
    with pytest.raises(ValueError, match="head"):
        run_study(study(texts, "model.num_attention_heads=7"), out)
    with pytest.raises(UserError, match="nowhere"):
        run_study(study(texts, "data.corpus=/nowhere"), out)
    with pytest.raises(
        ValueError, match=r"two runs of the plan have the folder a/diff-seed0; put \{setting\} or \{rate"
    ):
        run_study([Stage({"a": tiny(texts)}, PAIR, (0,), (1e-3, 1e-2))], out)
    with pytest.raises(ValueError, match="two runs of the plan have the folder sweep/"):
        run_study([*study(texts), sweep(texts, "data.length=64")], out)
    with pytest.raises(ValueError, match=r"a sweep chooses the rate; leave \{rate\} out"):
        Stage({"a": tiny(texts)}, PAIR, (0,), SWEPT, "{setting}-lr{rate:g}")
    with pytest.raises(UserError, match=r"no experiment of `measure` 'sonnets'; there are: needle, allocation, .*more"):
        run_study([*study(texts), Stage({"a": tiny(texts)}, PAIR, (0,), measure=("sonnets",))], out)
    other = Stage({"a": tiny(texts)}, {"mine": PAIR["diff"]}, (0,), SWEPT)
    with pytest.raises(UserError, match="mine takes the rate of a sweep of mine, and no stage before is one"):
        run_study([sweep(texts), other], out)
    for settings, sides, message in (
        ({"a": tiny(texts)}, ["diff"], "sides of a Stage is of type list; give a dictionary, such as"),
        ({"a": tiny(texts)}, {"diff": "diff"}, "side 'diff' of a Stage is of type str"),
        (tiny(texts), PAIR, "settings of a Stage is of type RunConfig"),
    ):
        with pytest.raises(UserError, match=message):
            Stage(settings, sides, (0,))
    assert not out.exists()


def test_a_folder_of_something_else_is_left_alone(texts, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="is not empty and holds no study; choose another folder"):
        run_study(study(texts), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    for name in ("run.lock", "config.json"):  # as a run of train leaves them
        (tmp_path / name).write_text("{}")
    with pytest.raises(UserError, match="is not empty and holds no study; choose another folder"):
        run_study(study(texts), tmp_path)


def test_a_rate_at_which_training_diverged_is_not_chosen(texts, tmp_path):
    stage = sweep(texts)
    keep(tmp_path, stage.specs({}), 3.0, 2.0, 4.0, 5.0, diverged=(2.0,))
    assert best_rates(stage, {}, tmp_path) == {"diff": 1e-3, "softmax": 1e-3}


def test_a_sweep_may_be_scored_by_another_number(texts, tmp_path):
    stage = sweep(texts, score=lambda record: -record.rows["recall_curve"]["accuracy"].iloc[-1])
    keep(tmp_path, stage.specs({}), 0.3, 0.2, 0.4, 0.5, name="recall_curve", key="accuracy")
    assert best_rates(stage, {}, tmp_path) == {"diff": 1e-3, "softmax": 1e-2}


def test_later_stages_share_the_folder(texts, tmp_path):
    """They keep the rates of sides that a later sweep leaves out. Nothing is left to train: all records are there."""
    first, main = study(texts)
    again = Stage(first.settings, {"diff": PAIR["diff"]}, (0,), (1e-3, 1e-2), first.folder, (), first.score)
    later = Stage({"later": tiny(texts)}, {"softmax": PAIR["softmax"]}, range(2), SWEPT)
    rates, stages = {"diff": 1e-3, "softmax": 1e-3}, [first, main, again, later]
    specs = {spec.key: spec for stage in stages for spec in stage.specs(rates)}
    keep(tmp_path, specs.values(), *(spec.config.optim.lr for spec in specs.values()))
    assert run_study(stages, tmp_path) == Progressed(len(specs), len(specs)) == Progressed(8, 8)
    (tmp_path / "later" / "softmax-seed1" / FILE).rename(tmp_path / "elsewhere")
    assert run_study(stages[:2], tmp_path) == Progressed(6, 6)


def test_a_cell_that_fails_is_named_with_its_reason(texts, tmp_path):
    broken = study(texts, "data.tokenizer=nowhere/such")
    with pytest.raises(UserError, match=r"sweep/lr0.001/diff-seed0 failed with exit code 1(.|\n)*nowhere/such"):
        run_study(broken, tmp_path / "study", jobs=1)


def test_the_loss_of_a_source_is_a_mean_since_the_validation_before():
    logged = [
        {"step": 5, "loss_by_source": {"text": 4.0, "needles": 2.0}},
        {"step": 10, "loss_by_source": {"text": 2.0}},
        {"step": 15, "loss_by_source": {"text": 1.0}},
    ]
    assert losses_by_source(logged, [0, 10, 15]) == {"text": {10: 3.0, 15: 1.0}, "needles": {10: 2.0}}


def test_spikes_are_norms_far_above_those_before():
    assert gradient_metrics([1.0] * 10 + [3.5] + [1.0] * 9)["spikes"] == 1
    assert gradient_metrics([1.0] * 20)["spikes"] == 0
    rising = gradient_metrics([1.05**i for i in range(20)])
    assert rising["spikes"] == 0
    assert rising["largest"] == 1.05**19


@pytest.mark.parametrize(
    ("measured", "step", "logged"), [(False, 6, 7), (True, 0, 0)], ids=["a sweep's", "a measured one, at once"]
)
def test_a_run_that_diverges_is_a_result(texts, tmp_path, monkeypatch, measured, step, logged):
    from diff_transformer.train import loop

    every = 1 if logged else 5
    config = tiny(texts, "optim.lr=1e-3", f"train.log_every={every}", "train.steps=8", 'data.mixture={"text": 1.0}')
    (spec,) = Stage({"main": config}, {"diff": PAIR["diff"]}, (0,), measure=None if measured else ()).specs({})
    spec.save(tmp_path)
    seen = loop.learning_rate
    monkeypatch.setattr(loop, "learning_rate", lambda at, *more: float("nan") if at == step else seen(at, *more))
    run(tmp_path)
    (record,) = load_records(tmp_path)
    assert record.diverged.startswith(f"step {step + 2}: loss nan")
    assert len(record.rows["training"]) == logged
    assert ("gradient_median" in record.metrics) == bool(logged)


def test_a_run_whose_prompts_are_too_long_for_the_page_is_whole(texts, tmp_path):
    config = tiny(texts, "train.steps=1", "data.length=40", 'data.mixture={"text": 1.0}')
    RunSpec("main", "diff", 0, config, ("explorer",)).save(tmp_path)
    run(tmp_path)
    assert {"validation", "model"} <= {*load_records(tmp_path)[0].rows.experiments}


def test_the_ablation_is_a_study_of_seven_rows(texts):
    (stage,) = load_stages("ablation", str(texts))
    specs = stage.specs({})
    assert len(specs) == 7 * 3
    assert {spec.side for spec in specs} >= {"softmax", "diff", "diff_no_norm", "softmax_wide_norm"}
    wide = next(spec.config.model for spec in specs if spec.side == "softmax_wide")
    plain = next(spec.config.model for spec in specs if spec.side == "softmax")
    assert wide["num_attention_heads"] * 2 == plain["num_attention_heads"]
    assert {spec.measure for spec in specs} == {("associative_recall",)}
