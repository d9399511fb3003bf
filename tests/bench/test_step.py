from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from diff_transformer.bench import step as bench
from diff_transformer.bench.throughput import ThroughputSetting

TINY = ThroughputSetting("debug", 2, 32, layers=1, dtype=torch.float32)


@dataclass
class Event:
    """One event of the profiler."""

    name: str
    self_cpu_time_total: float
    cpu_parent: Any = None
    sequence_nr: int = -1
    start: int = 0
    device_type: Any = torch.autograd.DeviceType.CPU
    time_range: Any = field(init=False)

    def __post_init__(self):
        self.time_range = SimpleNamespace(start=self.start)


def test_shares_of_known_events():
    step = Event("step", 5)
    attention = Event("part: attention", 10, step)
    norm = Event("part: head norm", 0, attention, start=1)
    mlp = Event("part: feed-forward", 0, step, start=2)
    first = "autograd::engine::evaluate_function: SoftmaxBackward0"
    second = "autograd::engine::evaluate_function: MmBackward0"
    events = [
        step, attention, norm, mlp,
        Event("aten::rms_norm", 10, norm),
        Event("aten::view", 0, attention, sequence_nr=7, start=1),  # makes no node: the next has the same number
        Event("aten::softmax", 20, attention, sequence_nr=6),
        Event("aten::mm", 15, mlp, sequence_nr=7, start=3),
        one := Event(second, 1, step, sequence_nr=7, start=4), Event("aten::mm", 24, one, start=5),
        other := Event(first, 2, step, sequence_nr=6, start=6),
        Event("SoftmaxBackward0", 3, other, sequence_nr=6, start=7),
        Event("Optimizer.step#AdamW.step", 5, step, start=8),
        Event("attention_kernel", 20, device_type=torch.autograd.DeviceType.CUDA),  # is in the softmax's time already
        Event("part: attention", 30, device_type=torch.autograd.DeviceType.CUDA),
        Event("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", 5, step, start=9),
    ]  # fmt: skip
    assert bench.shares(events, "self_cpu_time_total") == pytest.approx(
        {
            "attention": 0.35, "head norm": 0.10, "feed-forward": 0.40, "optimizer": 0.05, "other": 0.10,
            "rotary embedding": 0, "projections": 0, "output and cross-entropy": 0, "data": 0,
        }
    )  # fmt: skip


def test_a_row_of_each_side_says_where_the_time_goes(kept_times):
    times = kept_times(bench)
    record = bench.run_step_benchmark([TINY], repeats=2, profiled=1)
    softmax, diff = record["rows"]
    assert (softmax["side"], diff["side"], softmax["ratio"]) == ("softmax", "diff", 1.0)
    assert diff["ratio"] == round(times["softmax"].over(times["diff"]), 4)
    for row in (softmax, diff):
        assert tuple(row["shares"]) == bench.PARTS
        assert sum(row["shares"].values()) == pytest.approx(1, abs=1e-3)
        assert [part for part, share in row["shares"].items() if share == 0] == (
            ["head norm"] if row["side"] == "softmax" else []
        )
        assert row["tokens_per_second"] == pytest.approx(64 / row["step_ms"] * 1e3, rel=0.01)


def test_the_backward_pass_counts_for_the_part_that_it_differentiates():
    step = bench.training_step(TINY.config(1), TINY, "cpu")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        step()
    of_node, parts = bench.parts_of_nodes(list(seen.events())), {}
    for event in seen.events():
        if event.name.startswith("autograd::engine::evaluate_function: ") and event.sequence_nr >= 0:
            name = event.name.rsplit(" ", 1)[1]
            parts.setdefault(name, []).append(of_node[event.sequence_nr])
    assert sorted(parts["MmBackward0"]) == ["feed-forward"] * 3 + ["output and cross-entropy"] + ["projections"] * 4
    assert parts["NllLossBackward0"] == ["output and cross-entropy"]
    assert [part for name, of in parts.items() if "blockwise" in name for part in of] == ["attention"]


def test_marks_change_nothing_that_is_computed():
    from diff_transformer import DiffTransformerForCausalLM

    model = DiffTransformerForCausalLM(TINY.config(1)).eval()
    ids = torch.randint(0, 512, (1, 9))
    before = model(ids).logits
    bench.mark_parts(model)
    assert torch.equal(model(ids).logits, before)
