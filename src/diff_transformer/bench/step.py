"""Time of a training step and of its parts, both models of the pair side by side.

The step is that of training (``train/step.py``): rows, forward, backward, clipping, fused AdamW. Step times are
measured in turns without the profiler; the shares come from a few profiled steps. An operation of the backward pass
counts for the part whose forward operation it differentiates.
"""

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from diff_transformer.bench.generation import SIDES, SMALL
from diff_transformer.bench.record import collect, machine
from diff_transformer.bench.throughput import ThroughputSetting
from diff_transformer.bench.timing import ceilings, interleaved_times
from diff_transformer.checks import require_positive
from diff_transformer.model.config import matched_baseline
from diff_transformer.model.cost import model_cost

PARTS = (
    "attention",
    "head norm",
    "rotary embedding",
    "projections",
    "feed-forward",
    "output and cross-entropy",
    "optimizer",
    "data",
    "other",
)
CPU_SETTINGS = [
    ThroughputSetting("demo", 16, 128, dtype=torch.float32),
    ThroughputSetting("demo", 2, 512, fields={**SMALL, "num_hidden_layers": 2}, dtype=torch.float32),
]
GPU_SETTINGS = [ThroughputSetting("830M", 4, 2048), ThroughputSetting("3B", 4, 2048, layers=8)]
PRECISIONS = {torch.float32: "32-true", torch.bfloat16: "bf16-mixed"}
_SCOPE, _BACKWARD, _OPTIMIZER = "part: ", "autograd::engine::evaluate_function: ", "Optimizer.step#"
_TOKENS = 1 << 18


def run_step_benchmark(
    settings: list[ThroughputSetting],
    *,
    device: str = "cpu",
    repeats: int = 7,
    profiled: int = 3,
    seconds_each: float | None = None,
    out: Path | None = None,
    on_row: Callable[[dict], None] | None = None,
) -> dict:
    """Benchmark training steps and return the record. ``on_row`` receives each row, and ``out`` is written after each.

    A row is one side of one setting: step_ms (median) with quartiles, tokens_per_second, ratio (to the Transformer's,
    the median over the turns), mfu (over the measured matrix product) and shares: of the step's time, by part, sum 1.
    ``profiled``: steps under the profiler. ``seconds_each`` limits the time of one side.
    """
    require_positive(repeats=repeats, profiled=profiled, seconds_each=seconds_each)
    ceiling = ceilings(device, tuple(dict.fromkeys(s.dtype for s in settings)) or (torch.float32,))
    facts: dict = {"repeats": repeats, "profiled": profiled, "device": device, "ceilings": ceiling}
    facts |= {
        "machine": machine(device),
        "load_average": load_average(),
        "step": "rows of random tokens, forward, backward, clipping, fused AdamW",
    }
    rows = (row for s in settings for row in measure_steps(s, device, ceiling, repeats, profiled, seconds_each))
    return collect("step", rows, facts, out=out, on_row=on_row)


def measure_steps(
    setting: ThroughputSetting,
    device: str,
    ceiling: dict,
    repeats: int,
    profiled: int,
    seconds_each: float | None = None,
) -> Iterator[dict]:
    """A row for the Transformer and one for the DIFF Transformer."""
    layers = setting.layers or setting.all_layers
    config = setting.config(layers)
    runs = {
        side: training_step(config if side == "diff" else matched_baseline(config), setting, device) for side in SIDES
    }
    times = interleaved_times(runs, repeats, device, seconds=seconds_each, warmup=2)
    dtype = str(setting.dtype).removeprefix("torch.")
    for side in SIDES:
        own, t = config if side == "diff" else matched_baseline(config), times[side]
        cost, tokens = model_cost(own, length=setting.length), setting.batch * setting.length
        yield {
            **asdict(setting),
            "side": side,
            "dtype": dtype,
            "layers": layers,
            "layers_of_preset": setting.all_layers,
            "parameters": cost.total_parameters,
            "step_ms": round(1e3 * t.median, 3),
            "step_ms_quartiles": [round(1e3 * t.low, 3), round(1e3 * t.high, 3)],
            "turns": t.turns,
            "tokens_per_second": round(tokens / t.median, 2),
            "ratio": round(times["softmax"].over(t), 4),
            "mfu": round(tokens / t.median * cost.training_flops_per_token / ceiling["matmul_tflops"][dtype] / 1e12, 4),
            "shares": {part: round(share, 4) for part, share in shares_of(runs[side], profiled, device).items()},
        }


