"""The pair of models with random weights, side by side: a training step, prefill, and generation one token at a time.

Weights are in the setting's dtype (lambda in fp32) and attention is each side's default. A model that one GPU cannot
hold twice is cut to its first layers; its row says how many of how many.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import StaticCache

from diff_transformer.bench.record import collect, free_memory, in_turn, machine
from diff_transformer.bench.timing import Times, ceilings, interleaved_times
from diff_transformer.checks import require_positive
from diff_transformer.lab.paper import THROUGHPUT as PAPER
from diff_transformer.model.caches import CACHE
from diff_transformer.model.config import DiffTransformerConfig, matched_baseline
from diff_transformer.model.cost import count_parameters, model_cost
from diff_transformer.model.presets import preset

SIDES = ("softmax", "diff")
USED_MEMORY = 0.8  # share of the free memory
ACTIVATION_BYTES = 80  # approximate number kept for the backward pass per token, layer and channel of d_model
LOGIT_BYTES = 14  # per token and vocabulary entry: logits, their fp32 copy, its softmax and gradients
SMALL = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 16}
_TOKENS = 1 << 18  # of a corpus of random tokens


@dataclass(frozen=True)
class PairSetting:
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


@dataclass(frozen=True)
class ModelSetting:
    """A preset, with ``fields`` replaced. One turn generates ``tokens`` tokens over a cache of ``cache``.

    ``compiled``: a compiled step over a static cache, on a GPU as a CUDA graph; otherwise eager over a dynamic cache.
    """

    model: str
    batch: int
    cache: int
    tokens: int = 16
    fields: dict = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    compiled: bool = False

    def config(self) -> DiffTransformerConfig:
        return preset(self.model, **{"max_position_embeddings": self.cache + self.tokens, **self.fields})


SETTINGS = {  # by benchmark and device
    ("throughput", "cpu"): [
        PairSetting("demo", 16, 128, dtype=torch.float32),
        PairSetting("demo", 1, 1024, fields=SMALL, dtype=torch.float32),
    ],
    ("throughput", "cuda"): [
        PairSetting("3B", 2, 4096), PairSetting("3B", 4, 2048), PairSetting("13.1B", 4, 2048, layers=8),
        PairSetting("3B", 2, 4096, layers=8, compiled=True),
    ],
    ("step", "cpu"): [
        PairSetting("demo", 16, 128, dtype=torch.float32),
        PairSetting("demo", 2, 512, fields={**SMALL, "num_hidden_layers": 2}, dtype=torch.float32),
    ],
    ("step", "cuda"): [PairSetting("830M", 4, 2048), PairSetting("3B", 4, 2048, layers=8)],
}  # fmt: skip
MODELS = {  # that generate, by device; four of 28 layers on a GPU
    "cpu": [
        ModelSetting("demo", batch, cache, fields=fields)
        for fields in ({}, SMALL) for batch in (1, 4) for cache in (512, 2048)
    ],
    "cuda": [
        ModelSetting("3B", batch, 4096, 32, {"num_hidden_layers": 4}, torch.bfloat16, compiled)
        for compiled in (False, True) for batch in (1, 16)
    ],
}  # fmt: skip


def build_pair(config: DiffTransformerConfig, device: str, dtype: torch.dtype) -> dict[str, Any]:
    """The Transformer and the DIFF Transformer of a configuration, with random weights on the device."""
    from diff_transformer.model.modeling import DiffTransformerForCausalLM

    models = {}
    for side in SIDES:
        torch.manual_seed(0)
        with torch.device(device):  # initialised there: on the CPU a large model would take longer than its steps
            model = DiffTransformerForCausalLM(config if side == "diff" else matched_baseline(config))
        models[side] = model.to(dtype).eval()
    return models


def run_pair_benchmark(
    name: str,
    settings: list[PairSetting],
    *,
    device: str = "cpu",
    repeats: int = 7,
    seconds: float | None = None,
    seconds_each: float | None = None,
    out: Path | None = None,
    on_row: Callable[[dict], None] | None = None,
) -> dict:
    """Benchmark "throughput" or "step" and return the record. ``on_row`` receives each row, and ``out`` is written
    after each.

    A row is one side of one setting: model, side ("softmax" or "diff"), batch, length, dtype, layers, layers_of_preset,
    parameters and, for each kind, ..._tokens_per_second, ..._quartiles, ..._ratio (to the Transformer's, the median
    over the turns) and ..._mfu (FLOPs of model/cost.py over the measured matrix product). The kinds of "throughput" are
    forward_backward, without an update, and prefill of a cache; ..._paper_ratio is that of Table 7 if it has the
    setting. The kind of "step" is step: rows, forward, backward, clipping and fused AdamW, as in training. No setting
    starts after ``seconds``; ``seconds_each`` limits the time of one side and kind.
    """
    require_positive(repeats=repeats, seconds=seconds, seconds_each=seconds_each)
    ceiling = ceilings(device, tuple(dict.fromkeys(s.dtype for s in settings)) or (torch.float32,))
    work = [
        (f"{s.model} at {s.length}", partial(measure_pair, name, s, device, ceiling, repeats, seconds_each))
        for s in settings
    ]
    facts = {"repeats": repeats, "device": device, "ceilings": ceiling, "machine": machine(device)}
    return collect(name, in_turn(work, seconds), facts, out=out, on_row=on_row)


def measure_pair(
    name: str, setting: PairSetting, device: str, ceiling: dict, repeats: int, seconds_each: float | None = None
) -> Iterator[dict]:
    """A row for the Transformer and one for the DIFF Transformer."""
    layers = min(setting.layers or setting.all_layers, layers_that_fit(setting, device))
    config = setting.config(layers)
    make = training_step if name == "step" else forward_kinds
    runs = {
        (side, kind): run
        for side in SIDES
        for kind, run in make(config if side == "diff" else matched_baseline(config), setting, device).items()
    }
    times = interleaved_times(runs, repeats, device, seconds=seconds_each)
    for side in SIDES:
        own = config if side == "diff" else matched_baseline(config)
        cost, dtype = model_cost(own, length=setting.length), str(setting.dtype).removeprefix("torch.")
        last_only = 2 * own.vocab_size * own.hidden_size * (1 - 1 / setting.length)
        flops = {"prefill": cost.flops_per_token - last_only}
        row = {
            **asdict(setting), "side": side, "dtype": dtype, "layers": layers, "layers_of_preset": setting.all_layers,
            "parameters": cost.total_parameters,
        }  # fmt: skip
        for kind in [kind for of, kind in runs if of == side]:
            per_token = flops.get(kind, cost.training_flops_per_token) / (ceiling["matmul_tflops"][dtype] * 1e12)
            row |= rates(kind, times[side, kind], times["softmax", kind], setting.batch * setting.length, per_token)
            if (setting.model, setting.length) in PAPER and kind in PAPER[setting.model, setting.length]:
                softmax, diff = PAPER[setting.model, setting.length][kind]
                row[f"{kind}_paper_ratio"] = round((diff if side == "diff" else softmax) / softmax, 4)
        yield row


def forward_kinds(config, setting: PairSetting, device: str) -> dict[str, Callable[[], None]]:
    """Forward and backward, and prefill, of a new model."""
    from diff_transformer.model.modeling import DiffTransformerForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        model: Any = DiffTransformerForCausalLM(config)
    model = model.to(setting.dtype).eval()
    if setting.compiled:
        model.compile()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, config.vocab_size, (setting.batch, setting.length), generator=generator).to(device)  # [B, T]

    def forward_backward() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        model.zero_grad(set_to_none=True)

    @torch.inference_mode()
    def prefill() -> None:
        model(input_ids=ids, use_cache=True, logits_to_keep=1)

    return {"forward_backward": forward_backward, "prefill": prefill}


def training_step(config, setting: PairSetting, device: str) -> dict[str, Callable[[], None]]:
    """A step of training (``train/step.py``) of a new model on random tokens."""
    from lightning.fabric import Fabric

    from diff_transformer.data.mixture import Mixture
    from diff_transformer.data.packing import PackedCorpus
    from diff_transformer.model.modeling import DiffTransformerForCausalLM
    from diff_transformer.train.config import RunConfig, TrainConfig
    from diff_transformer.train.data_config import DataConfig
    from diff_transformer.train.loss import Objective
    from diff_transformer.train.step import Stepper, make_optimizer
    from diff_transformer.train.training_data import BatchPart, make_rows

    precision: Any = "32-true" if setting.dtype == torch.float32 else "bf16-mixed"
    run = RunConfig(
        "bench", {}, DataConfig(length=setting.length), train=TrainConfig(batch_size=setting.batch, precision=precision)
    )
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, max(_TOKENS, 2 * setting.length)).astype(np.uint32)
    mixture = Mixture({"text": PackedCorpus(tokens, setting.length)}, {"text": 1.0}, setting.batch)
    training_data: Any = SimpleNamespace(mixture=mixture, tokenizer=SimpleNamespace(eos_token_id=0))
    fabric: Any = Fabric(accelerator=torch.device(device).type, devices=1, precision=precision)
    torch.manual_seed(0)
    with torch.device(device):
        plain: Any = DiffTransformerForCausalLM(config)
    model = fabric.setup_module(Objective(plain))
    optimizer = fabric.setup_optimizers(make_optimizer(plain, run.optim))
    stepper, steps = Stepper(fabric, model, optimizer, plain, run, 0), itertools.count()

    def step() -> None:
        number = next(steps)
        rows = make_rows(training_data, run, BatchPart(), number)
        stepper.step(rows, number, 1e-4, lambda: False)

    return {"step": step}


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


def layers_that_fit(setting: PairSetting, device: str) -> int:
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


def generation_rows(setting: ModelSetting, device: str, repeats: int) -> Iterator[dict]:
    """A row of kind "model" for each side: tokens_per_second of the whole batch, quartiles, ratio to the Transformer.

    Both generate greedily, in turns, with a cache of transformers. After each turn the cache is cropped.
    """
    config = setting.config()
    models = build_pair(config, device, setting.dtype)
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(0, config.vocab_size, (setting.batch, setting.cache), generator=generator).to(device)
    runs = {side: _decoder(model, prompt, setting.tokens, setting.compiled) for side, model in models.items()}
    times = interleaved_times(runs, repeats, device)
    new_tokens = setting.batch * setting.tokens
    for side in SIDES:
        t = times[side]
        yield {
            "kind": "model",
            "side": side,
            **asdict(setting),
            "dtype": str(setting.dtype).removeprefix("torch."),
            "layers": config.num_hidden_layers,
            "layers_of_preset": preset(setting.model).num_hidden_layers,
            "tokens_per_second": round(new_tokens / t.median, 2),
            "tokens_per_second_quartiles": [round(new_tokens / t.high, 2), round(new_tokens / t.low, 2)],
            "turns": t.turns,
            "ratio": round(times["softmax"].over(t), 4),
        }


def _decoder(model: nn.Module, prompt: Tensor, tokens: int, compiled: bool = False) -> Callable[[], None]:
    """A function that generates ``tokens`` tokens after the prompt. The prompt is read here, once."""
    config: Any = model.config
    static = StaticCache(config=config, max_cache_len=prompt.shape[1] + tokens) if compiled else None
    with torch.inference_mode(not compiled), torch.no_grad():
        out = model(input_ids=prompt, **{CACHE: static}, use_cache=True, logits_to_keep=1)
    cache, first = getattr(out, CACHE), out.logits[:, -1].argmax(-1, keepdim=True)  # [B, 1]
    step = compiled_step(model) if compiled else model

    def decode() -> None:
        token = first
        with torch.inference_mode(not compiled), torch.no_grad():
            for _ in range(tokens):
                out = step(input_ids=token, **{CACHE: cache}, use_cache=True, logits_to_keep=1)
                token = out.logits[:, -1].argmax(-1, keepdim=True)
            crop(cache, tokens)

    return decode


def compiled_step(model: nn.Module) -> Callable:
    """The model compiled to one graph; on a GPU, replayed as a CUDA graph."""
    cuda = next(model.parameters()).device.type == "cuda"
    return torch.compile(model, fullgraph=True, mode="reduce-overhead" if cuda else None)


def crop(cache, tokens: int) -> None:
    """Drop the last tokens. A static cache overwrites them instead."""
    if isinstance(cache, StaticCache):
        for layer in cache.layers:
            layer.cumulative_length.sub_(tokens)
    else:
        cache.crop(-tokens)
