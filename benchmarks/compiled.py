"""What the compiler tells about the GPU kernels, without a GPU: benchmarks/results/compiled.json.

python benchmarks/compiled.py         # compile what the JSON lacks, or has of other sources, tiles or another Triton
python benchmarks/compiled.py --check # the same; exit 1 if a kernel must not ship

A row is a kernel for a width, dtype and compute capability: its tiles, registers, spilled bytes, shared memory, blocks
on a multiprocessor, the tensor cores' products executed over those needed, and the least time that the chip's peaks
allow. That is a prediction, not a measurement.
"""

import argparse
import importlib
import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

from kernel_compiler import (  # noqa: E402
    KIB,
    SHARED_LIMIT,
    Description,
    compile_for,
    describe,
    executed_over_needed,
    faults,
    needed_products,
    table_of,
    turn_of,
    without_timed_spills,
)

OUT = ROOT / "benchmarks" / "results" / "compiled.json"
WIDTHS = [(64, 64), (64, 128), (96, 192), (128, 128), (128, 256)]
DTYPES = ("bfloat16", "float16", "float32")
BATCH, HEADS, LENGTH = 4, 12, 4096  # of the roofline: causal attention
MOST = 1.1  # products executed over those needed
FP32_SPILLED = 40  # bytes a thread: what is known of a few kernels, which use no tensor cores
WORKERS = 2


class Chip(NamedTuple):
    """Peaks from NVIDIA's data sheets and the CUDA programming guide."""

    name: str
    multiprocessors: int
    ghz: float
    tflops: float  # of the tensor cores, dense, bf16 with fp32 accumulators
    fp32_tflops: float  # of the other cores
    gb_per_s: float
    shared_kib: int  # of a multiprocessor
    threads: int
    blocks: int


CHIPS = {
    80: Chip("A100", 108, 1.41, 312, 19.5, 2039, 164, 2048, 32),
    86: Chip("RTX 3090", 82, 1.70, 71, 35.6, 936, 100, 1536, 16),
    89: Chip("RTX 4090", 128, 2.52, 165, 82.6, 1008, 100, 1536, 24),
    90: Chip("H100", 132, 1.98, 989, 67, 3350, 228, 2048, 32),
    100: Chip("B200", 148, 1.97, 2250, 75, 8000, 228, 2048, 32),
    120: Chip("RTX 5090", 170, 2.41, 210, 104.8, 1792, 100, 1536, 24),
}
EXP_PER_CLOCK = 16  # exp2 on a multiprocessor


def launches(D: int, Dv: int, dtype: torch.dtype, capability: int) -> list[tuple[str, Description]]:
    """(form, launch) of causal attention, its gradients, and a step of decoding.

    Of Triton's kernels first, then of the Hopper kernels, if they take the call.
    """
    from diff_transformer.ops.call import Call
    from diff_transformer.ops.hopper import backward as hopper_backward
    from diff_transformer.ops.hopper import forward as hopper_forward
    from diff_transformer.ops.hopper.support import unsupported_tensors
    from diff_transformer.ops.triton import backward, decode, forward

    q, v = torch.zeros(1, 2, 128, D, dtype=dtype), torch.zeros(1, 2, 128, Dv, dtype=dtype)
    lam = torch.zeros(1, 2, 128, 1)
    shared = Dv == D  # the V2 form: both maps have the same keys
    call = Call(q, q, q, None if shared else q.clone(), v, lam, scale=0.125, is_causal=True)
    table = table_of(capability, dtype)
    (_, *saved), planned = forward.plan_forward(call, True, table)
    found = {"forward": planned, "backward": backward.plan_backward(call, v, saved, table)[1]}
    keys, values = torch.zeros(1, 2, 4096, D, dtype=dtype), torch.zeros(1, 2, 4096, Dv, dtype=dtype)
    second = None if shared else keys.clone()
    few = Call(q[:, :, :1], q[:, :, :1], keys, second, values, lam[:, :, :1], scale=0.125, is_causal=True)
    found["decode"] = decode.plan_decode(few, None, multiprocessors=2)[1]
    listed = list(found.items())
    if capability == 90 and unsupported_tensors(call) is None:
        listed.append(("forward", hopper_forward.plan_forward(call, True)[1]))
        listed.append(("backward", hopper_backward.plan_backward(call, v, saved)[1]))
    described = [(form, describe(launch)) for form, launches in listed for launch in launches]
    small = ("delta_kernel", "decode_combine_kernel")
    return [(form, launch) for form, launch in described if not launch.kernel.endswith(small)]


