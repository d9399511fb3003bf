"""What the compiler tells about the GPU kernels, without a GPU: benchmarks/results/compiled.json.

python benchmarks/compiled.py         # compile what the JSON lacks or has with other tiles or another Triton
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

from diff_transformer.ops.triton.metadata import KIB, Launch, compile_for, faults, needed_products, recording

OUT = Path(__file__).resolve().parent / "results" / "compiled.json"
WIDTHS = [(64, 64), (64, 128), (96, 192), (128, 128), (128, 256)]
# float16 has the same tiles and products: only the widest, which takes most registers.
COMPILED = {"bfloat16": WIDTHS, "float16": [(128, 256)]}
BATCH, HEADS, LENGTH = 4, 12, 4096  # of the roofline: causal attention
MOST = 1.1  # products executed over those needed
WORKERS = 2


class Chip(NamedTuple):
    """Peaks from NVIDIA's data sheets and the CUDA programming guide; ``tflops`` dense, bf16 with fp32 accumulators."""

    name: str
    multiprocessors: int
    ghz: float
    tflops: float
    gb_per_s: float
    shared_kib: int  # of a multiprocessor
    threads: int
    blocks: int


CHIPS = {
    80: Chip("A100", 108, 1.41, 312, 2039, 164, 2048, 32),
    86: Chip("RTX 3090", 82, 1.70, 71, 936, 100, 1536, 16),
    89: Chip("RTX 4090", 128, 2.52, 165, 1008, 100, 1536, 24),
    90: Chip("H100", 132, 1.98, 989, 3350, 228, 2048, 32),
    100: Chip("B200", 148, 1.97, 2250, 8000, 228, 2048, 32),
    120: Chip("RTX 5090", 170, 2.41, 210, 1792, 100, 1536, 24),
}
EXP_PER_CLOCK = 16  # exp2 on a multiprocessor


def launches(D: int, Dv: int, dtype: torch.dtype, capability: int) -> list[tuple[str, Launch]]:
    """(form, launch) of causal attention, its gradients in two passes and in one, and a step of decoding."""
    from diff_transformer.ops.triton.backward import launch_backward
    from diff_transformer.ops.triton.call import Call
    from diff_transformer.ops.triton.decode import launch_decode
    from diff_transformer.ops.triton.forward import launch_forward

    q, v = torch.zeros(1, 2, 128, D, dtype=dtype), torch.zeros(1, 2, 128, Dv, dtype=dtype)
    lam = torch.zeros(1, 2, 128, 1)
    shared = Dv == D  # the V2 form: both maps have the same keys
    call = Call(q, q, q, None if shared else q.clone(), v, lam, scale=0.125, is_causal=True)
    found: list[tuple[str, Launch]] = []
    with recording(capability) as recorded:
        saved = launch_forward(call, need_gradient=True)
        found += [("forward", launch) for launch in recorded]
        for form, one_pass in (("two passes", False), ("one pass", True)):
            recorded.clear()
            launch_backward(call, v, saved, one_pass)
            found += [(form, launch) for launch in recorded if "delta" not in launch.kernel]
        recorded.clear()
        keys, values = torch.zeros(1, 2, 4096, D, dtype=dtype), torch.zeros(1, 2, 4096, Dv, dtype=dtype)
        other = keys if shared else keys.clone()
        launch_decode(q[:, :, :1], q[:, :, :1], keys, other, values, lam[:, :, :1], None, True, None, 0.125)
        found += [("decode", launch) for launch in recorded if "combine" not in launch.kernel]
    return found


def wanted_of(capability: int) -> list[tuple[str, Launch, int, str]]:
    """Arguments of ``row_of`` for all rows of a GPU."""
    return [
        (form, launch, capability, dtype)
        for dtype, widths in COMPILED.items()
        for D, Dv in widths
        for form, launch in launches(D, Dv, getattr(torch, dtype), capability)
    ]


def row_of(form: str, launch: Launch, capability: int, dtype: str) -> dict[str, Any]:
    """Compile a launch and describe the result."""
    module, _, name = launch.kernel.partition(":")
    kernel = getattr(importlib.import_module(module), name)
    found = compile_for(kernel, launch.signature, launch.constexprs, capability=capability, **launch.options)
    repeated = max(found.products) / needed_products(launch)
    chip = CHIPS[capability]
    times = decode_roofline(launch, chip) if form == "decode" else roofline(launch, chip, repeated)
    return {
        **key(form, launch, capability, dtype),
        "instruction": "wgmma" if found.wgmma else "mma.sync" if found.mma else "tcgen05.mma",
        "executed_over_needed": round(repeated, 3),
        "registers": found.registers,
        "spilled_bytes": found.spill_bytes,
        "shared_kib": round(found.shared_bytes / KIB, 1),
        "blocks_per_multiprocessor": resident(found, chip),
        "faults": faults(found, capability),
        **times,
    }


