"""Times other tiles of the Triton and Hopper kernels beside those in use, on a Hopper GPU.

``rows`` yields a row for each kernel, width and tile. ``gpu_cache.py`` compiles the same launches. As a script, it runs
each kernel once for ncu: python benchmarks/gpu_sweep.py cuda 128
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from diff_transformer.bench.record import in_turn
from diff_transformer.bench.timing import interleaved_times
from diff_transformer.ops import diff_attention
from diff_transformer.ops.call import Call
from diff_transformer.ops.hopper import backward as hopper_backward
from diff_transformer.ops.hopper import forward as hopper_forward
from diff_transformer.ops.triton import backward, forward
from diff_transformer.ops.triton.launching import Launch, run
from diff_transformer.ops.triton.tile_sizes import HOPPER
from diff_transformer.ops.triton.tile_sizes import TileSize as C
from diff_transformer.testing import make_inputs

HEADS = {64: 16, 96: 8, 128: 12}  # of the models with these widths


def grid(*tiles: tuple[int, int, int, tuple[int, ...]], fused: bool) -> list[C]:
    """Tiles of rows, keys and warps, each with several numbers of stages."""
    return [C(rows, keys, warps, n, fused) for rows, keys, warps, stages in tiles for n in stages]


FEATURES = "grouped, window"  # queries in groups of four over shared keys, each of which sees 1024 keys
# Beside the tile in use, which is timed too.
TILES: dict[tuple[str, int], list[Any]] = {
    (f"forward, {FEATURES}", 64): grid((128, 32, 8, (3,)), (128, 64, 8, (3,)), (64, 64, 4, (2,)), fused=True),
    (f"forward, {FEATURES}", 96): grid((128, 64, 8, (2,)), fused=False),
    (f"forward, {FEATURES}", 128): grid((128, 32, 8, (2, 3)), (128, 64, 8, (2,)), fused=False),
    (f"dkdv, {FEATURES}", 64): grid((32, 128, 8, (2,)), fused=False) + grid((32, 128, 8, (2,)), fused=True),
    (f"dkdv, {FEATURES}", 96): grid((16, 128, 8, (1,)), fused=False),
    (f"dkdv, {FEATURES}", 128): grid((16, 128, 8, (1,)), (32, 128, 8, (2,)), fused=False),
    (f"dq, {FEATURES}", 64): grid((128, 64, 8, (2, 3)), fused=True),
    (f"dq, {FEATURES}", 96): grid((128, 64, 8, (1,)), fused=False),
    (f"dq, {FEATURES}", 128): grid((128, 64, 8, (1,)), fused=False),
    ("hopper forward", 128): [{"STAGES": 2}, {"KEYS": 32, "STAGES": 4}],
    ("hopper dkdv", 128): [{"STAGES": 1}],
    ("hopper dq", 128): [{"KEY_STAGES": 1}],
    ("forward", 64): grid((64, 64, 4, (2, 3, 4)), (64, 32, 4, (3, 4)), (128, 64, 8, (3,)), fused=True),
    ("forward", 128): grid((64, 64, 4, (2, 3)), (64, 32, 4, (3, 4)), (128, 64, 8, (2, 3)), (128, 32, 8, (3, 4)),
                           fused=False),
    ("forward", 96): grid((64, 64, 4, (2, 3)), (128, 64, 8, (2, 3)), (64, 32, 4, (3,)), fused=False),
    ("dkdv", 64): grid((32, 64, 4, (1, 2, 3)), (16, 64, 4, (2, 3, 4)), (32, 128, 8, (2, 3)), (64, 64, 4, (1,)),
                       fused=True),
    ("dkdv", 128): grid((32, 128, 8, (2, 3)), (16, 128, 8, (3,)), (32, 64, 4, (1, 2, 3)), (16, 64, 4, (2, 3)),
                        fused=False),
    ("dkdv", 96): grid((32, 128, 8, (1, 2)), (16, 128, 8, (2,)), (32, 64, 4, (1, 2)), (64, 64, 4, (1,)), fused=False)
    + grid((32, 64, 4, (1, 2)), (16, 64, 4, (2,)), fused=True),
    ("dq", 64): grid((128, 64, 8, (3,)), (64, 64, 4, (2, 3, 4)), (64, 32, 4, (3, 4)), fused=True),
    ("dq", 128): grid((128, 64, 8, (2, 3)), (64, 64, 4, (1, 2)), (64, 32, 4, (2, 3)), (128, 32, 8, (3,)),
                      (128, 128, 8, (1,)), fused=False),
    ("dq", 96): grid((128, 64, 8, (2,)), (64, 64, 4, (1, 2)), (64, 32, 4, (2, 3)), fused=False)
    + grid((64, 32, 4, (2,)), (64, 64, 4, (1,)), fused=True),
}  # fmt: skip


def launches(kernel: str, width: int, tile: Any, device: str, batch: int, heads: int, length: int) -> list[Launch]:
    """What a tile of a kernel launches, on the results of a real forward where there is a GPU; None: that in use."""
    features = kernel.endswith(FEATURES)
    kernel = kernel.removesuffix(f", {FEATURES}")
    x = make_inputs(batch, heads, length, width, G=heads // 4 if features else None, dtype=torch.bfloat16,
                    device=device, drawn_on=device, requires_grad=False)  # fmt: skip
    call = Call(*x, scale=width**-0.5, is_causal=True, window=min(1024, length // 2) if features else None)
    table = HOPPER if tile is None or isinstance(tile, dict) else HOPPER | {kernel: {(width, 2 * width): (tile,)}}
    (_, *saved), planned = forward.plan_forward(call, True, table)
    with ExitStack() as stack:
        if kernel.startswith("hopper "):
            module = hopper_forward if kernel == "hopper forward" else hopper_backward
            for name, value in (tile or {}).items():
                stack.enter_context(patch.object(module, name, value))
        if kernel == "hopper forward":
            return hopper_forward.plan_forward(call, True)[1]
        if kernel == "forward":
            return planned
        if device != "cpu":
            run(planned, torch.device(device))
        if kernel.startswith("hopper "):
            found = hopper_backward.plan_backward(call, torch.randn_like(saved[0]), saved)[1]
        else:
            found = backward.plan_backward(call, torch.randn_like(saved[0]), saved, table)[1]
    if device != "cpu":
        run(found[:1], torch.device(device))  # the sums of rows, which the other kernels read
    wanted = "bwd_dq" if kernel.endswith("dq") else "bwd_dkdv"
    return [launch for launch in found if getattr(launch.kernel, "fn", launch.kernel).__name__.startswith(wanted)]


def rows(device: str, seconds: float, repeats: int) -> Iterator[dict]:
    tiles = TILES if device != "cpu" else ()
    work = [(f"{kernel} of width {width}", partial(rows_of, kernel, width, device, repeats)) for kernel, width in tiles]
    return in_turn(work, seconds)


def rows_of(kernel: str, width: int, device: str, repeats: int) -> Iterator[dict]:
    """Milliseconds of each tile: all launches that make up the kernel, in turns."""
    runs: dict[str, Callable[[], None]] = {}
    shape = (4, HEADS[width], 4096)
    first = {"kernel": kernel, "width": width, "batch": shape[0], "heads": shape[1], "length": shape[2]}
    for tile in (None, *TILES[kernel, width]):
        try:
            found = launches(kernel, width, tile, device, *shape)

            def timed(found: list[Launch] = found) -> None:
                run(found, torch.device(device))

            timed()
            torch.cuda.synchronize()
            runs[name_of(tile)] = timed
        except Exception as error:
            yield {**first, "tile": name_of(tile), "gate": f"failed: {type(error).__name__}: {error}"[:300]}
    times = interleaved_times(runs, repeats, device, seconds=0.1, warmup=1)
    for tile, t in sorted(times.items(), key=lambda item: item[1].median):
        quartiles = [round(t.low * 1e3, 4), round(t.high * 1e3, 4)]
        yield {**first, "tile": tile, "ms": round(t.median * 1e3, 4), "quartiles": quartiles}


def name_of(tile: Any) -> str:
    if isinstance(tile, dict):
        return ", ".join(f"{name} {value}" for name, value in tile.items())
    if tile is None:
        return "in use"
    return f"{tile.BLOCK_M}x{tile.BLOCK_N}, {tile.num_warps} warps, {tile.num_stages} stages{', fused' * tile.fused}"


def profiled(device: str, width: int) -> None:
    """One launch of each kernel between the profiler's marks, after one that compiles."""
    cuda = device == "cuda"
    sizes = (4, HEADS[width], 4096) if cuda else (1, 1, 40)
    x = make_inputs(*sizes, width, dtype=torch.bfloat16, device=device, drawn_on=device)
    backend = "triton" if cuda else "blockwise"

    def run(hopper: str) -> None:
        with patch.dict("os.environ", {"DIFF_TRANSFORMER_HOPPER": hopper}):
            out = diff_attention(*x, is_causal=True, backend=backend)
            torch.autograd.grad(out, x, torch.ones_like(out))

    for hopper in ("1", "0"):
        run(hopper)
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
        run(hopper)
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()


if __name__ == "__main__":
    profiled(sys.argv[1], int(sys.argv[2]))
