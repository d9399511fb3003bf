"""Metrics for other services: the run's own files stay whole, whatever happens to the service."""

import json
import logging
from importlib.util import find_spec

import pytest

from diff_transformer.lab.recipes import recipe
from diff_transformer.train import loggers
from diff_transformer.train.config import override
from diff_transformer.train.loop import train
from diff_transformer.train.metrics import read_metrics

INSTALLED = find_spec("wandb") is not None and find_spec("mlflow") is not None


class Service:
    """A logger as Lightning has them, that loses its connection at step ``fails_at``."""

    version = "run-7"

    def __init__(self, told: dict, fails_at: int | None):
        self.told, self.fails_at, self.experiment = told, fails_at, self

    def log_hyperparams(self, settings):
        self.told["settings"] = settings

    def log_metrics(self, values, step):
        if step == self.fails_at:
            raise ConnectionError("nobody answers")
        self.told.setdefault("steps", {})[step] = values

    def finalize(self, status):
        self.told["status"] = status

    def finish(self):
        self.told["finished"] = True


@pytest.fixture
def service(monkeypatch):
    """``service(fails_at)`` stands in for Weights & Biases, and returns what it is told."""
    monkeypatch.setattr(loggers, "require_extra", lambda *_: None)

    def stand_in(fails_at=None):
        told = {"runs": []}
        monkeypatch.setitem(
            loggers._MAKE, "wandb", lambda folder, run: (told["runs"].append(run), Service(told, fails_at))[1]
        )
        return told

    return stand_in


@pytest.fixture
def config(texts):
    sets = [f"data.corpus={texts}", "data.max_bytes=null", "model.vocab_size=384", "train.steps=4",
            "train.log_every=1", "train.checkpoint_every=2", 'train.loggers=["wandb"]']  # fmt: skip
    return override(recipe("debug"), sets)


def test_a_service_gets_every_scalar_and_goes_on_with_its_run(config, tmp_path, service):
    told = service()
    train(config, tmp_path / "run")
    lines = {line["step"]: line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in line}
    assert {step for step in told["steps"] if step} == set(lines)
    assert told["steps"][3]["loss/train"] == lines[3]["loss"]
    assert told["settings"]["train"]["steps"] == 4
    assert (told["status"], told["finished"], told["runs"]) == ("success", True, [None])
    assert json.loads((tmp_path / "run" / "loggers.json").read_text()) == {"wandb": "run-7"}
    loggers.Loggers(["wandb"], tmp_path / "run", {})
    assert told["runs"] == [None, "run-7"]


def test_a_service_that_fails_is_left_out_and_the_run_goes_on(config, tmp_path, service, caplog):
    told = service(fails_at=2)
    with caplog.at_level(logging.WARNING, logger="diff_transformer"):
        train(config, tmp_path / "run")
    assert max(told["steps"]) == 1
    assert [line["step"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in line] == [1, 2, 3, 4]
    said = [record.message for record in caplog.records if "wandb" in record.message]
    assert said == ["wandb takes no more metrics of this run (ConnectionError: nobody answers); metrics.jsonl has all"]


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("wandbb", ValueError, "no logger 'wandbb'"),
        ("mlflow", RuntimeError, r"pip install 'diff-transformer\[mlflow\]'"),
    ],
)
def test_what_cannot_be_is_refused_before_training(config, name, error, words, monkeypatch):
    monkeypatch.setitem(loggers.PACKAGES, "mlflow", "no_such_package")
    config.train.loggers = (name,)
    with pytest.raises(error, match=words):
        config.validate()


@pytest.mark.skipif(not INSTALLED, reason="needs the extras wandb and mlflow, which the test environment leaves out")
def test_the_real_services_without_a_network(config, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path / 'mlruns'}")
    config.train.loggers = ("wandb", "mlflow")
    train(config, tmp_path / "run")
    ids = json.loads((tmp_path / "run" / "loggers.json").read_text())
    assert list((tmp_path / "run" / "wandb").glob(f"offline-run-*-{ids['wandb']}/*.wandb"))
    (file,) = (tmp_path / "mlruns").glob(f"*/{ids['mlflow']}/metrics/loss/train")
    losses = [line["loss"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in line]
    assert [float(line.split()[1]) for line in file.read_text().splitlines()] == pytest.approx(losses)
