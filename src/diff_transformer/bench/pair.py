"""The pair of models with random weights, side by side: a training step, prefill, and generation one token at a time.

Weights are in the setting's dtype (lambda in fp32) and attention is each side's default. A model that one GPU cannot
hold twice is cut to its first layers; its row says how many of how many.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import StaticCache

from diff_transformer.bench.record import Options, free_memory
from diff_transformer.bench.throughput import training_step
from diff_transformer.bench.timing import Times, ceilings
from diff_transformer.lab.paper import THROUGHPUT as PAPER
from diff_transformer.model.caches import CACHE
from diff_transformer.model.config import DiffTransformerConfig, matched_baseline
from diff_transformer.model.cost import count_parameters, model_cost
from diff_transformer.model.presets import preset

USED_MEMORY = 0.8  # share of the free memory
ACTIVATION_BYTES = 80  # approximate number kept for the backward pass per token, layer and channel of d_model
LOGIT_BYTES = 14  # per token and vocabulary entry: logits, their fp32 copy, its softmax and gradients
SMALL = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 16}


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


def build_model(config: DiffTransformerConfig, device: str, dtype: torch.dtype) -> Any:
    """A model of this configuration with random weights on the device."""
    from diff_transformer.model.modeling import DiffTransformerForCausalLM

    torch.manual_seed(0)
    with torch.device(device):  # initialised there: on the CPU a large model would take longer than its steps
        model = DiffTransformerForCausalLM(config)
    return model.to(dtype).eval()


def sides_of(config: DiffTransformerConfig) -> dict[str, DiffTransformerConfig]:
    """The configurations of the matched Transformer and of the DIFF Transformer."""
    return {"softmax": matched_baseline(config), "diff": config}


def run_pair_benchmark(name: str, settings: list[PairSetting], **options) -> dict:
    """Benchmark "throughput" or "step" and return the record. ``options``: fields of ``Options``.

    A row is one side of one setting: model, side ("softmax" or "diff"), batch, length, dtype, layers, layers_of_preset,
    parameters and, for each kind, ..._tokens_per_second, ..._quartiles, ..._ratio (to the Transformer's, the median
    over the turns) and ..._mfu (FLOPs of model/cost.py over the measured matrix product). The kinds of "throughput" are
    forward_backward, without an update, and prefill of a cache; ..._paper_ratio is that of Table 7 if it has the
    setting. The kind of "step" is step: forward, backward, clipping and fused AdamW, as in training.
    """
    run = Options(**options)
    ceiling = ceilings(run.device, tuple(dict.fromkeys(s.dtype for s in settings)) or (torch.float32,))
    work = [(f"{s.model} at {s.length}", partial(measure_pair, name, s, ceiling, run)) for s in settings]
    return run.collect(name, work, ceilings=ceiling)


def measure_pair(name: str, setting: PairSetting, ceiling: dict, options: Options) -> Iterator[dict]:
    """A row for the Transformer and one for the DIFF Transformer."""
    layers = min(setting.layers or setting.all_layers, layers_that_fit(setting, options.device))
    sides, make = sides_of(setting.config(layers)), step_kinds if name == "step" else forward_kinds
    runs = {(side, kind): run for side in sides for kind, run in make(sides[side], setting, options.device).items()}
    times = options.times(runs)
    for side, config in sides.items():
        cost, dtype = model_cost(config, length=setting.length), str(setting.dtype).removeprefix("torch.")
        last_only = 2 * config.vocab_size * config.hidden_size * (1 - 1 / setting.length)
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


def random_ids(config, batch: int, length: int, device: str) -> Tensor:
    """Random tokens, int64 ``[batch, length]``."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, config.vocab_size, (batch, length), generator=generator).to(device)


def forward_kinds(config, setting: PairSetting, device: str) -> dict[str, Callable[[], None]]:
    """Forward and backward, and prefill, of a new model."""
    model, ids = build_model(config, device, setting.dtype), random_ids(config, setting.batch, setting.length, device)
    if setting.compiled:
        model.compile()

    def forward_backward() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        model.zero_grad(set_to_none=True)

    @torch.inference_mode()
    def prefill() -> None:
        model(input_ids=ids, use_cache=True, logits_to_keep=1)

    return {"forward_backward": forward_backward, "prefill": prefill}


def step_kinds(config, setting: PairSetting, device: str) -> dict[str, Callable[[], None]]:
    """A step of training of a new model with fp32 weights, in mixed precision for a setting in bf16."""
    model, ids = build_model(config, device, torch.float32), random_ids(config, setting.batch, setting.length, device)
    precision = "32-true" if setting.dtype == torch.float32 else "bf16-mixed"
    return {"step": training_step(model, ids, precision)}


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


def generation_rows(setting: ModelSetting, options: Options) -> Iterator[dict]:
    """A row of kind "model" for each side: tokens_per_second of the whole batch, quartiles, ratio to the Transformer.

    Both generate greedily, in turns, with a cache of transformers. After each turn the cache is cropped.
    """
    sides = sides_of(setting.config())
    prompt = random_ids(sides["diff"], setting.batch, setting.cache, options.device)
    models = {side: build_model(config, options.device, setting.dtype) for side, config in sides.items()}
    runs = {side: _decoder(model, prompt, setting.tokens, setting.compiled) for side, model in models.items()}
    times = options.times(runs)
    new_tokens = setting.batch * setting.tokens
    for side, config in sides.items():
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
