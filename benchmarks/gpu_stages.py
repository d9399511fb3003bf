"""The stages of gpu.py, each with its sizes on a GPU and, dry, on the CPU. Called (dry, seconds, file to write)."""

import logging
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from diff_transformer.bench import caches, ceilings, generation, pair_throughput, tables
from diff_transformer.bench.attention import LOST, DeviceLost, run_attention_benchmark, verdict
from diff_transformer.bench.contenders import KERNELS, backend_contender
from diff_transformer.bench.decode import run_decode_benchmark
from diff_transformer.bench.gates import Gate
from diff_transformer.bench.machine import machine
from diff_transformer.bench.record import collect
from diff_transformer.bench.shapes import Shape, gpu_shape, parse_shapes
from diff_transformer.ops import available_backends

SLOW = ("reference", "blockwise", "flex")  # on a GPU: they have a stage of their own
TINY = "1x2x40x8,1x2x33x8n"
NO_TESTS = 5  # pytest's exit status where nothing was collected


def operator_shapes() -> list[Shape]:
    """The goals' length first, then the other lengths, then without the causal limit."""
    lengths = (4096, 2048, 8192, 16384, 1024, 32768, 512)
    causal = [gpu_shape(length, width) for length in lengths for width in (128, 64, 96)]
    return causal[:6] + [gpu_shape(4096, width, causal=False) for width in (128, 64)] + causal[6:]


def correctness(dry: bool, seconds: float, out: Path) -> None:
    """The tests marked gpu (dry: those of the reference), or where there are none the gates of all backends."""
    selected = ["-m", "not slow and not gpu", "tests/ops/test_reference.py"] if dry else ["-m", "gpu", "tests/ops"]
    command = [sys.executable, "-m", "pytest", "-q", "--maxfail=20", "-p", "no:cacheprovider", *selected]
    began = time.monotonic()
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=seconds)
        status, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired as stopped:
        status, output = None, stopped.stdout or b""
    text = output.decode(errors="replace")[-8000:]
    print(text, flush=True)
    tests = {"command": command[1:], "exit_status": status, "output": text, "finished": status is not None}
    rows = gates(dry) if status == NO_TESTS or "No module named pytest" in text else iter(())
    device = device_of(dry)
    record = collect("correctness", rows, {"tests": tests, "machine": machine(device)}, out=out, on_row=_say_gate)
    print(f"tests: exit status {status}, {time.monotonic() - began:.0f} s", flush=True)
    wrong = [row for row in record["rows"] if row["gate"].startswith("failed")]
    if wrong or status not in (0, None, NO_TESTS):
        raise SystemExit(f"tests ended with {status}; gates that failed: {len(wrong)}")


def gates(dry: bool) -> Iterator[dict]:
    """A row for each backend, shape and dtype."""
    device, shapes = device_of(dry), TINY if dry else "2x4x1000x64,2x4x777x128,1x2x63x96,2x4x555x32n"
    for dtype in (torch.bfloat16,) if dry else (torch.bfloat16, torch.float16, torch.float32):
        for shape in parse_shapes(shapes):
            gate = Gate(shape, dtype, device)
            for name in available_backends(device, dtype):
                if name != "flex" or not dry:
                    contender = backend_contender(name, gate.full, shape.causal)
                    row = {"backend": name, "dtype": str(dtype), "shape": str(shape), "gate": verdict(contender, gate)}
                    yield row
                    if row["gate"].startswith(LOST):
                        raise DeviceLost(f"{name} at {shape} in {dtype}: {row['gate']}")


def attention(dry: bool, seconds: float, out: Path) -> None:
    """Ours against every kernel of softmax attention and both forms of FlashDiffAttn."""
    device = device_of(dry)
    names = [n for n in available_backends(device, torch.bfloat16) if n not in SLOW or (dry and n == "blockwise")]
    shapes = parse_shapes(TINY) if dry else operator_shapes()
    _operator(dry, device, seconds, out, shapes, names, kernels=list(KERNELS), with_rivals=True)


def attention_slow(dry: bool, seconds: float, out: Path) -> None:
    """The backends that compile long or run long, at two shapes, against SDPA's own choice."""
    device = device_of(dry)
    wanted = ("blockwise",) if dry else ("flex", "blockwise")
    names = [n for n in wanted if n in available_backends(device, torch.bfloat16)]
    shapes = parse_shapes(TINY)[:1] if dry else [gpu_shape(4096, 128), gpu_shape(4096, 64)]
    _operator(dry, device, seconds, out, shapes, names, kernels=[], with_rivals=False)


def _operator(
    dry: bool,
    device: str,
    seconds: float,
    out: Path,
    shapes: list[Shape],
    names: list[str],
    kernels: list[str],
    with_rivals: bool,
) -> None:
    run_attention_benchmark(
        shapes,
        (torch.bfloat16,),
        device=device,
        backends=names,
        kernels=kernels,
        with_rivals=with_rivals,
        repeats=2 if dry else 20,
        seconds=seconds,
        seconds_each=0.4,
        out=out,
        on_row=_say("attention"),
    )


def decode(dry: bool, seconds: float, out: Path) -> None:
    """The operator over long caches, and the pair of models generating."""
    shapes = [caches.DecodeShape(2, 2, 1, 40, 8)] if dry else caches.GPU_GRID
    models = [generation.ModelSetting("debug", 1, 24, 4)] if dry else generation.GPU_MODELS
    run_decode_benchmark(
        shapes,
        models,
        device=device_of(dry),
        kernels=list(KERNELS),
        repeats=2 if dry else 15,
        seconds=seconds,
        seconds_each=0.3,
        out=out,
        on_row=_say("decode"),
    )


def throughput(dry: bool, seconds: float, out: Path) -> None:
    """Table 7."""
    tiny = [pair_throughput.ThroughputSetting("debug", 2, 32, layers=1, dtype=torch.float32)]
    pair_throughput.run_throughput_benchmark(
        tiny if dry else pair_throughput.GPU_SETTINGS,
        device=device_of(dry),
        repeats=2 if dry else 9,
        seconds=seconds,
        seconds_each=8,
        out=out,
        on_row=_say("throughput"),
    )


def device_of(dry: bool) -> str:
    """Raises RuntimeError where a GPU is wanted and there is none. What backends say of their choices is shown."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
    logging.getLogger("diff_transformer").setLevel(logging.INFO)
    if dry:
        torch.set_num_threads(1)
        ceilings.MATRIX["cpu"], ceilings.COPY_BYTES["cpu"], caches.ROTATED_BYTES = 64, 2**16, 2**16
        return "cpu"
    if not torch.cuda.is_available():
        raise RuntimeError("PyTorch sees no CUDA device here; --dry runs every stage on the CPU")
    return "cuda"


def _say(name: str) -> Callable[[dict], None]:
    return lambda row: print("  ".join(cell for cell in tables.cells(name, row) if cell), flush=True)


def _say_gate(row: dict) -> None:
    print("  ".join(row.values()), flush=True)


STAGES: dict[str, Callable[[bool, float, Path], None]] = {
    "correctness": correctness,
    "attention": attention,
    "attention_slow": attention_slow,
    "decode": decode,
    "throughput": throughput,
}
