"""The pair of models with random weights, side by side: training, prefill, and generation one token at a time.

Weights are in the setting's dtype (lambda in fp32) and attention is each side's default.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import StaticCache

from diff_transformer.bench.record import Options
from diff_transformer.bench.timing import Times
from diff_transformer.lab.paper import THROUGHPUT as PAPER
from diff_transformer.model.caches import CACHE
from diff_transformer.model.config import DiffTransformerConfig, matched_baseline
from diff_transformer.model.cost import model_cost
from diff_transformer.model.presets import preset

EIGHT = {"num_hidden_layers": 8}  # of a model that one GPU cannot train twice
SMALL = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 16}


@dataclass(frozen=True)
class PairSetting:
    """A preset, with ``fields`` replaced, at a batch of sequences of ``length`` tokens.

    ``tokens``: those that one turn of generation adds to a cache of ``length``. ``compiled``: both models by
    torch.compile; generation then has a static cache, and is a CUDA graph on a GPU.
    """

    model: str
    batch: int
    length: int
    fields: dict = field(default_factory=dict)
    dtype: torch.dtype = torch.bfloat16
    compiled: bool = False
    tokens: int = 0

    def config(self) -> DiffTransformerConfig:
        return preset(self.model, **{"max_position_embeddings": self.length + self.tokens, **self.fields})


SETTINGS = {  # by device
    "cpu": [
        PairSetting("demo", 16, 128, dtype=torch.float32),
        PairSetting("demo", 1, 1024, fields=SMALL, dtype=torch.float32),
    ],
    "cuda": [
        PairSetting("3B", 2, 4096), PairSetting("3B", 4, 2048), PairSetting("13.1B", 4, 2048, EIGHT),
        PairSetting("3B", 2, 4096, EIGHT, compiled=True),
    ],
}  # fmt: skip
MODELS = {  # that generate, by device; four of 28 layers on a GPU
    "cpu": [
        PairSetting("demo", batch, cache, fields, torch.float32, tokens=16)
        for fields in ({}, SMALL) for batch in (1, 4) for cache in (512, 2048)
    ],
    "cuda": [
        PairSetting("3B", batch, 4096, {"num_hidden_layers": 4}, compiled=compiled, tokens=32)
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


def run_pair_benchmark(settings: list[PairSetting], **options) -> dict:
    """Benchmark "throughput" and return the record. ``options``: fields of ``Options``.

    A row is one side of one setting: its fields, side ("softmax" or "diff"), layers, layers_of_preset, parameters and,
    for each kind, ..._tokens_per_second, ..._quartiles and ..._ratio (to the Transformer's, the median over the turns).
    The kinds are forward_backward, without an update, and prefill of a cache; ..._paper_ratio is that of Table 7 if it
    has the setting.
    """
    run = Options(**options)
    return run.collect("throughput", [(f"{s.model} at {s.length}", partial(measure_pair, s, run)) for s in settings])


def measure_pair(setting: PairSetting, options: Options) -> Iterator[dict]:
    """A row for the Transformer and one for the DIFF Transformer."""
    sides = sides_of(setting.config())
    runs = {(s, kind): run for s in sides for kind, run in forward_kinds(sides[s], setting, options.device).items()}
    times = options.times(runs)
    paper = PAPER.get((setting.model, setting.length), {})
    for side, config in sides.items():
        row = side_row(setting, side, config) | {
            "parameters": model_cost(config, length=setting.length).total_parameters
        }
        for kind in [kind for of, kind in runs if of == side]:
            rates = rates_of(times[side, kind], times["softmax", kind], setting.batch * setting.length)
            row |= {f"{kind}_{name}": value for name, value in rates.items()}
            if kind in paper:
                softmax, diff = paper[kind]
                row[f"{kind}_paper_ratio"] = round((diff if side == "diff" else softmax) / softmax, 4)
        yield row


def side_row(setting: PairSetting, side: str, config: DiffTransformerConfig) -> dict:
    """The fields of a setting and a side."""
    layers = {"layers": config.num_hidden_layers, "layers_of_preset": preset(setting.model).num_hidden_layers}
    return {**asdict(setting), "side": side, "dtype": str(setting.dtype).removeprefix("torch."), **layers}


def rates_of(times: Times, baseline: Times, tokens: int) -> dict:
    """Tokens per second of calls on ``tokens`` tokens, and the ratio to the baseline's."""
    low, high = times.quartiles
    return {
        "tokens_per_second": round(tokens / times.median, 2),
        "quartiles": [round(tokens / high, 2), round(tokens / low, 2)],
        "turns": len(times.seconds),
        "ratio": round(baseline.over(times), 4),
    }


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


def generation_rows(setting: PairSetting, options: Options) -> Iterator[dict]:
    """A row of kind "model" for each side: tokens_per_second of the whole batch, quartiles, ratio to the Transformer.

    Both generate greedily, in turns, with a cache of transformers. After each turn the cache is cropped.
    """
    sides = sides_of(setting.config())
    prompt = random_ids(sides["diff"], setting.batch, setting.length, options.device)
    models = {side: build_model(config, options.device, setting.dtype) for side, config in sides.items()}
    runs = {side: _decoder(model, prompt, setting.tokens, setting.compiled) for side, model in models.items()}
    times = options.times(runs)
    for side, config in sides.items():
        rates = rates_of(times[side], times["softmax"], setting.batch * setting.tokens)
        yield {"kind": "model", **side_row(setting, side, config), **rates}


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
