"""Whether the Hopper kernels are right on this machine: verify.py, run in a process that may be lost to them.

Gluon is experimental, and these kernels synchronise by hand: one that hangs or faults takes its process's device with
it. So the first use on a machine of a width, dtype and masking is tried by a child,

    python -m diff_transformer.ops.triton.gluon.trial forward 64 bfloat16 causal cuda:0

and what it found is kept in the package's cache folder, under ``hopper``: a file for each form, GPU, version of Triton
and PyTorch, and state of these sources. Removing the file makes the next use try again.
"""

import argparse
import hashlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import torch
from filelock import FileLock

from diff_transformer.durable import cache_folder, write_whole
from diff_transformer.ops.triton.gluon import KERNELS
from diff_transformer.ops.triton.gluon.verify import fault_of
from diff_transformer.ops.triton.metadata import SERIALIZED, ptxas_report

log = logging.getLogger("diff_transformer")

MODULE = "diff_transformer.ops.triton.gluon.trial"
COMMAND = (sys.executable, "-m", MODULE)
SECONDS = 300.0  # for a trial: it takes a few, and where the kernels are to be compiled some tens
MASKINGS = {"causal": True, "full": False}
READY, FAULT = "ready", "fault"  # what a child says, a line of JSON each


class NotTried(RuntimeError):
    """A child came to no verdict, for a reason that need not be the kernel's."""


@cache
def fault_found(
    device: torch.device, D: int, dtype: torch.dtype, is_causal: bool, kernels: str = "forward"
) -> str | None:
    """What is wrong with the kernels for this width, dtype and masking on the device, in words; None if they are right.

    kernels: "forward", or of the gradients "two_pass" or "one_pass". device: with its index. The first call on a
    machine takes up to a minute, most of it to compile; every process says once what holds there.
    """
    masking = next(name for name, causal in MASKINGS.items() if causal == is_causal)
    form = (kernels, str(D), str(dtype).removeprefix("torch."), masking)
    what = f"the Hopper attention kernel ({', '.join(form)}) on {device}"
    try:
        fault = _kept(record(device, form), lambda: tried(what, (*form, str(device))))
    except NotTried as reason:
        fault = f"it could not be tried: {reason}"
    if fault is None:
        log.info("%s agrees with the reference and is used", what)
    else:
        log.warning("%s is not used, plain Triton is: %s", what, fault)
    return fault


def record(device: torch.device, form: tuple[str, ...]) -> Path:
    """Where the verdict is kept."""
    import triton

    gpu = torch.cuda.get_device_properties(device).name if device.type == "cuda" else device.type
    told = [gpu, triton.__version__, torch.__version__]
    told += [path.read_text() for path in sorted(Path(__file__).parents[1].rglob("*.py"))]
    digest = hashlib.sha256("\n".join(told).encode()).hexdigest()[:16]
    return cache_folder() / "hopper" / f"{'-'.join(form)}-{digest}.json"


def _kept(path: Path, make: Callable[[], str | None]) -> str | None:
    """The verdict in the file, or that of ``make``, kept from then on; processes that want the same wait for one.

    Where nothing can be kept, each process makes its own.
    """
    with ExitStack() as held:
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            held.enter_context(FileLock(path.with_suffix(".lock")))
        except (OSError, NotImplementedError) as error:  # the second: a file system without locks
            log.info("verdicts are not kept: %s", error)
            return make()
        try:
            return json.loads(path.read_text())[FAULT]
        except (OSError, ValueError, LookupError, TypeError):  # none, or no verdict
            fault = make()
        try:
            write_whole(path, json.dumps({FAULT: fault}) + "\n")
        except OSError as error:
            log.info("the verdict is not kept: %s", error)
        return fault


def tried(what: str, arguments: tuple[str, ...]) -> str | None:
    """The verdict of a child.

    Raises:
        NotTried: it came to none before it launched anything.
    """
    log.info("trying %s in a process of its own: up to a minute, once on this machine", what)
    package = str(Path(__file__).parents[4])
    paths = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    try:
        child = subprocess.run(
            [*COMMAND, *arguments],
            env={**os.environ, "PYTHONPATH": paths},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        said, errors, end = child.stdout, child.stderr, f"exit status {child.returncode}"
    except OSError as error:
        raise NotTried(f"no process can be started: {error}") from error
    except subprocess.TimeoutExpired as late:
        said, errors = ((x or b"").decode(errors="replace") for x in (late.stdout, late.stderr))
        end = f"it has not ended after {SECONDS:.0f} s"
    lines = [json.loads(line) for line in said.splitlines() if line.startswith((f'{{"{READY}"', f'{{"{FAULT}"'))]
    verdict = next((line for line in lines if FAULT in line), None)
    if verdict is not None:
        return verdict[FAULT]
    last = " ".join(errors.split())[-500:]
    if {READY: True} not in lines:
        raise NotTried(f"{end}: {last}")
    return f"its process was lost: {end}: {last}"


def main(given: list[str] | None = None) -> None:
    """What the child does. It leaves at once when it has a verdict: the device may be lost."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description="Try a kernel on small problems.")
    parser.add_argument("kernels", choices=KERNELS)
    parser.add_argument("width", type=int)
    parser.add_argument("dtype", choices=("bfloat16", "float16"))
    parser.add_argument("masking", choices=MASKINGS)
    parser.add_argument("device", type=torch.device)
    form = parser.parse_args(given)
    torch.ones(1, device=form.device).sum().item()  # a GPU that cannot be used says nothing of the kernel
    print(json.dumps({READY: True}), flush=True)
    dtype = getattr(torch, form.dtype)
    with ptxas_report() as report:
        fault = fault_of(form.device, form.width, dtype, MASKINGS[form.masking], form.kernels)
    if fault is None and SERIALIZED in report.getvalue():
        fault = "it serialises its wgmma instructions, and would be several times slower"
    print(json.dumps({FAULT: fault}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
