"""The recall study: what its confirmation repeats, one run from end to end, and the numbers of its summary."""

import math
from dataclasses import replace

import pytest
from recall.plan import CENTRE, CHOSEN, SIDES, setting, shortfall, stages
from recall_confirmation import plan as confirmation

from diff_transformer import DiffTransformerConfig, lambda_init
from diff_transformer.lab.recipes.recall import MATCHED, OWN_SCALE
from diff_transformer.lab.record import Record, load_records
from diff_transformer.lab.rows import Rows, row
from diff_transformer.lab.spec import RECALL
from diff_transformer.lab.worker import run
from diff_transformer.train.training_data import load_training_data

RATES = {side: 1e-3 * (i + 1) for i, side in enumerate(SIDES)}


@pytest.fixture(scope="module")
def runs():
    return [spec for stage in stages("python") for spec in stage.specs(RATES) if not spec.setting.startswith("sweep/")]


def test_the_confirmation_repeats_recorded_settings_on_fresh_seeds(runs):
    """Only the seed differs from the study's own run; each seed has its 12 runs before the next begins."""
    fresh = [spec for stage in confirmation.stages("python") for spec in stage.specs({})]
    per_seed = len(confirmation.INFORMATIVE) * len(confirmation.CONFIRMED)
    assert [spec.seed for spec in fresh] == [seed for seed in range(200, 230) for _ in range(per_seed)]
    known = {(spec.setting.split("_lr")[0], spec.side): spec.config for spec in runs}
    for spec in fresh:
        there, here = known[spec.setting, spec.side].to_dict(), spec.config.to_dict()
        assert here["train"].pop("seed") == spec.seed != there["train"].pop("seed")
        assert here["optim"].pop("lr") == CHOSEN[spec.side]
        there["optim"].pop("lr")
        assert here == there


def test_the_matched_head_norm_is_what_the_untrained_pair_has():
    from diff_transformer.model.head_scale import with_matched_scale

    config = setting(CENTRE)
    rows = load_training_data(config).validation
    matched = with_matched_scale(DiffTransformerConfig(**config.model), rows, draws=1)
    assert matched.head_norm_init == pytest.approx(MATCHED, abs=0.02)
    starts = [1 - lambda_init(layer) for layer in range(2)]
    assert [a * b for a, b in zip(MATCHED, starts, strict=True)] == pytest.approx(OWN_SCALE, abs=0.02)


def test_a_run_from_end_to_end(runs, tmp_path):
    """Accuracy by step and the measurements are in the record; the loss is that of the answers, ln 258 at first."""
    spec = next(spec for spec in runs if spec.side == "diff_norm1" and spec.setting == "p4_n0")
    train = replace(spec.config.train, steps=4, validate_every=2, batch_size=2, validation_rows=4)
    replace(spec, config=replace(spec.config, train=train)).save(tmp_path)
    record = run(tmp_path)
    assert [found.metrics for found in load_records(tmp_path)] == [record.metrics]
    curve = record.rows["recall_curve"]
    assert [*curve["step"]] == [0, 2, 4]
    assert curve["accuracy"].between(0, 1).all()
    assert record.rows["validation"]["loss"].iloc[0] == pytest.approx(math.log(258), abs=0.3)
    assert {"recall", "recall_2x", "recall_4x", "recall_answer", "recall_noise"} <= record.metrics.keys()
    assert record.rows.about(RECALL)["chance"] == 0.25


def test_a_sweep_goes_by_the_final_accuracy_and_then_by_the_mean():
    def scored(*accuracy):
        rows = Rows(row("recall_curve", "diff", example=i, step=i, accuracy=of) for i, of in enumerate(accuracy))
        return shortfall(Record("", "diff", 0, rows))

    assert scored(0.0, 0.2, 0.9) < scored(0.8, 0.85, 0.88)
    assert scored(0.0, 0.8, 0.9) < scored(0.0, 0.7, 0.9)
