"""Compiles Triton and Gluon kernels for any GPU, without one, and checks the result.

A kernel that is short of registers still gives right results, but is several times slower: ptxas spills to local
memory, or serialises wgmma on Hopper. Its report says both, and the disassembler where the spilled registers are used,
so a test can reject such a configuration without a GPU.
The interpreter (TRITON_INTERPRET=1) replaces kernels when they are decorated, so they cannot be compiled in that
process; ``compile_in_subprocess`` compiles them in one without the variable.
"""

import io
import json
import os
import re
import subprocess
import sys
import tempfile
from atexit import register
from collections.abc import Generator
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib import import_module
from itertools import count
from typing import Any, NamedTuple

from assembly import products_of_loops, spills_in_loops, unguarded_arrivals

KIB = 1024
OPTIONS = ("num_warps", "num_stages", "maxnreg")
SERIALIZED = "wgmma.mma_async instructions are serialized"  # in ptxas' report, C7510 and its neighbours
POINTERS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "bool": "i1", "uint8": "u8", "int32": "i32"}
# Shared memory that one program may use, by compute capability (CUDA C++ Programming Guide, technical specifications).
SHARED_LIMIT = {80: 163 * KIB, 86: 99 * KIB, 87: 163 * KIB, 89: 99 * KIB, 90: 227 * KIB, 100: 227 * KIB, 120: 99 * KIB}
TENSOR_COLUMNS = 512


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel. Sizes in bytes; registers and stack are those of one thread."""

    name: str
    capability: int
    registers: int
    spill_bytes: int  # the stack frame, which holds only spilled registers
    spills_in_loops: int  # loads and stores of spilled registers in innermost loops with products
    shared_bytes: int
    tensor_columns: int  # of tensor memory (sm_100); beyond TENSOR_COLUMNS Triton compiles a trap
    num_warps: int  # of the whole program, including those added by warp specialisation
    wgmma: int  # wgmma.mma_async instructions (Hopper)
    mma: int  # mma.sync instructions (Ampere)
    products: tuple[int, ...]  # multiply-adds of the tensor cores in a turn of each loop that has any, over all warps
    wgmma_serialized: bool
    unguarded_arrivals: int  # at an mbarrier, without a barrier of the warps since their last shared-memory access


def compile_for(
    kernel,
    signature: dict[str, Any],
    constexprs: dict[str, Any],
    *,
    capability: int,
    num_warps: int = 4,
    num_stages: int = 3,
    **options,
) -> Compiled:
    """Compile ``kernel`` for compute capability ``capability`` (80, 90); needs no GPU. Takes 1 to 3 seconds.

    Args:
        kernel: a function decorated by ``triton.jit`` or ``gluon.jit``, with the interpreter off.
        signature: type of every argument that is no constexpr, as Triton writes types: ``"*bf16"``, ``"fp32"``,
            ``"i32"``, ``"tensordesc<bf16[64,128]>"`` (Gluon: with its layout). ``":16"`` after an integer says that 16
            divides it, as Triton finds out by itself at a launch; of pointers that is assumed, ``":1"`` takes it back.
            A tuple has a type for each element, or an element itself that is a constant: 1 or None.
        constexprs: value of every other argument; an integer that is 1 at a launch (a stride) belongs here as well.
        options: further options of the compiler, such as ``maxnreg``.

    Raises:
        ValueError: an argument of the kernel is in neither or in both of the dicts, or one is no argument.
        TypeError: the kernel was decorated under the interpreter.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
    from triton.runtime.jit import JITFunction

    if not isinstance(kernel, JITFunction):
        raise TypeError(
            f"{getattr(kernel, '__name__', kernel)} is a {type(kernel).__name__}, not a compilable kernel; kernels "
            "decorated under TRITON_INTERPRET=1 cannot be compiled: use compile_in_subprocess"
        )
    _check_arguments(kernel, signature, constexprs)
    constants, attributes = {}, {}

    def typed(written: Any, *path: int) -> Any:
        if isinstance(written, list | tuple):
            return tuple(typed(element, *path, i) for i, element in enumerate(written))
        if not isinstance(written, str):
            constants[path] = written
            return "constexpr"
        name, _, divisor = written.partition(":")
        if divisor == "16" or (written.startswith("*") and divisor != "1"):
            attributes[path] = [["tt.divisibility", 16]]
        return name

    types = {}
    for i, name in enumerate(kernel.arg_names):
        types[name] = "constexpr" if name in constexprs else typed(signature[name], i)
    constants |= {(kernel.arg_names.index(name),): value for name, value in constexprs.items()}
    source = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    with ptxas_report() as report:
        compiled = triton.compile(
            source(fn=kernel, signature=types, constexprs=constants, attrs=attributes),
            target=GPUTarget("cuda", capability, 32),
            options={"num_warps": num_warps, "num_stages": num_stages, **options},
        )
    log, ptx = report.getvalue(), compiled.asm["ptx"]
    spilled = _largest(r"(\d+) bytes stack frame", log)
    return Compiled(
        name=kernel.__name__,
        capability=capability,
        registers=_largest(r"Used (\d+) registers", log),
        spill_bytes=spilled,
        spills_in_loops=spills_in_loops(_disassembled(compiled.asm["cubin"])) if spilled else 0,
        shared_bytes=compiled.metadata.shared,
        tensor_columns=getattr(compiled.metadata, "tmem_size", None) or 0,
        num_warps=compiled.metadata.num_warps,
        wgmma=len(re.findall(r"\bwgmma\.mma_async", ptx)),
        mma=len(re.findall(r"\bmma\.sync", ptx)),
        products=products_of_loops(ptx, num_warps),
        wgmma_serialized=SERIALIZED in log,
        unguarded_arrivals=unguarded_arrivals(ptx),
    )


