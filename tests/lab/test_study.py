"""The plan and the driver of a study: finished runs are skipped, interrupted ones continue, failures are reported."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from diff_transformer import DiffTransformerConfig
from diff_transformer.lab.recipes import recipe
from diff_transformer.lab.recipes.desk_study import MATCHED, SIDES, base, desk_study
from diff_transformer.lab.recipes.studies import ladder_study
from diff_transformer.lab.record import Record, load_all
from diff_transformer.lab.spec import RunSpec, Study, seeds
from diff_transformer.lab.study import Progressed, run_study, sweep_scores
from diff_transformer.lab.worker import gradient_metrics, losses_by_source, run
from diff_transformer.model.head_norm_init import matched_head_norm_init
from diff_transformer.train.config import override


def tiny(texts, side, lr, *more):
    settings = [f"data.corpus={texts}", "data.max_bytes=null", "train.steps=4", "train.checkpoint_every=2"]
    settings += ["evaluation.more={}", f"model.attention={side}", f"optim.lr={lr}", *more]
    return override(recipe("debug"), settings)


def study(texts, *more):
    sweep = [
        RunSpec(f"sweep/lr{lr}", side, 0, tiny(texts, side, lr, *more), may_diverge=True)
        for side in ("diff", "softmax")
        for lr in (1e-3, 1e-2)
    ]

    def runs(chosen):
        return [
            cell
            for side in ("softmax", "diff")
            for cell in seeds("main", side, tiny(texts, side, chosen[side], *more), range(1))
        ]

    return Study("tiny", sweep, runs)


def test_each_side_takes_its_own_best_rate(texts):
    plan = study(texts)
    losses = dict(zip([cell.key for cell in plan.sweep], [3.0, 2.0, 4.0, 5.0], strict=True))
    assert plan.choose(losses) == {"diff": 1e-2, "softmax": 1e-3}
    del losses[plan.sweep[2].key]
    with pytest.raises(ValueError, match=r"sweep is not finished: sweep/lr0.001/softmax-seed0"):
        plan.choose(losses)


def test_what_cannot_work_is_said_before_anything_is_written(texts, tmp_path):
    out = tmp_path / "study"
    with pytest.raises(ValueError, match="attention"):
        run_study(study(texts, "model.attention=difff"), out)
    with pytest.raises(ValueError, match="head"):
        run_study(study(texts, "model.num_attention_heads=7"), out)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        run_study(study(texts, "data.corpus=/nowhere"), out)
    assert not out.exists()


def test_a_folder_of_something_else_is_left_alone(texts, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="is not empty and holds no study; choose another folder"):
        run_study(study(texts), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    for name in ("run.lock", "config.json"):  # as a run of train leaves them
        (tmp_path / name).write_text("{}")
    with pytest.raises(FileExistsError, match="is not empty and holds no study; choose another folder"):
        run_study(study(texts), tmp_path)


def test_finished_cells_of_another_configuration_are_refused(texts, tmp_path):
    cell = study(texts).sweep[0]
    folder = tmp_path / cell.key
    folder.mkdir(parents=True)
    cell.config.save(folder / "request.json")  # as an earlier version wrote it
    with pytest.raises(ValueError, match=r"another configuration[^\0]*train.steps: 4 against 5"):
        run_study(study(texts, "train.steps=5"), tmp_path)
    (folder / "request.json").unlink()
    old = {"model": cell.config.model, "lr": 0.5, "seed": 0, "steps": 4, "tokens_per_step": 1, "validation": {}}
    (folder / "result.json").write_text(json.dumps(old))  # as an earlier version wrote it
    with pytest.raises(ValueError, match=r"lr: 0\.5 against 0\.001"):
        run_study(study(texts), tmp_path)


def test_a_rate_at_which_training_diverged_is_not_chosen(texts, tmp_path):
    plan = study(texts)
    for cell, loss in zip(plan.sweep, (3.0, 2.0, 4.0, 5.0), strict=True):
        diverged = "step 3: loss nan" if loss == 2.0 else None
        record = Record(cell.setting, cell.side, 0, curves={"validation": {"loss": [loss]}}, diverged=diverged)
        record.save(tmp_path / cell.key / "record.json")
    assert plan.choose(sweep_scores(plan, tmp_path)) == {"diff": 1e-3, "softmax": 1e-3}


def test_a_sweep_may_be_scored_by_another_number(texts, tmp_path):
    plan = replace(study(texts), score=lambda record: -record.curves["recall"]["accuracy"][-1])
    for cell, accuracy in zip(plan.sweep, (0.3, 0.2, 0.4, 0.5), strict=True):
        record = Record(cell.setting, cell.side, 0, curves={"recall": {"accuracy": [0.9, accuracy]}})
        record.save(tmp_path / cell.key / "record.json")
    assert plan.choose(sweep_scores(plan, tmp_path)) == {"diff": 1e-3, "softmax": 1e-2}


def test_the_study_that_follows_shares_the_folder(texts, tmp_path):
    """It keeps the rates of sides that it does not sweep. Nothing is left to train: the records of both are there."""
    first, keys = study(texts), set()
    then = replace(
        first,
        sweep=[cell for cell in first.sweep if cell.side == "diff"],
        runs=lambda rates: list(seeds("later", "softmax", tiny(texts, "softmax", rates["softmax"]), range(2))),
    )
    for cell in (*first.sweep, *first.runs({"diff": 1e-3, "softmax": 1e-3}), *then.runs({"softmax": 1e-3})):
        config, lr = cell.config.to_dict(), cell.config.optim.lr
        Record(cell.setting, cell.side, cell.seed, config, curves={"validation": {"loss": [lr]}}).save(
            tmp_path / cell.key / "record.json"
        )
        keys.add(cell.key)
    assert run_study(replace(first, then=then), tmp_path) == Progressed(len(keys), len(keys))
    (tmp_path / then.runs({"softmax": 1e-3})[1].key / "record.json").rename(tmp_path / "elsewhere")
    assert run_study(first, tmp_path) == Progressed(6, 6)
    assert len(keys) == len(replace(first, then=then).keys())


@pytest.mark.slow
def test_a_study_runs_in_pieces_and_does_nothing_twice(texts, tmp_path):
    out = tmp_path / "study"
    first = run_study(study(texts), out, minutes=0.02, jobs=1)
    assert first.finished < 4  # the time was too short for the sweep
    assert first.total == 6
    done = run_study(study(texts), out, jobs=2)
    assert (done.finished, done.total) == (6, 6)
    assert len(sweep_scores(study(texts), out)) == 4
    (record,) = load_all(out / "main/diff-seed0")
    assert record.identity == ("main", "diff", 0)
    assert record.metrics["needle"].keys() >= {"n1_r1", "chance"}
    assert record.steps == 4
    assert len(record.curves["validation"]["loss"]) == 2
    assert len(load_all(out)) == 6
    assert not (out / "sweep/lr0.01/diff-seed0/evals").exists()
    times = {path: path.stat().st_mtime_ns for path in out.rglob("record.json")}
    run_study(study(texts), out, jobs=2)
    assert times == {path: path.stat().st_mtime_ns for path in out.rglob("record.json")}


def test_a_cell_that_fails_is_named_with_its_reason(texts, tmp_path):
    broken = study(texts, "data.tokenizer=nowhere/such")
    with pytest.raises(RuntimeError, match=r"sweep/lr0.001/diff-seed0 failed with exit code 1(.|\n)*nowhere/such"):
        run_study(broken, tmp_path / "study", jobs=1)


def test_the_loss_of_a_source_is_a_mean_since_the_validation_before():
    logged = [
        {"step": 5, "loss_by_source": {"text": 4.0, "needles": 2.0}},
        {"step": 10, "loss_by_source": {"text": 2.0}},
        {"step": 15, "loss_by_source": {"text": 1.0}},
    ]
    assert losses_by_source(logged, [0, 10, 15]) == {"text": [None, 3.0, 1.0], "needles": [None, 2.0, None]}


def test_spikes_are_norms_far_above_those_before():
    assert gradient_metrics([1.0] * 10 + [3.5] + [1.0] * 9)["spikes"] == 1
    assert gradient_metrics([1.0] * 20)["spikes"] == 0
    rising = gradient_metrics([1.05**i for i in range(20)])
    assert rising["spikes"] == 0
    assert rising["largest"] == 1.05**19


def test_the_desk_study_compares_like_with_like():
    plan = desk_study("python")
    cells = plan.runs(dict.fromkeys(SIDES, 1e-3))
    assert len({cell.key for cell in cells}) == len(cells)
    by_setting = {}
    for cell in cells:
        by_setting.setdefault(cell.setting, {}).setdefault(cell.side, []).append(cell)
    assert len(by_setting["novels"]["diff"]) == 5
    assert all(len(members) >= 3 for sides in by_setting.values() for members in sides.values())
    for sides in by_setting.values():
        for side, members in sides.items():
            for cell, twin in zip(members, next(iter(sides.values())), strict=False):
                ours, theirs = cell.config.to_dict(), twin.config.to_dict()
                varied = ("attention", "head_norm", "head_norm_init", "lambda_init", "softmax_head_norm")
                heads = ("num_attention_heads",) if side == "softmax_wide_norm" else ()
                for each in (ours, theirs):
                    each["optim"].pop("lr")
                    for name in (*varied, *heads):
                        each["model"].pop(name, None)
                assert ours == theirs, (side, cell.key)
    assert Path(cells[0].key).parts == ("novels", "softmax-seed0")


def test_the_desk_study_s_learning_rates():
    chosen = {side: 1e-3 * (i + 1) for i, side in enumerate(SIDES)}
    rates = {(cell.setting, cell.side): cell.config.optim.lr for cell in desk_study("python").runs(chosen)}
    for (setting, side), rate in rates.items():
        own = setting == "novels" and side in SIDES
        expected = chosen[side] if own else chosen["diff" if side == "softmax_diff_rate" else "softmax"]
        assert rate == expected, (setting, side)


def test_the_ladder_has_four_sizes_with_equal_tokens():
    cells = ladder_study("python").runs({})
    sizes = {cell.config.model["hidden_size"] for cell in cells}
    assert len(sizes) == 4
    assert {cell.side for cell in cells} == {"softmax", "diff"}
    configs = [cell.config for cell in cells]
    assert len({config.train.steps * config.train.batch_size * config.data.length for config in configs}) == 1


def test_the_matched_head_norm_is_what_the_untrained_pair_has():
    model = DiffTransformerConfig(**{**base("python").model, "attention": "diff"})
    assert matched_head_norm_init(model) == pytest.approx(MATCHED, abs=0.01)


@pytest.mark.parametrize(
    ("measured", "step", "logged"), [(False, 6, 7), (True, 0, 0)], ids=["a sweep's", "a measured one, at once"]
)
def test_a_run_that_diverges_is_a_result(texts, tmp_path, monkeypatch, measured, step, logged):
    from diff_transformer.train import loop

    every = 1 if logged else 5
    config = tiny(texts, "diff", 1e-3, f"train.log_every={every}", "train.steps=8", 'data.mixture={"text": 1.0}')
    (spec,) = seeds("main", "diff", config, range(1), measured=measured)
    spec.save(tmp_path)
    seen = loop.learning_rate
    monkeypatch.setattr(loop, "learning_rate", lambda at, *more: float("nan") if at == step else seen(at, *more))
    record = run(tmp_path)
    assert load_all(tmp_path) == [record]
    assert record.diverged.startswith(f"step {step + 2}: loss nan")
    assert record.metrics["gradients"]["logged"] == logged
    assert record.metrics.keys() == {"gradients"}
