"""Times other tiles of the plain Triton kernels beside those in use, on a Hopper GPU.

``rows`` yields a row for each kernel, width and tile. ``gpu_cache.py`` compiles the same launches. As a script, it runs
each kernel once for ncu: python benchmarks/gpu_sweep.py cuda 128
"""

import itertools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from diff_transformer.bench.timing import interleaved_times
from diff_transformer.ops import diff_attention
from diff_transformer.ops.triton import backward, backward_form, configurations, forward, launching
from diff_transformer.ops.triton.call import Call
from diff_transformer.ops.triton.configurations import Configuration as C
from diff_transformer.testing import make_inputs

HEADS = {64: 16, 128: 12}  # of the models with these widths
# The first of each is in use.
TILES = {
    ("forward", 64): [C(128, 32, 8, 3), C(128, 64, 8, 2), C(128, 64, 8, 3), C(64, 64, 4, 2), C(64, 64, 4, 3),
                      C(128, 64, 8, 2, False), C(128, 64, 8, 3, False), C(128, 128, 8, 2, False),
                      C(64, 64, 4, 3, False), C(64, 128, 4, 2, False), C(128, 32, 8, 4)],
    ("forward", 128): [C(128, 32, 8, 2, False), C(128, 32, 8, 3, False), C(128, 64, 8, 2, False),
                       C(128, 64, 8, 1, False), C(64, 64, 4, 2, False), C(64, 32, 4, 2, False),
                       C(64, 64, 8, 2, False), C(64, 128, 8, 1, False)],
    ("dkdv", 64): [C(32, 128, 8, 2, False), C(64, 128, 8, 2, False), C(64, 64, 4, 2, False), C(64, 64, 8, 2),
                   C(32, 64, 4, 2), C(64, 64, 4, 2), C(32, 128, 8, 3, False), C(32, 128, 8, 2),
                   C(64, 128, 8, 1, False)],
    ("dkdv", 128): [C(16, 128, 8, 1, False), C(32, 128, 8, 1, False), C(32, 128, 8, 2, False),
                    C(64, 64, 8, 1, False), C(32, 64, 4, 1, False), C(64, 64, 4, 1, False), C(32, 64, 8, 2, False),
                    C(16, 128, 8, 2, False)],
    ("dq", 64): [C(128, 64, 8, 2), C(128, 32, 8, 2), C(64, 64, 4, 2), C(128, 64, 8, 3), C(128, 128, 8, 1),
                 C(64, 128, 4, 1), C(128, 32, 8, 3), C(64, 32, 4, 3)],
    ("dq", 128): [C(128, 64, 8, 1, False), C(128, 32, 8, 1, False), C(128, 32, 8, 2, False), C(64, 64, 4, 1, False),
                  C(64, 64, 8, 1), C(64, 32, 8, 2), C(64, 64, 8, 2, False), C(128, 64, 8, 2, False)],
    ("one_pass", 64): [C(32, 128, 8, 2, False), C(64, 64, 8, 2), C(64, 64, 4, 2, False), C(64, 32, 8, 2),
                       C(64, 64, 8, 1, False), C(32, 64, 4, 2, False)],
    ("one_pass", 128): [C(64, 32, 8, 1, False), C(64, 64, 8, 1, False), C(32, 64, 8, 1, False),
                        C(32, 128, 8, 1, False), C(64, 32, 8, 2, False)],
}  # fmt: skip


class Launch(NamedTuple):
    kernel: Any
    grid: tuple
    arguments: Any
    constants: dict[str, Any]


def launches(kernel: str, width: int, tile: C, device: str, batch: int, heads: int, length: int) -> list[Launch]:
    """What a tile of a kernel launches, on the results of a real forward where there is a GPU."""
    x = make_inputs(batch, heads, length, width, dtype=torch.bfloat16, device=device, drawn_on=device,
                    requires_grad=False)  # fmt: skip
    call = Call(*x, scale=width**-0.5, is_causal=True)
    table, found = configurations.HOPPER, []

    def configuration(name: str, call: Call, mask_by_query: bool) -> C:
        return tile if name == kernel else table[name][width, 2 * width][0]

    def record(*launched: Any) -> None:
        found.append(Launch(*launched))

    with ExitStack() as stack:
        for module in (forward, backward):
            stack.enter_context(patch.object(module, "configuration", configuration))
        if kernel == "forward":
            stack.enter_context(patch.object(forward, "launch", record))
            forward.launch_forward(call, True)
        else:
            saved = forward.launch_forward(call, True)
            stack.enter_context(patch.object(backward, "launch", record))
            backward.launch_backward(call, torch.randn_like(saved[0]), saved, kernel == "one_pass")
    wanted = {"forward": "forward_kernel", "dq": "bwd_dq_kernel"}.get(kernel, "bwd_dkdv_kernel")
    return [launch for launch in found if wanted in str(getattr(launch.kernel, "fn", launch.kernel))]


def rows(device: str, seconds: float, repeats: int) -> Iterator[dict]:
    end = time.monotonic() + seconds
    dry = device == "cpu"
    for kernel, width in TILES if not dry else ():
        if time.monotonic() > end:
            yield {"unfinished": f"out of time before {kernel} of width {width}"}
            return
        yield from rows_of(kernel, width, device, repeats)


def rows_of(kernel: str, width: int, device: str, repeats: int) -> Iterator[dict]:
    """Milliseconds of each tile: all launches that make up the kernel, in turns."""
    runs: dict[C, Callable[[], None]] = {}
    shape = (4, HEADS[width], 4096)
    first = {"kernel": kernel, "width": width, "batch": shape[0], "heads": shape[1], "length": shape[2]}
    for tile in TILES[kernel, width]:
        try:
            found = launches(kernel, width, tile, device, *shape)

            def run(found: list[Launch] = found) -> None:
                for launch in found:
                    launching.launch(*launch)

            run()
            torch.cuda.synchronize()
            runs[tile] = run
        except Exception as error:
            yield {**first, "tile": list(tile), "gate": f"failed: {type(error).__name__}: {error}"[:300]}
    times = interleaved_times(runs, repeats, device, seconds=0.1, warmup=1)
    for tile, t in sorted(times.items(), key=lambda item: item[1].median):
        quartiles = [round(t.low * 1e3, 4), round(t.high * 1e3, 4)]
        in_use = tile == TILES[kernel, width][0]
        yield {**first, "tile": list(tile), "in_use": in_use, "ms": round(t.median * 1e3, 4), "quartiles": quartiles}


def profiled(device: str, width: int) -> None:
    """One launch of each kernel between the profiler's marks, after one that compiles."""
    cuda = device == "cuda"
    sizes = (4, HEADS[width], 4096) if cuda else (1, 1, 40)
    x = make_inputs(*sizes, width, dtype=torch.bfloat16, device=device, drawn_on=device)
    backend = "triton" if cuda else "blockwise"
    torch.use_deterministic_algorithms(False)

    def run(form: str, gluon: str) -> None:
        with backward_form(form), patch.dict("os.environ", {"DIFF_TRANSFORMER_GLUON": gluon}):
            out = diff_attention(*x, is_causal=True, backend=backend)
            torch.autograd.grad(out, x, torch.ones_like(out))

    for form, gluon in itertools.product(("two_pass", "one_pass"), ("1", "0")):
        run(form, gluon)
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
        run(form, gluon)
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()


if __name__ == "__main__":
    profiled(sys.argv[1], int(sys.argv[2]))
