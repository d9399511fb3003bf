"""What the compiler tells about the GPU kernels, without a GPU: benchmarks/results/compiled.json.

python benchmarks/compiled.py         # compile what the JSON lacks, or has of other sources, tiles or another Triton
python benchmarks/compiled.py --check # the same; exit 1 if a kernel must not ship

A row is a kernel for a width, dtype and compute capability: its tiles, registers, spilled bytes, shared memory and the
tensor cores' products executed over those needed.
"""

import argparse
import importlib
import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

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
    table_of,
    turn_of,
    without_timed_spills,
)

OUT = ROOT / "benchmarks" / "results" / "compiled.json"
WIDTHS = [(64, 64), (64, 128), (96, 192), (128, 128), (128, 256)]
DTYPES = ("bfloat16", "float16", "float32")
MOST = 1.1  # products executed over those needed
FP32_SPILLED = 40  # bytes a thread: what is known of a few kernels, which use no tensor cores
WORKERS = 2

CAPABILITIES = (80, 86, 89, 90, 100, 120)  # A100, RTX 3090, RTX 4090, H100, B200, RTX 5090


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
    return {
        **key(form, launch, capability, dtype),
        "instruction": "wgmma" if found.wgmma else "mma.sync" if found.mma else "tcgen05.mma" if repeated else "fma",
        "executed_over_needed": repeated and round(repeated, 3),
        "registers": found.registers,
        "spilled_bytes": found.spill_bytes,
        "shared_kib": round(found.shared_bytes / KIB, 1),
        "faults": faults(without_timed_spills(found, launch), capability),
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


def save(rows: list[dict]) -> None:
    lines = ",\n".join(map(json.dumps, rows))
    OUT.write_text(f'{{"rows": [\n{lines}\n]}}\n')


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
    wanted = [each for capability in CAPABILITIES for each in wanted_of(capability)]
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
