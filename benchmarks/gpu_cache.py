"""Compiles what benchmarks/gpu.py and the GPU tests launch on a Hopper GPU, without one, into a Triton cache to carry.

python benchmarks/gpu_cache.py OUT.tar.xz          # on the GPU's machine: tar xJf OUT.tar.xz -C /
TRITON_CACHE_DIR=/tmp/diff-transformer-triton python benchmarks/gpu.py

Triton finds a compiled kernel by its source with line numbers, the launch's types and constants, and its own files. So
a cache serves one commit and one version of Triton: run this with the Triton of that machine. Group files name
absolute paths, hence the fixed folder. A kernel that is missing is compiled there, in some seconds.
"""

import argparse
import hashlib
import importlib
import importlib.util
import multiprocessing
import os
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

FOLDER = Path("/tmp/diff-transformer-triton")
KEY = FOLDER / "key.json"  # of the Triton that compiled
KEPT = (".cubin", ".ptx", ".json")  # what a launch reads
ROOT = Path(__file__).resolve().parent.parent
MULTIPROCESSORS = 132
SWITCH = "DIFF_TRANSFORMER_HOPPER"  # "1": the Hopper kernels, "0": without them


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the archive, .tar.xz")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="", help="calls whose names begin so, with commas; what is compiled is kept")
    parser.add_argument("--limit", type=int, default=10**9, help="compile so many kernels only")
    given = parser.parse_args(arguments)
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ["TRITON_CACHE_DIR"] = str(FOLDER)
    FOLDER.mkdir(parents=True, exist_ok=True)
    context, began = multiprocessing.get_context("spawn"), time.monotonic()
    workers = [
        context.Process(target=compile_share, args=(i, given.jobs, given.limit, given.only)) for i in range(given.jobs)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    KEY.write_text(key())
    with tarfile.open(given.out, "w:xz", preset=2) as archive:
        for path in sorted(FOLDER.rglob("*")):
            if path.suffix in KEPT:
                archive.add(path)
    print(f"{given.out}: {given.out.stat().st_size / 2**20:.1f} MiB, {time.monotonic() - began:.0f} s")
    return int(any(worker.exitcode for worker in workers))


def key() -> str:
    """What Triton puts into the key of every kernel: its version, and a digest of its files."""
    import triton
    from triton.runtime.cache import triton_key

    return f"{triton.__version__}-{hashlib.sha256(triton_key().encode()).hexdigest()[:16]}"


def compile_share(share: int, shares: int, limit: int, only: str = "") -> None:
    """Compile every ``shares``-th kernel, beginning with number ``share``."""
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks"), str(ROOT / "tests" / "helpers")]
    from triton.runtime import driver

    driver.set_active(Hopper())
    seen: set[tuple] = set()

    def compile_once(launch: Any) -> None:
        from kernel_compiler import describe

        described = describe(launch)
        key = (described.kernel, *(str(sorted(part.items(), key=str)) for part in described[1:]))
        if key not in seen:
            seen.add(key)
            if len(seen) % shares == share and len(seen) <= limit:
                launch.kernel.warmup(grid=launch.grid, **launch.arguments)

    failed = 0
    with as_on_hopper(compile_once):
        for name, run in launches():
            if not name.startswith(tuple(only.split(","))):
                continue
            began, before = time.monotonic(), len(seen)
            try:
                run()
            except Exception as error:
                failed += 1
                print(f"{name}: {type(error).__name__}: {error}"[:300], flush=True)
            if share == 0 and len(seen) > before:
                print(f"{name}: {len(seen)} kernels, {time.monotonic() - began:.1f} s", flush=True)
    sys.exit(int(failed > 0))


class Hopper:
    """Stands for the driver of a Hopper GPU, so that ``kernel.warmup`` compiles exactly what a launch there would."""

    launcher_cls = None

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_device_interface(self):
        import torch

        return torch.cpu

    def get_active_torch_device(self):
        import torch

        return torch.device("cpu")

    def map_python_to_cpp_type(self, name: str) -> str:
        return name


def as_on_hopper(start: Callable[[Any], None]) -> ExitStack:
    """Context manager in which every decision falls as on a Hopper GPU, and ``start`` gets what would be launched."""
    from kernel_compiler import table_of

    from diff_transformer.ops.hopper.support import unsupported_tensors
    from diff_transformer.ops.triton import decode, launching, operator

    replaced: list[tuple[Any, str, Any]] = [
        (launching.Launch, "start", start),
        (operator, "table_of", lambda x: table_of(90, x.dtype)),
        (launching, "INTERPRETED", True),
        (operator, "INTERPRETED", False),
        (decode, "multiprocessors", lambda device: MULTIPROCESSORS),
        (operator, "unsupported_reason", unsupported_tensors),
        (operator, "_announce", lambda *given: None),
    ]
    stack = ExitStack()
    triton = importlib.import_module("diff_transformer.ops.triton")
    stack.enter_context(patch.object(triton, "_unsupported_device", lambda device, index: None))
    for module, name, value in replaced:
        stack.enter_context(patch.object(module, name, value))
    return stack


def launches() -> Iterator[tuple[str, Callable[[], object]]]:
    """Calls that launch what the stages and tests launch, by name, the stages first."""
    yield from of_stages()
    yield from of_hopper_tests()
    yield from of_attention_tests()
    yield from of_decode_tests()


def of_stages() -> Iterator[tuple[str, Callable[[], object]]]:
    import torch

    import gpu_stages
    from diff_transformer.bench.decode import GPU_GRID
    from diff_transformer.bench.gate import shape_inputs
    from diff_transformer.bench.shapes import Shape
    from diff_transformer.ops import diff_attention, diff_attention_decode

    def pair_heads(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return q[:, 0::2], q[:, 1::2], k[:, 0::2], k[:, 1::2]

    def both(attend: Callable[[], Any], inputs: tuple) -> None:
        with torch.no_grad():
            attend()
        out = attend()
        torch.autograd.grad(out, inputs, torch.randn_like(out))

    def attention(shape: Shape, hopper: str, dtype: torch.dtype) -> None:
        x = shape_inputs(shape, dtype, "cpu")
        with patch.dict(os.environ, {SWITCH: hopper}):
            both(lambda: diff_attention(*x, is_causal=shape.causal, backend="triton"), x)

    for shape in gpu_stages.compiled_shapes():
        for hopper in "10":
            yield f"attention {shape} {hopper}", lambda s=shape, v=hopper: attention(s, v, torch.bfloat16)
    for width, heads in ((128, 12), (64, 16)):
        for length in (128, 555):
            shape = Shape(2, heads, length, width)
            yield f"fp32 {shape}", lambda s=shape: attention(s, "1", torch.float32)

    def decode(batch: int, heads: int, kv_heads: int, cache: int, width: int) -> None:
        q = torch.empty(batch, 2 * heads, 1, width, dtype=torch.bfloat16)
        k = torch.empty(batch, 2 * kv_heads, cache, width, dtype=torch.bfloat16)
        v = torch.empty(batch, kv_heads, cache, 2 * width, dtype=torch.bfloat16)
        with torch.inference_mode():
            diff_attention_decode(*pair_heads(q, k), v, torch.full((), 0.3), backend="triton")

    for s in GPU_GRID:  # empty memory is not touched, so that long caches cost nothing
        yield f"decode {s}", lambda s=s: decode(s.batch, s.heads, s.kv_heads, s.cache, s.width)

    def projected(width: int, heads: int, length: int, hopper: str) -> None:
        """Strides as after the models' projections, and one lambda for all heads."""
        q = torch.randn(1, length, 2 * heads, width).bfloat16().transpose(1, 2).requires_grad_()
        v = torch.randn(1, length, heads, 2 * width).bfloat16().transpose(1, 2).requires_grad_()
        lam = torch.full((), 0.3, requires_grad=True)
        q1, q2, k1, k2 = pair_heads(q, q)
        with patch.dict(os.environ, {SWITCH: hopper}):
            both(lambda: diff_attention(q1, q2, k1, k2, v, lam, is_causal=True, backend="triton"), (q, v, lam))

    for width, heads in ((128, 12), (64, 16), (96, 8), (64, 4)):
        for hopper in "10":
            yield f"model {width} {hopper}", lambda w=width, h=heads, v=hopper: projected(w, h, 512, v)


def of_attention_tests() -> Iterator[tuple[str, Callable[[], object]]]:
    import torch

    tests = loaded("tests/ops/triton/test_attention_gpu.py")
    tests.DEVICE = "cpu"
    half, causal = tests.HALF, tests.CAUSAL
    by_triton = tests.by("triton")

    def run(options: dict, plain: bool = False, **sizes: Any) -> None:
        with patch.dict(os.environ, {SWITCH: "0"} if plain else {}):
            tests.run(by_triton, tests.inputs(**sizes), options)

    for dtype in (*half, torch.float32):
        for D in (64, 128):
            for case, (sizes, options) in tests.FEATURES.items():
                given = {"dtype": dtype, "D": D} | sizes
                yield f"contract {dtype} {D} {case}", lambda o=options, g=given: run(o(), **g)
        for D, Dv in tests.WIDTHS:
            given = {"dtype": dtype, "B": 1, "H": 2, "T": 333, "D": D, "Dv": Dv}
            yield f"widths {dtype} {D} {Dv}", lambda g=given: run(causal, **g)
    for dtype in half:
        for D in (64, 128):
            for case in tests.PLAIN:
                sizes, options = tests.FEATURES[case]
                given = {"dtype": dtype, "D": D} | sizes
                yield f"plain {dtype} {D}", lambda o=options, g=given: run(o(), True, **g)
            for shared in (False, True):
                yield f"documents {dtype} {D}", lambda a=(dtype, D, shared): documents(tests, *a)
            given = {"dtype": dtype, "D": D, "B": 1, "H": 1, "T": 4096}
            yield f"long {dtype} {D}", lambda g=given: run(causal, **g)


def documents(tests: ModuleType, dtype: Any, D: int, shared: bool) -> None:
    import torch

    from diff_transformer.ops import diff_attention_varlen

    x, ends = tests.packed(dtype, D, shared), torch.tensor(tests.ENDS, dtype=torch.int32)

    def attend(*x: Any, **options: Any) -> Any:
        return diff_attention_varlen(*x, ends, ends, backend="triton", **options)

    with patch.dict(os.environ, {SWITCH: "0"}):
        tests.run(attend, x, tests.CAUSAL)


def of_decode_tests() -> Iterator[tuple[str, Callable[[], object]]]:
    import torch

    from diff_transformer.ops import diff_attention_decode
    from diff_transformer.testing import make_inputs

    tests = loaded("tests/ops/triton/test_decode_gpu.py")

    def decode(**sizes: Any) -> None:
        given = {"B": 2, "H": 4, "T": 1, "D": 64, "requires_grad": False} | sizes
        diff_attention_decode(*make_inputs(**given), backend="triton")

    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for S in tests.LENGTHS:
            for sizes in tests.SIZES:
                yield f"decode test {dtype} {S}", lambda g={"dtype": dtype, "S": S} | sizes: decode(**g)


def of_hopper_tests() -> Iterator[tuple[str, Callable[[], object]]]:
    import torch
    from hopper_check import forms_of

    from diff_transformer.ops.call import Call
    from diff_transformer.ops.hopper import backward, forward, support
    from diff_transformer.ops.triton.launching import launched
    from diff_transformer.testing import make_inputs

    def run(dtype: torch.dtype, causal: bool, form: str) -> None:
        D = support.D
        x = make_inputs(2, 2, 63, D, S=63, G=1, dtype=dtype, strided=True, requires_grad=False)
        dout = torch.randn(2, 2, 63, 2 * D).to(dtype)
        for given in forms_of(x):
            k2 = None if given.k2 is given.k1 else given.k2
            call = Call(*given[:3], k2, *given[4:], scale=D**-0.5, is_causal=causal)
            if form == "forward":
                for save in (True, False):
                    launched(*forward.plan_forward(call, save))
            else:
                saved = [dout, dout, torch.zeros(2, 2, 63), torch.zeros(2, 2, 63)]
                launched(*backward.plan_backward(call, dout, saved))

    for form in ("forward", "backward"):
        for dtype in support.DTYPES:
            for causal in (True, False):
                yield f"hopper {form} {dtype}", lambda a=(dtype, causal, form): run(*a)


def loaded(path: str) -> ModuleType:
    """A file of tests as a module."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    sys.exit(main())