@contextmanager
def ptxas_report() -> Generator[io.StringIO]:
    """Context manager: collects ptxas' report on each kernel that Triton compiles inside it, without using the cache.

    Anything else printed to standard output inside is collected too.
    """
    import triton.knobs

    report = io.StringIO()
    with triton.knobs.compilation.scope(), triton.knobs.nvidia.scope(), redirect_stdout(report):
        triton.knobs.compilation.always_compile = True  # the cache keeps the binary without the report
        triton.knobs.nvidia.dump_ptxas_log = True
        yield report


class Description(NamedTuple):
    """The arguments of ``compile_in_subprocess`` that describe a launch."""

    kernel: str
    signature: dict[str, Any]
    constexprs: dict[str, Any]
    options: dict[str, int]


def describe(launch) -> Description:
    """The kernel that Triton would compile for a ``launching.Launch``; tensors may be on any device.

    As in a launch, None and integers equal to 1 become constants, and integers that 16 divides are marked; tensors
    count as aligned. Works under the interpreter as well.
    """
    given = dict(launch.arguments)
    options = {name: given.pop(name) for name in OPTIONS if name in given}
    function = launch.kernel.fn
    general = _not_specialized(launch.kernel)
    constexpr = {name for name, kind in function.__annotations__.items() if "constexpr" in str(kind)}
    signature, constexprs = {}, {}
    for name, value in given.items():
        typed = value if name in constexpr else _typed(value, name not in general)
        (signature if isinstance(typed, str | tuple) and name not in constexpr else constexprs)[name] = typed
    return Description(f"{function.__module__}:{function.__name__}", signature, constexprs, options)


def _typed(value: Any, special: bool) -> Any:
    """The type of an argument as ``compile_for`` takes it, or the argument itself, which is then a constant.

    special: whether kernels are specialised for its values.
    """
    if isinstance(value, tuple):
        return tuple(_typed(element, special) for element in value)
    if value is None or (type(value) is int and value == 1 and special):
        return value
    if hasattr(value, "block_shape"):  # a TMA descriptor, of Gluon
        shape = ",".join(map(str, value.block_shape))
        return f"tensordesc<{_short(value.base.dtype)}[{shape}],{value.layout!r}>"
    if hasattr(value, "data_ptr"):
        return "*" + _short(value.dtype)
    if isinstance(value, float):
        return "fp32"
    width = "i32" if -(2**31) <= value < 2**31 else "i64"
    return f"{width}:16" if value % 16 == 0 and special else width


def _short(dtype: Any) -> str:
    return POINTERS[str(dtype).removeprefix("torch.")]


