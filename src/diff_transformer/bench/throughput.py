"""Throughput of the pair, side by side (Table 7).

``measure_throughput`` times a trained pair: training steps and forward passes. ``run_throughput_benchmark`` times
presets with random weights: forward + backward without an update, and prefill of a cache. Weights are in bf16 (lambda
in fp32) and attention is each side's default. A model that one GPU cannot hold twice is cut to its first layers; its
row says how many of how many.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn

from diff_transformer.bench.generation import SIDES, SMALL, build_pair
from diff_transformer.bench.record import collect, free_memory, in_turn, machine
from diff_transformer.bench.timing import Times, ceilings, interleaved_times
from diff_transformer.checks import require_positive
from diff_transformer.evals.provenance import provenance
from diff_transformer.evals.types import Result
from diff_transformer.lab.paper import THROUGHPUT as PAPER
from diff_transformer.model.config import DiffTransformerConfig, matched_baseline
from diff_transformer.model.cost import count_parameters, model_cost
from diff_transformer.model.presets import preset
from diff_transformer.train.loss import Objective


def measure_throughput(
    models: dict[str, nn.Module], ids: Tensor, *, precision: str = "32-true", pass_rows: int = 0, loss_chunk: int = 0,
    repeats: int = 7, steps: int = 3, warmup: int = 1,
) -> list[Result]:  # fmt: skip
    """One ``Result`` per model: the median of ``repeats`` measurements of ``steps`` steps on ``ids [B, T]``.

    Models take turns within each repeat, and every other repeat runs in the opposite order, so that a slow moment of
    the machine affects both. The training step is forward, backward, clipping and a fused AdamW update at learning rate
    0, which leaves the weights unchanged.

    Args:
        models: what has ``requires_grad`` is updated.
        precision: that of the training run; "bf16-mixed" autocasts both kinds.
        pass_rows, loss_chunk: rows of a pass of the step, and tokens whose logits it holds at a time; 0 for all.
        warmup: measurements before, which do not count.
    """
    require_positive(repeats=repeats, steps=steps)
    kinds = {"train": partial(_training_step, rows=pass_rows, chunk=loss_chunk), "forward": _forward}
    runs = {
        (kind, name): _repeated(make(model, ids, precision), steps)
        for kind, make in kinds.items()
        for name, model in models.items()
    }
    times = interleaved_times(runs, repeats, str(ids.device), warmup=warmup)
    tokens = ids.numel() * steps
    facts = {"batch": ids.shape[0], "length": ids.shape[1], "repeats": repeats, "steps": steps}
    facts["precision"] = precision
    results = []
    for name in models:
        rates = {f"{kind}_tokens_per_second": [tokens / s for s in times[kind, name].seconds] for kind in kinds}
        rows = [{"repeat": i, **{key: rate[i] for key, rate in rates.items()}} for i in range(repeats)]
        medians = {key: median(rate) for key, rate in rates.items()}
        results.append(Result("throughput", name, medians, rows, provenance(**facts)))
    return results


def _repeated(run: Callable[[], None], steps: int) -> Callable[[], None]:
    def runs():
        for _ in range(steps):
            run()

    return runs


def _autocast(ids: Tensor, precision: str) -> AbstractContextManager:
    return torch.autocast(ids.device.type, torch.bfloat16) if precision == "bf16-mixed" else nullcontext()


def _training_step(model: nn.Module, ids: Tensor, precision: str, *, rows: int, chunk: int) -> Callable[[], None]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, objective = torch.optim.AdamW(trained, lr=0.0, weight_decay=0.0, fused=True), Objective(model, chunk)
    weights = torch.full_like(ids[:, 1:], 1 / ids[:, 1:].numel(), dtype=torch.float32)
    size = rows or len(ids)

    def step():
        model.train()
        for part, weights_of_part in zip(ids.split(size), weights.split(size), strict=True):
            with _autocast(ids, precision):
                loss, _ = objective({"input_ids": part}, part[:, 1:], weights_of_part, True)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _forward(model: nn.Module, ids: Tensor, precision: str) -> Callable[[], None]:
    def forward():
        model.eval()
        with torch.inference_mode(), _autocast(ids, precision):
            model(input_ids=ids, use_cache=False)

    return forward


KINDS = ("forward_backward", "prefill")
USED_MEMORY = 0.8  # share of the free memory
ACTIVATION_BYTES = 80  # approximate number kept for the backward pass per token, layer and channel of d_model
LOGIT_BYTES = 14  # per token and vocabulary entry: logits, their fp32 copy, its softmax and gradients


@dataclass(frozen=True)
class ThroughputSetting:
    """A preset, with ``fields`` replaced, at a batch of sequences.

    ``layers``: most layers; None for as many as fit. ``compiled``: compile both models with torch.compile.
    """

    model: str
    batch: int
    length: int
    layers: int | None = None
    fields: dict = field(default_factory=dict)
    dtype: torch.dtype = torch.bfloat16
    compiled: bool = False

    def config(self, layers: int) -> DiffTransformerConfig:
        longest = {"max_position_embeddings": self.length}
        return preset(self.model, **{**longest, **self.fields, "num_hidden_layers": layers})

    @property
    def all_layers(self) -> int:
        return self.fields.get("num_hidden_layers") or preset(self.model).num_hidden_layers


CPU_SETTINGS = [
    ThroughputSetting("demo", 16, 128, dtype=torch.float32),
    ThroughputSetting("demo", 1, 1024, fields=SMALL, dtype=torch.float32),
]
GPU_SETTINGS = [
    ThroughputSetting("3B", 2, 4096),
    ThroughputSetting("3B", 4, 2048),
    ThroughputSetting("13.1B", 4, 2048, layers=8),
    ThroughputSetting("3B", 2, 4096, layers=8, compiled=True),
]


def run_throughput_benchmark(
    settings: list[ThroughputSetting],
    *,
    device: str = "cpu",
    repeats: int = 7,
    seconds: float | None = None,
    seconds_each: float | None = None,
    out: Path | None = None,
    on_row: Callable[[dict], None] | None = None,
) -> dict:
    """Benchmark the pair and return the record. ``on_row`` receives each row, and ``out`` is written after each.

    A row is one side of one setting: model, side ("softmax" or "diff"), batch, length, dtype, layers, layers_of_preset,
    parameters and, for forward_backward and prefill: ..._tokens_per_second, ..._quartiles, ..._ratio (to the
    Transformer's, the median over the turns), ..._mfu (FLOPs of model/cost.py over the measured matrix product) and
    ..._paper_ratio where Table 7 has the setting. No setting starts after ``seconds``; ``seconds_each`` limits the time
    of one side and kind.
    """
    require_positive(repeats=repeats, seconds=seconds, seconds_each=seconds_each)
    ceiling = ceilings(device, tuple(dict.fromkeys(s.dtype for s in settings)) or (torch.float32,))
    work = [
        (f"{s.model} at {s.length}", partial(measure_pair, s, device, ceiling, repeats, seconds_each)) for s in settings
    ]
    facts = {"repeats": repeats, "device": device, "ceilings": ceiling, "machine": machine(device)}
    facts["step"] = "forward + backward without an update; prefill fills a cache and keeps the last token's logits"
    return collect("throughput", in_turn(work, seconds), facts, out=out, on_row=on_row)


def measure_pair(
    setting: ThroughputSetting, device: str, ceiling: dict, repeats: int, seconds_each: float | None = None
) -> Iterator[dict]:
    """A row for the Transformer and one for the DIFF Transformer."""
    layers = min(setting.layers or setting.all_layers, layers_that_fit(setting, device))
    config = setting.config(layers)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, config.vocab_size, (setting.batch, setting.length), generator=generator).to(device)  # [B, T]
    models = build_pair(config, device, setting.dtype)
    if setting.compiled:
        for model in models.values():
            model.compile()
    runs = {(side, kind): run for side in SIDES for kind, run in calls(models[side], ids).items()}
    times = interleaved_times(runs, repeats, device, seconds=seconds_each, warmup=1)
    for side in SIDES:
        own = config if side == "diff" else matched_baseline(config)
        cost = model_cost(own, length=setting.length)
        last_only = 2 * own.vocab_size * own.hidden_size * (1 - 1 / setting.length)
        flops = {"forward_backward": cost.training_flops_per_token, "prefill": cost.flops_per_token - last_only}
        row = {
            **asdict(setting),
            "side": side,
            "dtype": str(setting.dtype).removeprefix("torch."),
            "layers": layers,
            "layers_of_preset": setting.all_layers,
            "parameters": cost.total_parameters,
        }
        peak = ceiling["matmul_tflops"][row["dtype"]] * 1e12
        for kind in KINDS:
            row |= rates(kind, times[side, kind], times["softmax", kind], ids.numel(), flops[kind] / peak)
            if (setting.model, setting.length) in PAPER:
                softmax, diff = PAPER[setting.model, setting.length][kind]
                row[f"{kind}_paper_ratio"] = round((diff if side == "diff" else softmax) / softmax, 4)
        yield row


def calls(model: nn.Module, ids: Tensor) -> dict[str, Callable[[], None]]:
    """The functions to time, by kind."""

    def forward_backward() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        model.zero_grad(set_to_none=True)

    @torch.inference_mode()
    def prefill() -> None:
        model(input_ids=ids, use_cache=True, logits_to_keep=1)

    return {"forward_backward": forward_backward, "prefill": prefill}


def rates(kind: str, times: Times, baseline: Times, tokens: int, seconds_per_token: float) -> dict:
    """Tokens per second. ``seconds_per_token``: time of the FLOPs of one token at the peak rate."""
    rate = tokens / times.median
    return {
        f"{kind}_tokens_per_second": round(rate, 2),
        f"{kind}_quartiles": [round(tokens / times.high, 2), round(tokens / times.low, 2)],
        f"{kind}_turns": times.turns,
        f"{kind}_ratio": round(baseline.over(times), 4),
        f"{kind}_mfu": round(rate * seconds_per_token, 4),
    }


def layers_that_fit(setting: ThroughputSetting, device: str) -> int:
    """Layers for which both models' weights and one model's gradients and activations fit; all on the CPU."""
    if torch.device(device).type != "cuda":
        return setting.all_layers
    one, two = (sum(count_parameters(setting.config(n)).values()) for n in (1, 2))
    width, tokens = setting.config(1).hidden_size, setting.batch * setting.length
    weights = 3 * setting.dtype.itemsize  # two models' weights, one model's gradients
    a_layer = (two - one) * weights + tokens * width * ACTIVATION_BYTES
    fixed = (2 * one - two) * weights + tokens * setting.config(1).vocab_size * LOGIT_BYTES
    free = free_memory(device) * USED_MEMORY
    return max(1, min(setting.all_layers, int((free - fixed) // a_layer)))
