"""The stages of gpu.py, each with its sizes on a GPU and, dry, on the CPU.

Called (dry, seconds, file to write).
"""

import importlib.util
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path

import hopper_check
import torch

from diff_transformer.bench import decode as decoding
from diff_transformer.bench import pair, timing
from diff_transformer.bench.attention import run_attention_benchmark
from diff_transformer.bench.record import Options
from diff_transformer.bench.run import shown
from diff_transformer.bench.shapes import SHORTER, Shape, gpu_shape, parse_shapes
from diff_transformer.ops import available_backends
from diff_transformer.ops.hopper.support import D, unsupported_installation
from gpu_records import Unfinished

# What is experimental, and what takes longest, first. Files are named, since to collect all tests takes long.
TESTS = {
    "for a GPU": [
        "-m",
        "gpu",
        *(f"tests/ops/triton/test_{name}_gpu.py" for name in ("attention", "decode")),
        "tests/ops/hopper/test_kernels.py",
    ],
    "of the kernels anywhere": [
        "-m",
        "not slow and not gpu",
        *(f"tests/ops/{name}.py" for name in ("triton/test_attention", "triton/test_decode", "test_varlen")),
    ],
}
DRY_TESTS = {
    "of the reference": ["-m", "not slow and not gpu", "tests/ops/test_reference.py"],
    "of arguments": ["-m", "not slow and not gpu", "tests/ops/test_arguments.py"],
}
FIRST_TESTS = 0.9  # of the stage's time
WORKERS = 14  # compiling is most of the time of a test
PUBLIC = ("flash", "cudnn")  # kernels of SDPA; the others are slower, and are timed on request
SLOW = ("reference", "blockwise")  # not timed on a GPU
TINY = "1x2x40x8,1x2x33x8n"
TINY_PAIR = pair.PairSetting("debug", 2, 32, {"num_hidden_layers": 1}, torch.float32)


def operator_shapes() -> list[Shape]:
    """The goals' length first, then half of it, then without the causal limit, then the other lengths."""
    lengths = (4096, 2048, 16384, 1024, 8192, 512, 65536, 32768)
    causal = [gpu_shape(length, width) for length in lengths for width in (128, 64)]
    others = [gpu_shape(4096, width, causal=False) for width in (128, 64)] + [gpu_shape(4096, 96)]
    return causal[:2] + others + causal[2:] + [gpu_shape(4096, 96, causal=False)]


def hopper(dry: bool, seconds: float, out: Path) -> None:
    """Each form of the Hopper kernels against the fp64 reference; later stages do not launch kernels that fail."""
    device, forms = device_of(dry), list(product(("forward", "backward"), (True, False)))
    refused = None if device == "cpu" else unsupported_installation(0)

    def rows() -> Iterator[dict]:
        context = multiprocessing.get_context("fork" if dry else "spawn")
        with ProcessPoolExecutor(len(forms), mp_context=context) as pool:
            results = [pool.submit(check_hopper, device, *form) for form in forms if refused is None]
            for kernels, causal in forms:
                row = {"form": kernels, "width": D, "causal": causal, "dtype": "bfloat16"}
                yield row | (results.pop(0).result() if refused is None else {"gate": f"failed: {refused}"})

    options = Options(device, out=out, on_row=_say_row)
    record = options.collect("hopper", [("", rows)], forms=Counter(kernels for kernels, _ in forms))
    failed = [row for row in record["rows"] if row["gate"] != "passed"]
    if failed and refused is None:
        raise SystemExit(f"{len(failed)} Hopper kernels fail, and are not used in what follows: see {out.name}")


def check_hopper(device: str, kernels: str, causal: bool) -> dict:
    """The verdict of a row, in a process of the pool: after a fault the device may be lost to it."""
    began = time.monotonic()
    try:
        hopper_check.check(torch.device(device, 0), torch.bfloat16, causal, kernels)
        gate = "passed"
    except Exception as error:  # a compiler's errors have no common base
        gate = f"failed: {type(error).__name__}: {error}"[:1000]
    return {"gate": gate, "seconds": round(time.monotonic() - began, 2)}


def correctness(dry: bool, seconds: float, out: Path) -> None:
    """The tests that need a GPU (dry: some others)."""
    end = time.monotonic() + seconds
    tests = {}
    for i, (name, selected) in enumerate((DRY_TESTS if dry else TESTS).items()):
        left = end - time.monotonic()
        tests[name] = run_tests(selected, left if i else FIRST_TESTS * left, parallel=not dry)
    statuses = [call["exit_status"] for call in tests.values()]
    Options(device_of(dry), out=out).collect("correctness", [], tests=tests)
    if any(status not in (0, None) for status in statuses):
        raise SystemExit(f"tests ended with {statuses}")
    if None in statuses:
        raise Unfinished(f"not all tests ran: {', '.join(name for name in tests if not tests[name]['finished'])}")