def training_step(config, setting: ThroughputSetting, device: str) -> Callable[[], None]:
    """A function that trains a new model of ``config`` for one step, with its parts marked for the profiler."""
    from lightning.fabric import Fabric

    from diff_transformer.data.mixture import Mixture
    from diff_transformer.data.packing import PackedCorpus
    from diff_transformer.model.modeling import DiffTransformerForCausalLM
    from diff_transformer.train.config import RunConfig, TrainConfig
    from diff_transformer.train.data_config import DataConfig
    from diff_transformer.train.loss import Objective
    from diff_transformer.train.step import Stepper, make_optimizer
    from diff_transformer.train.training_data import BatchPart, make_rows

    precision: Any = PRECISIONS[setting.dtype]
    run = RunConfig(
        "bench", {}, DataConfig(length=setting.length), train=TrainConfig(batch_size=setting.batch, precision=precision)
    )
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, max(_TOKENS, 2 * setting.length)).astype(np.uint32)
    mixture = Mixture({"text": PackedCorpus(tokens, setting.length)}, {"text": 1.0}, setting.batch)
    training_data: Any = SimpleNamespace(mixture=mixture, tokenizer=SimpleNamespace(eos_token_id=0))
    fabric: Any = Fabric(accelerator=torch.device(device).type, devices=1, precision=precision)
    torch.manual_seed(0)
    with torch.device(device):  # initialised there: on the CPU a large model would take longer than its steps
        plain = DiffTransformerForCausalLM(config)
    mark_parts(plain)
    objective = Objective(plain)
    objective._losses = _within("output and cross-entropy", objective._losses)
    model = fabric.setup_module(objective)
    optimizer = fabric.setup_optimizers(make_optimizer(plain, run.optim))
    fabric.clip_gradients = _within("optimizer", fabric.clip_gradients)
    stepper, steps = Stepper(fabric, model, optimizer, plain, run, 0), itertools.count()

    def step() -> None:
        number = next(steps)
        with record_function(_SCOPE + "data"):
            rows = make_rows(training_data, run, BatchPart(), number)
        stepper.step(rows, number, 1e-4, lambda: False)

    return step


def load_average() -> float | None:
    """Average number of runnable processes in the last minute; above the number of cores, times are unreliable."""
    return round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None


def mark_parts(model: Any) -> None:
    """Mark the modules of a model's layers for the profiler."""
    for layer in model.base_model.layers:
        attention = layer.self_attn
        _mark(attention.core, "attention")
        if getattr(attention.core, "head_norm", None) is not None:
            _mark(attention.core.head_norm, "head norm")
        attention.rotate = _within("rotary embedding", attention.rotate)
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj):
            _mark(projection, "projections")
        _mark(layer.mlp, "feed-forward")


def shares_of(step: Callable[[], None], steps: int, device: str) -> dict[str, float]:
    """The share of each of ``PARTS`` in the time of ``steps`` steps."""
    cuda = torch.device(device).type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities) as seen:
        for _ in range(steps):
            with record_function("step"):
                step()
    return shares(list(seen.events()), "self_device_time_total" if cuda else "self_cpu_time_total")


def shares(events: list, clock: str) -> dict[str, float]:
    """``shares_of`` from profiler events, by the time that their field ``clock`` names."""
    # Kernels are events too, but their time is already counted in the operations that launched them.
    events = [event for event in events if event.device_type == torch.autograd.DeviceType.CPU]
    of_node = parts_of_nodes(events)
    spent = dict.fromkeys(PARTS, 0.0)
    for event in events:
        spent[_part(event, of_node) or "other"] += getattr(event, clock)
    total = sum(spent.values()) or 1.0
    return {part: time / total for part, time in spent.items()}


def parts_of_nodes(events: list) -> dict[int, str]:
    """The part that made each node of the autograd graph, by the node's number: that of the last operation with it."""
    of_node: dict[int, str] = {}
    for event in sorted(events, key=lambda event: event.time_range.start):
        if event.sequence_nr >= 0 and not _differentiates(event):
            of_node[event.sequence_nr] = _part(event, {}) or "other"
    return of_node


def _part(event: Any, of_node: dict[int, str]) -> str | None:
    """The part of the innermost mark around an event, or that of the node that it differentiates."""
    while event is not None:
        if event.name.startswith(_SCOPE):
            return event.name.removeprefix(_SCOPE)
        if event.name.startswith(_OPTIMIZER):
            return "optimizer"
        if event.name.startswith(_BACKWARD):
            return of_node.get(event.sequence_nr)
        event = event.cpu_parent
    return None


def _differentiates(event: Any) -> bool:
    """True if an operation belongs to the backward pass."""
    while event is not None and not event.name.startswith(_BACKWARD):
        event = event.cpu_parent
    return event is not None


def _mark(module: nn.Module, part: str) -> None:
    module.forward = _within(part, module.forward)


def _within(part: str, function: Callable) -> Callable:
    @contextmanager
    def scope():
        with record_function(_SCOPE + part):
            yield

    return partial(_call, scope, function)


def _call(scope, function, *args, **options):
    with scope():
        return function(*args, **options)