def table_of(capability: int, dtype: Any) -> Any:
    """The tiles for a GPU of that capability."""
    from diff_transformer.ops.triton.tile_sizes import table_for

    return table_for(divmod(capability, 10), SHARED_LIMIT[capability], dtype)


class Turn(NamedTuple):
    """The work of one turn of an innermost loop; of a Hopper kernel, what one of its warpgroups does."""

    rows: int
    keys: int
    D: int
    DV: int
    maps: int  # 2: both maps in the same turn


def turn_of(launch: Description) -> Turn:
    """The work of a turn of a launched kernel's loop, Triton's or Gluon's.

    Widths are those of the call, not of the chunks, nor padded. A program that decodes computes 16 rows, fewer than it
    has or not.
    """
    given, name = launch.constexprs, launch.kernel.partition(":")[2]
    rows, keys = (
        next((given[x] for x in names if x in given), 16) for names in (("BLOCK_M", "BM", "ROWS"), ("BLOCK_N", "BN"))
    )
    maps = 2 if given.get("FUSED", name != "fwd_sequential") else 1
    return Turn(rows, keys, given["D"], given["DV"], maps)


def needed_products(launch: Description) -> int:
    """Multiply-adds that the algorithm needs in one turn of an innermost loop of a launched kernel: one tile."""
    given = launch.constexprs
    rows, keys, D, DV, maps = turn_of(launch)
    name = launch.kernel.partition(":")[2].removesuffix("_kernel")
    if name in ("decode_split", "forward", "fwd_sequential"):
        each = maps * (D + DV)
    elif name == "bwd_dq":
        each = DV + 2 * D * (given.get("COMPUTE_DQ1", True) + given.get("COMPUTE_DQ2", True))
    else:
        each = 2 * D + (DV + 2 * D) * given.get("COMPUTE_DK", True) + DV * given.get("COMPUTE_DV", True)
    return rows * keys * each


def executed_over_needed(launch: Description, compiled: Compiled) -> float | None:
    """Products that a compiled launch executes in a turn of a loop over ``needed_products``; None: no tensor cores."""
    if not compiled.products:
        return None
    # The warpgroups of the Hopper kernel for dK and dV share a tile by gradient. Elsewhere each loop has its own tiles.
    shared = launch.kernel.endswith(":bwd_dkdv")
    return (sum if shared else max)(compiled.products) / needed_products(launch)


def _not_specialized(kernel) -> set[str]:
    """Names of the arguments listed in the decorator's do_not_specialize."""
    given = getattr(kernel, "do_not_specialize", None)
    given = kernel.kwargs.get("do_not_specialize") if given is None else given  # of the interpreter's stand-in
    return {kernel.arg_names[name] if isinstance(name, int) else name for name in given or ()}


def faults(compiled: Compiled, capability: int | None = None) -> list[str]:
    """Reasons why the kernel must not ship for the capability (its own if None), as messages; empty if it may."""
    capability = capability or compiled.capability
    if capability not in SHARED_LIMIT:
        raise ValueError(f"capability is {capability}; known are {', '.join(map(str, SHARED_LIMIT))}")
    found = []
    if compiled.spills_in_loops:
        found.append(
            f"loads or stores spilled registers {compiled.spills_in_loops} times in its loops of products "
            f"({compiled.spill_bytes} bytes a thread at {compiled.registers} registers)"
        )
    if compiled.wgmma_serialized:
        found.append("serialises its wgmma instructions")
    if compiled.unguarded_arrivals:
        found.append(_unguarded(compiled.unguarded_arrivals))
    if compiled.shared_bytes > SHARED_LIMIT[capability]:
        found.append(
            f"uses {compiled.shared_bytes / KIB:.0f} KiB of shared memory; "
            f"sm_{capability} has {SHARED_LIMIT[capability] // KIB}"
        )
    if compiled.tensor_columns > TENSOR_COLUMNS:
        found.append(f"uses {compiled.tensor_columns} columns of tensor memory; there are {TENSOR_COLUMNS}")
    return found


