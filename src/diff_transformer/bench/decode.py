"""Decoding: one query a sequence over a long cache, differential against softmax attention, and the models' own.

Both kinds read the same cache: keys [B, 2g, S, d] and as many values, which differential attention sees as g heads of
2d. So both have the same bytes to move, and the rate is bytes over time as a share of the measured copy. Calls rotate
among caches that together exceed the last-level cache several times; on a GPU one round is one replayed CUDA graph.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from diff_transformer.bench.attention import LOST, DeviceLost, counts, judge, ratio
from diff_transformer.bench.caches import Caches, DecodeShape, KeysValues, fits
from diff_transformer.bench.ceilings import ceilings
from diff_transformer.bench.contenders import BASELINE, KERNELS, default_kernel, named, sdpa_on
from diff_transformer.bench.generation import ModelSetting, model_rows
from diff_transformer.bench.machine import machine
from diff_transformer.bench.record import Deadline, collect
from diff_transformer.bench.timing import Times, interleaved_times
from diff_transformer.checks import require_positive
from diff_transformer.ops import available_backends


def run_decode_benchmark(
    shapes: list[DecodeShape],
    models: list[ModelSetting] | None = None,
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,),
    *,
    device: str = "cpu",
    backends: list[str] | None = None,
    kernels: list[str] | None = None,
    repeats: int = 15,
    seconds: float | None = None,
    seconds_each: float | None = None,
    out: Path | None = None,
    on_row: Callable[[dict], None] | None = None,
) -> dict:
    """The record: {"rows": [...], "provenance": {...}}; ``on_row`` sees each row, and ``out`` is written, as they come.

    A row of kind "operator" has backend, role, dtype, batch, heads, kv_heads, cache, width, gate, us (microseconds a
    call), us_quartiles, ratio (over softmax attention on SDPA's own choice, in the same turns), ratios over its other
    kernels, gb_per_s and copy_share (of the bytes a call must move), caches (rotated) and graph (whether replayed).
    Rows of kind "model" are those of ``model_rows``. Parameters as in ``run_attention_benchmark``.
    """
    require_positive(repeats=repeats, seconds=seconds, seconds_each=seconds_each)
    cuda = torch.device(device).type == "cuda"
    kernels = (list(KERNELS) if cuda else []) if kernels is None else kernels
    ceiling = ceilings(device, dtypes)
    deadline = Deadline(seconds)

    def of_models(compiled: bool) -> Iterator[dict]:
        for setting in models or []:
            if setting.compiled == compiled:
                if deadline.passed():
                    yield {"unfinished": f"out of time before the models at {setting}"}
                    return
                yield from model_rows(setting, device, repeats)

    def rows() -> Iterator[dict]:
        yield from of_models(compiled=False)
        left = [(dtype, shape) for dtype in dtypes for shape in shapes if fits(shape, dtype, device)]
        while left:
            if deadline.passed():
                yield {"unfinished": f"out of time before {', '.join(f'{s} in {d}' for d, s in left)}"}
                return
            dtype, shape = left.pop(0)
            names = default_backends(device, dtype) if backends is None else backends
            yield from measure(Caches(shape, dtype, device), names, kernels, ceiling, repeats, seconds_each)
        yield from of_models(compiled=True)  # last: compiling takes most of a minute

    settings = {"repeats": repeats, "device": device, "ceilings": ceiling, "machine": machine(device)}
    settings["baseline"] = f"{BASELINE}: scaled_dot_product_attention, 2 * heads, the kernel that PyTorch chooses"
    return collect("decode", rows(), settings, out=out, on_row=on_row)


@torch.inference_mode()
def measure(
    caches: Caches,
    backends: list[str],
    kernels: list[str],
    ceiling: dict,
    repeats: int,
    seconds_each: float | None = None,
) -> Iterator[dict]:
    """A row for each kernel of the baseline and each backend."""
    shape, first = caches.shape, caches.all[0]
    calls: dict[str, Callable[[KeysValues], Tensor]] = {}
    facts: dict[str, dict] = {}
    values = first.v.view_as(first.k)
    chosen = default_kernel(caches.q, first.k, values, False, enable_gqa=shape.heads != shape.kv_heads)
    for kernel in (None, *(k for k in kernels if k != chosen)):
        name, attention = named(BASELINE, kernel), sdpa_on(kernel)
        calls[name] = lambda cache, attention=attention: caches.softmax(cache, attention)
        facts[name] = {"role": "baseline", "sdpa": kernel or chosen}
    for name in backends:
        calls[name] = lambda cache, name=name: caches.diff(cache, name)
        facts[name] = {"role": "backend"}
    runs, graphs = {}, {}
    for name, call in calls.items():
        run, check = lambda call=call: call(first), lambda name=name: caches.gate(name)
        facts[name]["gate"] = judge(facts[name]["role"], run, check)
        if facts[name]["gate"].startswith(LOST):
            yield first_fields(caches, name) | facts[name]
            raise DeviceLost(f"{name} over {shape}: {facts[name]['gate']}")
        if counts(facts[name]["role"], facts[name]["gate"]):
            runs[name, "decode"], graphs[name] = as_graph(caches, call)
    times = interleaved_times(runs, repeats, caches.device, seconds=seconds_each)
    others = [n for n in graphs if facts[n]["role"] == "baseline" and n != BASELINE]
    for name in calls:
        row = first_fields(caches, name) | facts[name]
        if name in graphs:
            row |= timed_fields(caches, times[name, "decode"], ceiling["copy_gb_per_s"])
            row["ratio"] = ratio(times, name, BASELINE, "decode")
            row["ratios"] = {b: ratio(times, name, b, "decode") for b in others}
            row["graph"] = graphs[name]
        yield row


def first_fields(caches: Caches, name: str) -> dict:
    """Of a row: who, and over which cache."""
    dtype = str(caches.dtype).removeprefix("torch.")
    return {"kind": "operator", "backend": name, "dtype": dtype, **asdict(caches.shape)}


def as_graph(caches: Caches, call: Callable[[KeysValues], Tensor]) -> tuple[Callable[[], object], bool]:
    """A function that calls once with every cache: the replay of a CUDA graph where that can be captured."""

    def one_round() -> None:
        for cache in caches.all:
            call(cache)

    if torch.device(caches.device).type != "cuda":
        return one_round, False
    try:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            one_round()
    except RuntimeError:
        torch.cuda.synchronize()
        return one_round, False
    return graph.replay, True


def timed_fields(caches: Caches, times: Times, copy_gb_per_s: float) -> dict:
    """Time of one call and the rate at which it moves what it must."""
    count, size = len(caches.all), caches.shape.bytes(caches.q.element_size())
    rate = size * count / times.median / 1e9
    return {
        "us": round(times.median / count * 1e6, 3),
        "us_quartiles": [round(times.low / count * 1e6, 3), round(times.high / count * 1e6, 3)],
        "turns": times.turns,
        "bytes": size,
        "caches": count,
        "gb_per_s": round(rate, 2),
        "copy_share": round(rate / copy_gb_per_s, 4),
    }


def default_backends(device: str, dtype: torch.dtype) -> list[str]:
    """Available ones; neither the reference nor FlexAttention, which is compiled anew for each length, decodes."""
    return [name for name in available_backends(device, dtype) if name not in ("reference", "flex")]