def wanted_of(capability: int) -> list[tuple[str, Description, int, str]]:
    """Arguments of ``row_of`` for all rows of a GPU."""
    return [
        (form, launch, capability, dtype)
        for dtype in DTYPES
        for D, Dv in WIDTHS
        for form, launch in launches(D, Dv, getattr(torch, dtype), capability)
    ]


def row_of(form: str, launch: Description, capability: int, dtype: str) -> dict[str, Any]:
    """Compile a launch and describe the result."""
    found = compile_for(kernel_of(launch), launch.signature, launch.constexprs, capability=capability, **launch.options)
    repeated = executed_over_needed(launch, found)
    chip, size = CHIPS[capability], getattr(torch, dtype).itemsize
    times = decode_roofline(launch, chip, size) if form == "decode" else roofline(launch, chip, size, repeated)
    return {
        **key(form, launch, capability, dtype),
        "instruction": "wgmma" if found.wgmma else "mma.sync" if found.mma else "tcgen05.mma" if repeated else "fma",
        "executed_over_needed": repeated and round(repeated, 3),
        "registers": found.registers,
        "spilled_bytes": found.spill_bytes,
        "shared_kib": round(found.shared_bytes / KIB, 1),
        "blocks_per_multiprocessor": resident(found, chip),
        "faults": faults(without_timed_spills(found, launch), capability),
        **times,
    }


def kernel_of(launch: Description):
    """The kernel itself. Its ``cache_key`` is Triton's digest of its source and of the functions that it calls."""
    module, _, name = launch.kernel.partition(":")
    return getattr(importlib.import_module(module), name)


def key(form: str, launch: Description, capability: int, dtype: str) -> dict[str, Any]:
    """What a row is about. A row with the same key need not be made again."""
    import triton

    given, computed = (
        launch.constexprs,
        [name for name, on in launch.constexprs.items() if name.startswith("COMPUTE_") and on],
    )
    rows, keys, width, value_width, maps = turn_of(launch)
    return {
        "capability": capability,
        "dtype": dtype,
        "width": width,
        "value_width": value_width,
        "language": "gluon" if ".hopper." in launch.kernel else "triton",
        "form": form,
        "kernel": launch.kernel.partition(":")[2],
        "source": kernel_of(launch).cache_key[:12],
        "gradients": [name.removeprefix("COMPUTE_").lower() for name in computed],
        "block_m": rows,
        "block_n": keys,
        "fused": maps == 2,
        "num_warps": launch.options["num_warps"],
        "num_stages": launch.options.get("num_stages", given.get("STAGES", given.get("KEY_STAGES"))),
        "triton": triton.__version__,
    }