def key(form: str, launch: Launch, capability: int, dtype: str) -> dict[str, Any]:
    """What a row is about. A row with the same key need not be made again."""
    import triton

    given, computed = (
        launch.constexprs,
        [name for name, on in launch.constexprs.items() if name.startswith("COMPUTE_") and on],
    )
    return {
        "capability": capability,
        "dtype": dtype,
        "width": given["D"],
        "value_width": given["DV"],
        "form": form,
        "kernel": launch.kernel.partition(":")[2],
        "gradients": [name.removeprefix("COMPUTE_").lower() for name in computed],
        "block_m": given.get("BLOCK_M", 16),
        "block_n": given["BLOCK_N"],
        "fused": bool(given.get("FUSED", True)),
        "num_warps": launch.options["num_warps"],
        "num_stages": launch.options["num_stages"],
        "triton": triton.__version__,
    }


def resident(found, chip: Chip) -> int:
    """Programs that fit a multiprocessor: its 65,536 registers, given to warps by 256; shared memory; threads."""
    registers = 65536 // (-(-found.registers * 32 // 256) * 256 * found.num_warps)
    shared = chip.shared_kib * KIB // (found.shared_bytes + KIB)
    return min(registers, shared, chip.threads // (32 * found.num_warps), chip.blocks)


def roofline(launch: Launch, chip: Chip, repeated: float) -> dict[str, float]:
    """Products in units of h N^2 d / 2 multiply-adds, with those of the masked parts of tiles; and milliseconds."""
    given = launch.constexprs
    M, N, D, DV = given["BLOCK_M"], given["BLOCK_N"], given["D"], given["DV"]
    tiles = sum(-(-min(first + M, LENGTH) // N) for first in range(0, LENGTH, M))
    if launch.kernel.endswith("bwd_dkdv_kernel"):
        tiles = sum(-(-(LENGTH - first // M * M) // M) for first in range(0, LENGTH, N))
    maps = 1 if given.get("FUSED", True) else 2  # turns for each tile
    products = BATCH * HEADS * tiles * maps * needed_products(launch) * repeated
    both = given.get("COMPUTE_DQ1", True) + given.get("COMPUTE_DQ2", True)
    exponentials = BATCH * HEADS * tiles * M * N * both
    elements = BATCH * HEADS * LENGTH * (4 * D + 2 * DV)  # read once: q, k, v; and the output or dO
    seconds = max(
        2 * products / (chip.tflops * 1e12),
        exponentials / (EXP_PER_CLOCK * chip.multiprocessors * chip.ghz * 1e9),
        2 * elements / (chip.gb_per_s * 1e9),
    )
    units = products / (BATCH * HEADS * LENGTH**2 * D / 2)
    return {"units": round(units, 2), "roofline_ms": round(1000 * seconds, 3)}


def decode_roofline(launch: Launch, chip: Chip) -> dict[str, float]:
    """Milliseconds to read LENGTH keys and values once; the products of a step take less."""
    given = launch.constexprs
    keys = given["D"] * (1 if given["SHARED_KEYS"] else 2)
    cached = 2 * BATCH * HEADS * LENGTH * (keys + given["DV"])  # bytes
    return {"roofline_ms": round(1000 * cached / (chip.gb_per_s * 1e9), 3)}


def sums_of(rows: list[dict]) -> list[dict]:
    """For each GPU, dtype and width: units and milliseconds of our forms, and units of the alternatives.

    Units of h N^2 d / 2 multiply-adds: FlashDiffAttn_1 is two softmax attentions with values of width Dv, _2 cuts the
    values to width d, "softmax" is the matched Transformer's, 2 h heads of width d.
    """
    sums: dict[tuple, dict] = {}
    for row in rows:
        d, dv = row["width"], row["value_width"]
        made = sums.setdefault(
            (row["capability"], row["dtype"], d, dv),
            {name: row[name] for name in ("capability", "dtype", "width", "value_width")}
            | {
                "flash_diff_1": {"forward": 2 * (1 + dv / d), "backward": 2 * (3 + 2 * dv / d)},
                "flash_diff_2": {"forward": 4 * dv / d, "backward": 10 * dv / d},
                "softmax": {"forward": 4, "backward": 10},
            },
        )
        names = [name for name in ("units", "roofline_ms") if name in row]
        form = made.setdefault(row["form"], dict.fromkeys(names, 0))
        for name in names:
            form[name] = round(form[name] + row[name], 3)
    return list(sums.values())


def save(rows: list[dict]) -> None:
    setting = {"batch": BATCH, "heads": HEADS, "length": LENGTH, "causal": True, "compiled": COMPILED}
    OUT.write_text(json.dumps({"setting": setting, "sums": sums_of(rows), "rows": rows}, indent=1) + "\n")


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
    wrong = [row for row in rows.values() if row["faults"] or row["executed_over_needed"] > MOST]
    for row in wrong:
        print(
            f"{row['kernel']}, {row['width']} and {row['value_width']}, sm_{row['capability']}: "
            f"{row['executed_over_needed']} of the products needed; {'; '.join(row['faults'])}"
        )
    return int(bool(wrong) and given.check)


if __name__ == "__main__":
    sys.exit(main())
