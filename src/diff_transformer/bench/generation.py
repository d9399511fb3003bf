"""Cached generation by the pair: tokens per second, one token at a time, after a prompt that fills the cache."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import StaticCache

from diff_transformer.bench.timing import interleaved_times
from diff_transformer.model.caches import CACHE
from diff_transformer.model.config import DiffTransformerConfig, matched_baseline
from diff_transformer.model.presets import preset

SIDES = ("softmax", "diff")


@dataclass(frozen=True)
class ModelSetting:
    """A preset, with ``fields`` replaced. One turn generates ``tokens`` tokens.

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


SMALL = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 16}
CPU_MODELS = [
    ModelSetting("demo", batch, cache, fields=fields)
    for fields in ({}, SMALL)
    for batch in (1, 4)
    for cache in (512, 2048)
]
GPU_MODELS = [
    ModelSetting("3B", batch, 4096, 32, {"num_hidden_layers": 4}, torch.bfloat16, compiled)
    for compiled in (False, True)
    for batch in (1, 16)
]  # four of its 28 layers


def build_pair(config: DiffTransformerConfig, device: str, dtype: torch.dtype) -> dict[str, nn.Module]:
    """The Transformer and the DIFF Transformer of a configuration, with random weights on the device."""
    from diff_transformer.model.modeling import DiffTransformerForCausalLM

    models = {}
    for side in SIDES:
        torch.manual_seed(0)
        with torch.device(device):
            model = DiffTransformerForCausalLM(config if side == "diff" else matched_baseline(config))
        models[side] = model.to(dtype).eval()
    return models


def model_rows(setting: ModelSetting, device: str, repeats: int) -> Iterator[dict]:
    """A row of kind "model" for each side: tokens_per_second of the whole batch, quartiles, ratio to the Transformer.

    Both generate greedily, in turns, with a cache of transformers. After each turn the cache is cropped.
    """
    config = setting.config()
    models = build_pair(config, device, setting.dtype)
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(0, config.vocab_size, (setting.batch, setting.cache), generator=generator).to(device)
    runs = {side: _decoder(model, prompt, setting.tokens, setting.compiled) for side, model in models.items()}
    times = interleaved_times(runs, repeats, device, warmup=1)
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