def resident(found, chip: Chip) -> int:
    """Programs that fit a multiprocessor: its 65,536 registers, given to warps by 256; shared memory; threads."""
    registers = 65536 // (-(-found.registers * 32 // 256) * 256 * found.num_warps)
    shared = chip.shared_kib * KIB // (found.shared_bytes + KIB)
    return min(registers, shared, chip.threads // (32 * found.num_warps), chip.blocks)


def roofline(launch: Description, chip: Chip, size: int, repeated: float | None) -> dict[str, float]:
    """Products in units of h N^2 d / 2 multiply-adds, with those of the masked parts of tiles; and milliseconds.

    ``size``: bytes of an element; ``repeated``: as ``executed_over_needed`` returns it.
    """
    given = launch.constexprs
    M, N, D, DV, maps = turn_of(launch)
    tiles = sum(-(-min(first + M, LENGTH) // N) for first in range(0, LENGTH, M))
    if "bwd_dkdv" in launch.kernel:
        tiles = sum(-(-(LENGTH - first // M * M) // M) for first in range(0, LENGTH, N))
    turns = 2 // maps  # for each tile
    products = BATCH * HEADS * tiles * turns * needed_products(launch) * (repeated or 1)
    tflops = chip.tflops if repeated else chip.fp32_tflops
    both = given.get("COMPUTE_DQ1", True) + given.get("COMPUTE_DQ2", True)
    exponentials = BATCH * HEADS * tiles * M * N * both
    elements = BATCH * HEADS * LENGTH * (4 * D + 2 * DV)  # read once: q, k, v; and the output or dO
    seconds = max(
        2 * products / (tflops * 1e12),
        exponentials / (EXP_PER_CLOCK * chip.multiprocessors * chip.ghz * 1e9),
        size * elements / (chip.gb_per_s * 1e9),
    )
    units = products / (BATCH * HEADS * LENGTH**2 * D / 2)
    return {"units": round(units, 2), "roofline_ms": round(1000 * seconds, 3)}


def decode_roofline(launch: Description, chip: Chip, size: int) -> dict[str, float]:
    """Milliseconds to read LENGTH keys and values once; the products of a step take less."""
    given = launch.constexprs
    keys = given["D"] * (1 if given["SHARED_KEYS"] else 2)
    cached = size * BATCH * HEADS * LENGTH * (keys + given["DV"])  # bytes
    return {"roofline_ms": round(1000 * cached / (chip.gb_per_s * 1e9), 3)}


def save(rows: list[dict]) -> None:
    setting = json.dumps({"batch": BATCH, "heads": HEADS, "length": LENGTH, "causal": True})
    lines = ",\n".join(map(json.dumps, rows))
    OUT.write_text(f'{{"setting": {setting},\n"rows": [\n{lines}\n]}}\n')


def unfit(row: dict[str, Any]) -> bool:
    """True if the kernel must not ship. fp32 may spill a little."""
    if row["dtype"] == "float32":
        return row["shared_kib"] > SHARED_LIMIT[row["capability"]] / KIB or row["spilled_bytes"] > FP32_SPILLED
    return bool(row["faults"]) or row["executed_over_needed"] > MOST


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit 1 if a kernel must not ship")
    given = parser.parse_args(arguments)
    os.environ.pop("TRITON_INTERPRET", None)  # kernels decorated under the interpreter cannot be compiled
    known = json.loads(OUT.read_text())["rows"] if OUT.exists() else []
    wanted = [each for capability in CHIPS for each in wanted_of(capability)]
    keys = [key(*each) for each in wanted]
    rows = {
        keys.index(made): row for row in known if (made := {name: row[name] for name in keys[0] if name in row}) in keys
    }
    with ProcessPoolExecutor(WORKERS) as pool:
        jobs = {pool.submit(row_of, *each): i for i, each in enumerate(wanted) if i not in rows}
        for job in as_completed(jobs):
            rows[jobs[job]] = job.result()
            save([rows[i] for i in sorted(rows)])
    save([rows[i] for i in sorted(rows)])
    wrong = [row for row in rows.values() if unfit(row)]
    for row in wrong:
        print(
            f"{row['kernel']}, {row['width']} and {row['value_width']}, sm_{row['capability']}: "
            f"{row['executed_over_needed']} of the products needed; {'; '.join(row['faults'])}"
        )
    return int(bool(wrong) and given.check)


if __name__ == "__main__":
    sys.exit(main())
