"""In which passes a process takes its rows, without processes: a fabric that notes what it is asked for."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning_fabric.strategies import DDPStrategy, ModelParallelStrategy
from torch.utils._python_dispatch import TorchDispatchMode

from diff_transformer import DiffTransformerForCausalLM
from diff_transformer.lab.recipes import recipe
from diff_transformer.model.presets import preset
from diff_transformer.train import step
from diff_transformer.train.config import OptimConfig, override
from diff_transformer.train.context_parallel import SequencePart
from diff_transformer.train.loss import Objective
from diff_transformer.train.step import Stepper, learning_rate, make_optimizer
from diff_transformer.train.training_data import BatchPart, Rows


class Noting(Objective):
    rows: list[int]

    def forward(self, inputs: dict, targets, weights, dense=None):
        self.rows.append(len(targets))
        return super().forward(inputs, targets, weights, dense)


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
    monkeypatch.setattr(step, "batch_part", lambda fabric, context_parallel: BatchPart(0, processes))
    torch.manual_seed(0)
    plain = DiffTransformerForCausalLM(preset("debug"))
    objective = Noting(plain)
    objective.rows = []
    config = override(recipe("debug"), settings)
    return Stepper(fabric, objective, make_optimizer(plain, config.optim), plain, config, 0, SequencePart()), put_off


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
    ],
)
def test_passes_have_the_rows_that_the_configuration_says(monkeypatch, settings, processes, expected):
    made, _ = stepper(monkeypatch, settings, DDPStrategy, processes)
    made.step(rows(8 // processes), 0, 1e-3, lambda: False)
    assert made.model.rows == expected
    assert max(expected) == made.config.train.rows_of_a_pass(processes)


def test_passes_add_up_to_the_batch(monkeypatch):
    outcomes = []
    for settings in ([], ["train.micro_batch_size=3"], ["train.micro_batch_size=1"]):
        made, _ = stepper(monkeypatch, settings, DDPStrategy, 1)
        outcomes.append(made.step(rows(8), 0, 1e-3, lambda: False))
    for outcome in outcomes[1:]:
        assert outcome.loss == pytest.approx(outcomes[0].loss, abs=1e-5)
        assert outcome.norm == pytest.approx(outcomes[0].norm, rel=1e-4)
        assert outcome.nats == pytest.approx(outcomes[0].nats, rel=1e-5)
        assert outcome.tokens == outcomes[0].tokens


class Reads(TorchDispatchMode):
    """Counts the operators that read a number from the device."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        read = func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        self.count += read or (func == torch.ops.aten.index.Tensor and args[1][0].dtype == torch.bool)
        return func(*args, **(kwargs or {}))


def test_passes_do_not_wait_for_the_device(monkeypatch):
    """The rows on the host say once if most tokens have a loss."""
    made, _ = stepper(monkeypatch, ["train.micro_batch_size=2"], DDPStrategy, 1)
    with Reads() as reads:
        made.step(rows(8), 0, 1e-3, lambda: False)
    assert (len(made.model.rows), reads.count) == (4, 1)


@pytest.mark.parametrize(
    ("kind", "expected"), [(DDPStrategy, [True, True, False]), (ModelParallelStrategy, [False, False, False])]
)
def test_sharded_gradients_are_exchanged_after_every_pass(monkeypatch, kind, expected):
    """Put off, each process would hold the gradients of the whole model."""
    made, put_off = stepper(monkeypatch, ["train.micro_batch_size=3"], kind, 1)
    made.step(rows(8), 0, 1e-3, lambda: False)
    assert put_off == expected


@pytest.mark.parametrize(("settings", "expected"), [([], [16, 4]), (["train.micro_batch_size=6"], [6, 6, 6, 2])])
def test_validation_takes_no_more_micro_batch_size_than_training(monkeypatch, settings, expected):
    made, _ = stepper(monkeypatch, settings, DDPStrategy, 1)
    made.validation_loss(rows(20).ids)
    assert made.model.rows == expected


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


def test_an_answer_counts_if_all_of_its_tokens_are_predicted(monkeypatch):
    made, _ = stepper(monkeypatch, [], DDPStrategy, 1)
    ids = rows(20).ids
    with torch.no_grad():
        said = made.unwrapped_model(input_ids=ids).logits.argmax(-1)
    labels = torch.full_like(ids, -100)
    for token in (2, 4, 5, 6, 11):  # answers of one, three and one tokens
        labels[:, token] = said[:, token - 1]
    assert made.answer_accuracy(ids, labels) == 1
    labels[0, 2] += 1
    labels[1, [4, 6]] += 1  # one answer, twice wrong
    labels[2, 11] += 1
    labels[3, 5] += 1
    assert made.answer_accuracy(ids, labels) == pytest.approx(1 - 4 / 60)


def test_a_step_weights_its_sources_by_their_shares(monkeypatch):
    for shares in ((1.0, 1.0), (1.0, 3.0)):
        mixture = f'data.mixture={{"recall": {shares[0]}, "text": {shares[1]}}}'
        made, _ = stepper(monkeypatch, [mixture, "data.loss=sources"], DDPStrategy, 1)
        assert made.config.data.shares == dict(zip(["recall", "text"], shares, strict=True))
        outcome = made.step(rows(4)._replace(source=torch.tensor([0, 1, 1, 1])), 0, 0.0, lambda: False)
        each = [nats / tokens for nats, tokens in zip(outcome.nats, outcome.tokens, strict=True)]
        assert outcome.loss == pytest.approx((shares[0] * each[0] + shares[1] * each[1]) / sum(shares), rel=1e-5)
