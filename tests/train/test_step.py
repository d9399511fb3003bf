"""In which passes a process takes its rows, without processes: a fabric that notes what it is asked for."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy

from diff_transformer import DiffTransformerForCausalLM
from diff_transformer.lab.recipes import recipe
from diff_transformer.model.presets import preset
from diff_transformer.train import step
from diff_transformer.train.config import override
from diff_transformer.train.loss import Objective
from diff_transformer.train.step import Stepper, make_optimizer
from diff_transformer.train.training_data import Rows, Share


class Noting(Objective):
    rows: list[int]

    def forward(self, inputs: dict, labels, weights):
        self.rows.append(len(labels))
        return super().forward(inputs, labels, weights)


def stepper(monkeypatch, settings: list[str], kind: type, processes: int) -> tuple[Stepper, list[bool]]:
    """The first of ``processes``, and where it will note whether an exchange of gradients was put off."""
    put_off: list[bool] = []

    def no_backward_sync(model, *, enabled: bool):
        put_off.append(enabled)
        return nullcontext()

    def clip(model, optimizer, **options):
        return torch.nn.utils.clip_grad_norm_(model.parameters(), options["max_norm"])

    fabric: Any = SimpleNamespace(
        strategy=kind.__new__(kind), device=torch.device("cpu"), world_size=1, to_device=lambda x: x,
        backward=lambda loss: loss.backward(), no_backward_sync=no_backward_sync, clip_gradients=clip,
    )  # fmt: skip
    monkeypatch.setattr(step, "share_of", lambda fabric: Share(0, processes))
    torch.manual_seed(0)
    plain = DiffTransformerForCausalLM(preset("debug"))
    objective = Noting(plain)
    objective.rows = []
    config = override(recipe("debug"), settings).validate()
    return Stepper(fabric, objective, make_optimizer(plain, config.optim), plain, config, 0), put_off


def rows(count: int) -> Rows:
    ids = torch.randint(1, 500, (count, 12), generator=torch.Generator().manual_seed(0))
    return Rows(ids, ids, torch.arange(count) % 3)


@pytest.mark.parametrize(
    ("settings", "processes", "expected"),
    [
        ([], 1, [8]),
        (["train.micro_batch_size=1"], 1, [1] * 8),
        (["train.micro_batch_size=1"], 4, [1, 1]),
        (["train.micro_batch_size=3"], 1, [3, 3, 2]),
        (["train.micro_batch_size=3"], 2, [2, 2]),
        (["train.micro_batch_size=100"], 2, [4]),
        (["train.accumulate=4"], 2, [1] * 4),
    ],
)
def test_passes_have_the_rows_that_the_configuration_says(monkeypatch, settings, processes, expected):
    made, _ = stepper(monkeypatch, settings, DDPStrategy, processes)
    made.step(rows(8 // processes), 1e-3, lambda: False)
    assert made.model.rows == expected
    assert max(expected) == made.config.train.rows_of_a_pass(processes)


def test_passes_add_up_to_the_batch(monkeypatch):
    outcomes = []
    for settings in ([], ["train.micro_batch_size=3"], ["train.micro_batch_size=1"]):
        made, _ = stepper(monkeypatch, settings, DDPStrategy, 1)
        outcomes.append(made.step(rows(8), 1e-3, lambda: False))
    for outcome in outcomes[1:]:
        assert outcome.loss == pytest.approx(outcomes[0].loss, abs=1e-5)
        assert outcome.norm == pytest.approx(outcomes[0].norm, rel=1e-4)
        assert outcome.nats == pytest.approx(outcomes[0].nats, rel=1e-5)
        assert outcome.tokens == outcomes[0].tokens


@pytest.mark.parametrize(
    ("kind", "expected"), [(DDPStrategy, [True, True, False]), (ModelParallelStrategy, [False, False, False])]
)
def test_sharded_gradients_are_exchanged_after_every_pass(monkeypatch, kind, expected):
    """Put off, each process would hold the gradients of the whole model."""
    made, put_off = stepper(monkeypatch, ["train.micro_batch_size=3"], kind, 1)
    made.step(rows(8), 1e-3, lambda: False)
    assert put_off == expected


@pytest.mark.parametrize(("settings", "expected"), [([], [16, 4]), (["train.micro_batch_size=6"], [6, 6, 6, 2])])
def test_validation_takes_no_more_micro_batch_size_than_training(monkeypatch, settings, expected):
    made, _ = stepper(monkeypatch, settings, DDPStrategy, 1)
    made.validation_loss(rows(20).ids)
    assert made.model.rows == expected