def launched_faults(kernel: Any) -> list[str]:
    """``faults`` of a kernel as Triton launched it; any spilled register is one.

    Too much shared memory is not among them, because such a launch fails, nor serialised wgmma, which only
    ``ptxas_report`` shows.
    """
    found = [f"spills {4 * kernel.n_spills} bytes a thread"] if kernel.n_spills else []
    unguarded = unguarded_arrivals(kernel.asm["ptx"])
    return found + ([_unguarded(unguarded)] if unguarded else [])


def _unguarded(arrivals: int) -> str:
    return f"arrives {arrivals} times at an mbarrier with no barrier of the warps before"


def without_timed_spills(compiled: Compiled, launch: Description) -> Compiled:
    """The kernel as if it did not spill, if its tile was timed as it is on such a chip, and was the fastest."""
    from diff_transformer.ops.triton.tile_sizes import HOPPER_TIMED

    given, name = launch.constexprs, launch.kernel.partition(":")[2]
    kernels = {"forward_kernel": "forward", "bwd_dq_kernel": "dq", "bwd_dkdv_kernel": "dkdv"}
    entry = HOPPER_TIMED[kernels[name]].get((given["D"], given["DV"])) if name in kernels else None
    if compiled.capability != 90 or entry is None:
        return compiled
    tile = {"BLOCK_M": given["BLOCK_M"], "BLOCK_N": given["BLOCK_N"], **launch.options}
    same = all(tile[option] == value for option, value in entry[0].options().items())
    return replace(compiled, spill_bytes=0, spills_in_loops=0) if same else compiled


def assert_ships(compiled: Compiled, capability: int | None = None) -> None:
    """Raise AssertionError with all ``faults``, if there are any."""
    found = faults(compiled, capability)
    if found:
        raise AssertionError(f"{compiled.name}, {compiled.num_warps} warps: {'; '.join(found)}. {compiled}")


def compile_in_subprocess(kernel: str, signature: dict[str, Any], constexprs: dict[str, Any], **options) -> Compiled:
    """``compile_for`` in a subprocess where the interpreter is off; one subprocess serves all calls.

    ``kernel`` is ``"package.module:function"``; constexprs and options are numbers, strings, booleans or None.

    Raises:
        RuntimeError: the compilation failed, with its error.
    """
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    number = next(_numbers)
    print(json.dumps([number, kernel, signature, constexprs, options]), file=server.stdin, flush=True)
    answered, answer = None, {}
    while answered != number:  # earlier answers belong to a call that was interrupted
        ended = json.dumps([number, {"error": "the compiling process ended"}])
        answered, answer = json.loads(server.stdout.readline() or ended)
    if "error" in answer:
        raise RuntimeError(f"{kernel} does not compile with {constexprs}, {options}: {answer['error']}")
    return Compiled(**answer)


_numbers = count()


@cache
def _server() -> subprocess.Popen:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    server = subprocess.Popen(
        [sys.executable, __file__], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    register(server.kill)
    return server


def serve() -> None:
    """Answer requests of ``compile_in_subprocess``, one JSON line each, until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the compiler's prints must not look like an answer
    for request in sys.stdin:
        number, path, signature, constexprs, options = json.loads(request)
        module, _, name = path.partition(":")
        try:
            answer = asdict(compile_for(getattr(import_module(module), name), signature, constexprs, **options))
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps([number, answer]), file=answers, flush=True)


def _check_arguments(kernel, signature: dict, constexprs: dict) -> None:
    names = set(kernel.arg_names)
    missing, both = names - set(signature) - set(constexprs), set(signature) & set(constexprs)
    unknown = (set(signature) | set(constexprs)) - names
    for what, wrong in (("without type or value", missing), ("in both dicts", both), ("it does not have", unknown)):
        if wrong:
            raise ValueError(f"{kernel.__name__}: arguments {what}: {', '.join(sorted(wrong))}")


def _disassembled(cubin: bytes) -> str:
    """A kernel's SASS, by the disassembler that comes with Triton."""
    import triton.knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.nvdisasm.path, "-c", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _largest(pattern: str, log: str) -> int:
    found = [int(number) for number in re.findall(pattern, log)]
    if not found:
        raise RuntimeError(f"ptxas reported nothing that matches {pattern!r}; its report was: {log}")
    return max(found)


if __name__ == "__main__":
    serve()