def run_tests(selected: list[str], seconds: float, parallel: bool) -> dict:
    """The output of pytest; its exit status is None if it was stopped."""
    workers = ["-n", str(WORKERS), "--maxschedchunk=1"] if parallel and importlib.util.find_spec("xdist") else []
    quiet = ["-q", "-W", "ignore", "--tb=short", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *quiet, "--maxfail=20", *workers, *selected]
    began = time.monotonic()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            status = process.wait(max(0.9 * seconds, 1))
        except subprocess.TimeoutExpired:
            status = None
            process.send_signal(signal.SIGINT)  # it then says what has failed so far
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1 * seconds, 1))
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        output.seek(0)
        text = output.read().decode(errors="replace")[-8000:]
    took = round(time.monotonic() - began, 1)
    print(f"{text}\ntests: exit status {status}, {took} s", flush=True)
    facts = {"command": command[1:], "exit_status": status, "output": text, "seconds": took}
    return facts | {"finished": status is not None}


def compiled_shapes() -> list[Shape]:
    """One short sequence of each width, with and without the causal limit, and one as the gates take it, for
    gpu_cache.py: lengths are not compiled in, but whether 16 divides a stride is."""
    kinds = dict.fromkeys((shape.width, shape.heads, shape.causal) for shape in operator_shapes())
    return [Shape(2, heads, length, width, causal) for length in (128, SHORTER) for width, heads, causal in kinds]


def attention(dry: bool, seconds: float, out: Path) -> None:
    """Our backends against every kernel of softmax attention and both forms of FlashDiffAttn."""
    _operator(dry, seconds, out, parse_shapes(TINY) if dry else operator_shapes(), torch.bfloat16)


def attention_fp32(dry: bool, seconds: float, out: Path) -> None:
    """fp32 without tensor cores: whether our kernels are faster than two calls of SDPA."""
    shapes = parse_shapes(TINY)[:1] if dry else [gpu_shape(2048, 128), gpu_shape(2048, 64)]
    _operator(dry, seconds, out, shapes, torch.float32)


def _operator(dry: bool, seconds: float, out: Path, shapes: list[Shape], dtype: torch.dtype) -> None:
    device, half = device_of(dry), dtype == torch.bfloat16
    _finish(run_attention_benchmark(
        shapes, (dtype,), backends=timed_backends(dry, device, dtype),
        kernels=list(PUBLIC) if half else [], with_rivals=half, **_options(dry, device, seconds, 0.1, out),
    ))  # fmt: skip


def timed_backends(dry: bool, device: str, dtype: torch.dtype = torch.bfloat16) -> list[str]:
    names = available_backends(device, dtype)
    return [name for name in names if name not in SLOW or (dry and name == "blockwise")]


def decode(dry: bool, seconds: float, out: Path) -> None:
    """The operator over long caches, and generation by the pair of models."""
    shapes = [decoding.DecodeShape(2, 2, 1, 40, 8)] if dry else decoding.GPU_GRID
    eager = [setting for setting in pair.MODELS["cuda"] if not setting.compiled]
    _decode(dry, seconds, out, shapes, [replace(TINY_PAIR, tokens=4)] if dry else eager)


def decode_compiled(dry: bool, seconds: float, out: Path) -> None:
    """Generation by the pair as a CUDA graph, whose compilation takes most of a minute."""
    tiny = [pair.PairSetting("debug", batch, 24, dtype=torch.float32, compiled=True, tokens=4) for batch in (1, 2)]
    _decode(dry, seconds, out, [], tiny if dry else [s for s in pair.MODELS["cuda"] if s.compiled])


def _decode(dry: bool, seconds: float, out: Path, shapes: list, models: list) -> None:
    device = device_of(dry)
    _finish(decoding.run_decode_benchmark(
        shapes, models,
        backends=timed_backends(dry, device), kernels=list(PUBLIC),
        **_options(dry, device, seconds, 0.1, out),
    ))  # fmt: skip


def throughput(dry: bool, seconds: float, out: Path) -> None:
    """Table 7."""
    settings = [TINY_PAIR] if dry else [s for s in pair.SETTINGS["cuda"] if not s.compiled]
    _finish(pair.run_pair_benchmark(settings, **_options(dry, device_of(dry), seconds, 3, out)))


def _options(dry: bool, device: str, seconds: float, seconds_each: float, out: Path) -> dict:
    return {
        "device": device, "repeats": 2 if dry else 9, "seconds": seconds, "seconds_each": seconds_each, "out": out,
        "on_row": lambda row: print(shown(row), flush=True),
    }  # fmt: skip


def _finish(record: dict) -> None:
    """Raise Unfinished if the time ran out before everything was measured."""
    if "unfinished" in record:
        raise Unfinished(record["unfinished"])


def device_of(dry: bool) -> str:
    """Raise RuntimeError if a GPU is needed and there is none; show the backends' log."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
    logging.getLogger("diff_transformer").setLevel(logging.INFO)
    if dry:
        torch.set_num_threads(1)
        timing.COPY_BYTES["cpu"] = decoding.ROTATED_BYTES = 2**16
        return "cpu"
    if not torch.cuda.is_available():
        raise RuntimeError("PyTorch sees no CUDA device here; --dry runs every stage on the CPU")
    return "cuda"


def _say_row(row: dict) -> None:
    print("  ".join(map(str, row.values())), flush=True)


STAGES: dict[str, Callable[[bool, float, Path], None]] = {
    "hopper": hopper,
    "correctness": correctness,
    "attention": attention,
    "attention_fp32": attention_fp32,
    "decode": decode,
    "decode_compiled": decode_compiled,
    "throughput": throughput,
}
