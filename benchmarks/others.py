"""One layer of differential attention in this package and in others, on this machine's CPU: the speed row of
docs/comparison.md.

python benchmarks/others.py --out benchmarks/results/others_cpu.json    # 20 minutes on a quiet machine

All sides hold the same weights and take turns; a side whose output differs from ours is not timed. transformers'
DiffLlama and our model are whole decoders of one layer with a feed-forward part of 16 channels. ``reference`` is this
package's backend that keeps both maps in memory, as the authors' plain layer does. timm's layer has no rotary
embedding, so it is compared with ours without it.
"""

import argparse
import copy
import runpy
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import DiffLlamaConfig, DiffLlamaForCausalLM

from diff_transformer.bench.record import collect
from diff_transformer.bench.timing import interleaved_times
from diff_transformer.model.convert import from_diffllama
from diff_transformer.testing import peak_memory

WIDTH, MAPS, BATCH, REPEATS = 512, 16, 2, 9
EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
Forward = Callable[[Tensor], Tensor]


def decoder(model: nn.Module) -> Forward:
    """From embeddings to the last hidden states, ``[B, N, WIDTH]``."""
    return lambda x: model(inputs_embeds=x, use_cache=False).last_hidden_state


def diffllama() -> dict[str, Forward]:
    """Ours, by name of its backend, and DiffLlama, by its attention implementation."""
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 8}
    config = DiffLlamaConfig(**sizes, num_attention_heads=MAPS, num_key_value_heads=MAPS, max_position_embeddings=4096)
    theirs = DiffLlamaForCausalLM(config).train()
    sides: dict[str, Forward] = {}
    for name in ("auto", "reference"):
        ours = from_diffllama(theirs).train()
        ours.set_attn_implementation(f"diff_{name}")
        sides["diff-transformer" if name == "auto" else f"diff-transformer, {name}"] = decoder(ours.model)
    for name in ("sdpa", "eager"):
        other = DiffLlamaForCausalLM(copy.deepcopy(config)).train()  # a model writes its implementation to its config
        other.load_state_dict(theirs.state_dict())
        other.set_attn_implementation(name)
        sides[f"transformers DiffLlama, {name}"] = decoder(other.model)
    return sides


def timm_layer() -> dict[str, Forward]:
    """timm's layer and what ``examples/timm_layer.py`` makes of it; empty where timm is not installed."""
    try:
        from timm.layers.diff_attention import DiffAttention
    except ImportError:
        return {}
    torch.manual_seed(0)
    theirs = DiffAttention(WIDTH, MAPS // 2, proj_bias=False).train()
    ours = runpy.run_path(str(EXAMPLES / "timm_layer.py"))["from_timm"](theirs).train()
    return {
        "diff-transformer, without rotary": lambda x: ours(x, is_causal=True)[0],
        "timm DiffAttention": lambda x: theirs(x, is_causal=True),
    }


def measured(sides: Mapping[str, Forward], length: int) -> Iterator[dict]:
    """A row for each side; ratios are over the first, which is ours."""
    x = torch.randn(BATCH, length, WIDTH, requires_grad=True)
    expected = next(iter(sides.values()))(x)
    equal = {
        name: bool((side(x) - expected).abs().max() <= 1e-4 * expected.abs().max()) for name, side in sides.items()
    }
    weight = torch.randn_like(expected)
    runs = {
        "forward": {name: lambda side=side: forward(side, x) for name, side in sides.items() if equal[name]},
        "both": {
            name: lambda side=side: (side(x) * weight).sum().backward() for name, side in sides.items() if equal[name]
        },
    }
    times = {kind: interleaved_times(of, REPEATS, "cpu") for kind, of in runs.items()}
    for name in sides:
        row = {"side": name, "batch": BATCH, "length": length, "width": WIDTH, "maps": MAPS, "dtype": "float32"}
        row["gate"] = "passed" if equal[name] else "failed"
        for kind, of in times.items():
            if name in of:
                first = next(iter(of.values()))
                row |= {f"{kind}_ms": 1e3 * of[name].median, f"{kind}_ratio": of[name].over(first)}
        if equal[name]:
            row["peak_bytes"] = peak_memory(runs["both"][name], "cpu")
        yield row


@torch.no_grad()
def forward(side: Forward, x: Tensor) -> Tensor:
    return side(x)


def rows() -> Iterator[dict]:
    for length in (256, 1024, 4096):
        for sides in (diffllama(), timm_layer()):
            if sides:
                yield from measured(sides, length)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    threads = {"threads": torch.get_num_threads(), "repeats": REPEATS}
    collect("others", rows(), {"device": "cpu", **threads}, out=parser.parse_args().out, on_row=print)
