"""Our plans run what they ran before they were plans, run by run, and a plan of a user runs by its file.

``plans.json`` was written by the functions that the plans replaced. It has for each study all runs in their order (a
hash of their folders' names), each with its seeds, learning rate, experiments, and how its configuration differs from
that of the first run.
"""

import hashlib
import json
from pathlib import Path

import pytest

from diff_transformer.lab import study as driver
from diff_transformer.lab.record import Record
from diff_transformer.lab.rows import Rows
from diff_transformer.lab.stages import FIGURES, load_stages
from diff_transformer.lab.tidy import rows_of_curves
from diff_transformer.train.config import RunConfig

STUDIES = json.loads((Path(__file__).parent / "plans.json").read_text())


def nested(flat):
    made = {}
    for path, value in flat.items():
        *parents, last = path.split("/")
        place = made
        for name in parents:
            place = place.setdefault(name, {})
        place[last] = value
    return made


@pytest.fixture
def ran(monkeypatch):
    """``ran(stages, out)``: the runs that the pool gets, in order. Each ends at once with a score made of its name."""

    def run(stages, out):
        done, specs = {}, []

        def pool(runs, **_):
            for folder, spec in runs.items():
                if folder not in done:
                    score = int(hashlib.sha256(spec.key.encode()).hexdigest()[:8], 16) / 2**32
                    curves = {"validation": {"step": [1], "loss": [score]}}
                    curves |= {name: {"step": [1], "accuracy": [1 - score]} for name in ("recall", "needles")}
                    rows = Rows(rows_of_curves(curves, *spec.identity))
                    done[folder] = Record(spec.setting, spec.side, spec.seed, rows)
                    specs.append(spec)

        monkeypatch.setattr(driver, "run_pool", pool)
        monkeypatch.setattr(driver, "finished", done.__contains__)
        monkeypatch.setattr(driver, "load_run", lambda folder, *identity: done[folder])
        assert driver.run_study(stages, out) == driver.Progressed(len(specs), len(specs))
        return specs

    return run


def test_every_plan_is_held():
    """But for those that were planned as plans."""
    assert {path.parent.name for path in FIGURES.glob("*/plan.py")} == {*STUDIES, "scale", "gate_norm_subtraction"}


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_is_what_it_was_run_by_run(name, ran, texts, tmp_path):
    known = STUDIES[name]
    specs = ran(load_stages(name, str(texts)), tmp_path / "out")
    assert hashlib.sha256("\n".join(spec.key for spec in specs).encode()).hexdigest() == known["order"]
    for spec in specs:
        first, seeds, rate, form = known["runs"][f"{spec.setting}/{spec.side}"]
        measure, differing = known["forms"][form]
        assert list(spec.measure) == measure
        assert spec.seed in range(first, first + seeds)
        assert spec.may_diverge
        flat = known["base"] | {"optim/lr": rate, "train/seed": spec.seed} | differing
        flat = {path: str(texts) if value == "TEXTS" else value for path, value in flat.items() if value != "-"}
        there, here = RunConfig.from_dict(nested(flat)).to_dict(), spec.config.to_dict()
        assert json.dumps(there, sort_keys=True) == json.dumps(here, sort_keys=True), spec.key
