"""Self-test of the Hopper kernels on this machine: runs verify.py in a subprocess, and keeps the verdict.

Gluon is experimental, and these kernels synchronise by hand. A kernel that hangs or faults takes the device of its
process with it, so a subprocess runs the first use of a width, dtype and masking on a machine:

    python -m diff_transformer.ops.gluon.self_test forward 128 bfloat16 causal cuda:0

The verdict is kept in the package's cache folder under ``hopper``, one file for each form, GPU, version of Triton and
PyTorch, and state of these sources. Delete the file to run the test again. Only a fault of the kernel is kept: running
out of memory, a time-out, or a subprocess that cannot start says nothing about it, and the next process tries again.
"""

import argparse
import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import torch
from filelock import FileLock

from diff_transformer.durable import cache_folder, write_whole
from diff_transformer.ops.gluon.support import KERNELS
from diff_transformer.ops.gluon.verify import NotTried, fault_of
from diff_transformer.ops.triton.metadata import SERIALIZED, ptxas_report

log = logging.getLogger("diff_transformer")

MODULE = "diff_transformer.ops.gluon.self_test"
COMMAND = (sys.executable, "-m", MODULE)
SECONDS = 300.0  # limit of a subprocess: it takes a few seconds, or some tens where it compiles the kernels
MASKINGS = {"causal": True, "full": False}
READY, FAULT, NOT_TRIED = "ready", "fault", "not_tried"  # keys of the JSON lines that a subprocess prints
untried: set[tuple[str, ...]] = set()  # forms whose trial came to no verdict in this process
KILLED = (-signal.SIGKILL, -signal.SIGTERM)  # exit statuses of a subprocess that someone else ended


@cache
def fault_found(
    device: torch.device, D: int, dtype: torch.dtype, is_causal: bool, kernels: str = "forward"
) -> str | None:
    """What is wrong with the kernels for this width, dtype and masking on the device; None if they are right.

    kernels: "forward", or the gradient kernels "two_pass". device: with its index. The first call on a
    machine takes up to a minute, most of it to compile. Every process logs the verdict once.
    """
    masking = next(name for name, causal in MASKINGS.items() if causal == is_causal)
    form = (kernels, str(D), str(dtype).removeprefix("torch."), masking)
    what = f"the Hopper attention kernel ({', '.join(form)}) on {device}"
    try:
        fault = _kept(lambda: record(device, form), lambda: run_test(what, (*form, str(device))))
    except NotTried as reason:
        fault = f"it could not be tried: {reason}"
        untried.add((*form, str(device)))
    if fault is None:
        log.info("%s agrees with the reference and is used", what)
    else:
        log.warning("%s is not used, plain Triton is: %s", what, fault)
    return fault


def record(device: torch.device, form: tuple[str, ...]) -> Path:
    """Path of the file that keeps the verdict."""
    import triton

    gpu = torch.cuda.get_device_properties(device).name if device.type == "cuda" else device.type
    told = [gpu, triton.__version__, torch.__version__]
    operators = Path(__file__).parents[1]
    for folder in ("gluon", "triton"):
        told += [path.read_text() for path in sorted((operators / folder).rglob("*.py"))]
    digest = hashlib.sha256("\n".join(told).encode()).hexdigest()[:16]
    return cache_folder() / "hopper" / f"{'-'.join(form)}-{digest}.json"


def _kept(find: Callable[[], Path], make: Callable[[], str | None]) -> str | None:
    """The verdict in the file, or that of ``make``, which is then kept. Processes that want the same one wait for it.

    If there is no home folder, or the file or its lock cannot be written, each process runs its own test.

    Raises:
        NotTried: there is no verdict. Processes that waited for this attempt do not repeat it; later ones do.
    """
    began = time.time()
    with ExitStack() as held:
        try:
            path = find()
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            held.enter_context(FileLock(path.with_suffix(".lock")))
        except (OSError, RuntimeError) as error:  # RuntimeError: no home folder, or a file system without locks
            log.info("verdicts are not kept: %s", error)
            return make()
        try:
            kept = json.loads(path.read_text())
            if NOT_TRIED in kept and path.stat().st_mtime >= began:
                raise NotTried(kept[NOT_TRIED])
            return kept[FAULT]
        except (OSError, ValueError, LookupError, TypeError):  # no file, or no verdict in it
            pass
        try:
            fault = make()
        except NotTried as reason:
            _write(path, {NOT_TRIED: str(reason)})
            raise
        _write(path, {FAULT: fault})
        return fault


def _write(path: Path, verdict: dict[str, str | None]) -> None:
    try:
        write_whole(path, json.dumps(verdict) + "\n")
    except OSError as error:
        log.info("the verdict is not kept: %s", error)


def run_test(what: str, arguments: tuple[str, ...]) -> str | None:
    """The verdict of a subprocess.

    Raises:
        NotTried: it came to none, for a reason that need not be the kernel's.
    """
    log.info("trying %s in a process of its own: up to a minute, once on this machine", what)
    package = str(Path(__file__).parents[3])
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
        printed, errors, status = child.stdout, child.stderr, child.returncode
    except OSError as error:
        raise NotTried(f"no process can be started: {error}") from error
    except subprocess.TimeoutExpired as expired:
        printed, errors = ((x or b"").decode(errors="replace") for x in (expired.stdout, expired.stderr))
        status = None
    starts = tuple(f'{{"{key}"' for key in (READY, FAULT, NOT_TRIED))
    # An interrupted process may have printed a part of a line.
    lines = [json.loads(line) for line in printed.splitlines() if line.startswith(starts) and line.endswith("}")]
    verdict = next((line for line in lines if FAULT in line), None)
    if verdict is not None:
        return verdict[FAULT]
    not_tried = next((line[NOT_TRIED] for line in lines if NOT_TRIED in line), None)
    if not_tried is not None:
        raise NotTried(not_tried)
    last = " ".join(errors.split())[-500:]
    end = f"it has not ended after {SECONDS:.0f} s" if status is None else f"exit status {status}"
    if status is None or status in KILLED or {READY: True} not in lines:
        raise NotTried(f"{end}: {last}")
    return f"its process was lost: {end}: {last}"


def main(given: list[str] | None = None) -> None:
    """Run the test and print the verdict, in the subprocess. Exits at once after it: the device may be lost."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description="Try a kernel on small problems.")
    parser.add_argument("kernels", choices=KERNELS)
    parser.add_argument("width", type=int)
    parser.add_argument("dtype", choices=("bfloat16", "float16"))
    parser.add_argument("masking", choices=MASKINGS)
    parser.add_argument("device", type=torch.device)
    form = parser.parse_args(given)
    torch.ones(1, device=form.device).sum().item()  # fails on a GPU that cannot be used, whatever the kernel
    print(json.dumps({READY: True}), flush=True)
    dtype = getattr(torch, form.dtype)
    verdict: dict[str, str | None]
    try:
        with ptxas_report() as report:
            verdict = {FAULT: fault_of(form.device, form.width, dtype, MASKINGS[form.masking], form.kernels)}
        if verdict[FAULT] is None and SERIALIZED in report.getvalue():
            verdict = {FAULT: "it serialises its wgmma instructions, and would be several times slower"}
    except NotTried as reason:
        verdict = {NOT_TRIED: str(reason)}
    print(json.dumps(verdict), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
