"""What ``backend="auto"`` means on a GPU: a lookup. Nothing is timed in a user's call.

Read top-down: ``look_up`` finds the entry of a kind of call, ``candidates`` lists what it may be, the default first:
the Triton kernels with two passes or one in the backward, with and without the Hopper kernels; the flash-attn package;
and the plans over PyTorch's scaled_dot_product_attention. FlexAttention is not among them: compiling it takes tens of
seconds.

The default is the Triton kernels where a record says that they are the fastest (``MEASURED``), without gradients, and
where SDPA would need an N x N mask. Elsewhere, for training, it is the first plan over SDPA, a public kernel. On
request ``diff-transformer bench attention --tune`` measures all candidates on this machine and keeps the fastest, which
then takes the default's place.
"""

import hashlib
import logging
from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from operator import index as concrete
from pathlib import Path
from typing import Any, NamedTuple

import torch

from diff_transformer.ops import triton
from diff_transformer.ops.call import Call
from diff_transformer.ops.measuring import kept, tuning
from diff_transformer.ops.softmax_calls import Flash, SdpaPlan, aligned, packed_plans, plans

log = logging.getLogger("diff_transformer")

# By compute capability: widths D, with values of 2 D, at which two passes of the Triton kernels train in less time than
# every public form. From benchmarks/results/attention_gpu.json, half precision; a test holds them equal.
MEASURED = {(9, 0): (64, 96, 128)}
PASSES = {None: "any", True: "one", False: "two"}
REPEATS = "two, deterministic"  # the passes of a call whose gradients must repeat bit for bit
ATOMICS = ("flash", "cudnn")  # kernels of SDPA whose backward adds in any order
EDGES = (1, 8, 64, 256, 1024, 4096, 16384, 65536)  # lengths up to the same edge share a verdict


class Kind(NamedTuple):
    """A kind of call that tuning measures: plain, with equal head counts and lengths, and values of width 2 D."""

    dtype: str
    width: int  # D
    heads: int  # edge of B * H
    length: int  # edge of T
    is_causal: bool
    gradients: bool
    passes: str  # which backward passes may be taken


_found: dict[tuple[int | None, Kind], tuple[str, Any]] = {}  # by index of the GPU


def look_up(call: Call, ours: bool) -> tuple[str, Any]:
    """The backend of a call on a GPU, and its variant: a dictionary lookup once a kind of call was met.

    ours: whether the Triton kernels can compute it.

    Raises:
        ValueError: as ``check_environment``.
    """
    kind, device = kind_of(call), call.q1.device
    if kind is None:
        return next(candidates(call, ours), ("sdpa", None))
    compiling = torch.compiler.is_compiling()
    if not compiling and (device.index, kind) in _found:
        return _found[device.index, kind]
    offered = {name_of(*each): each for each in candidates(call, ours)}
    found = offered[_kept(device.type, device.index, tuple(kind), tuple(offered))]
    if not compiling:
        _found[device.index, kind] = found
    return found


def forget(index: int | None, kind: Kind) -> None:
    """Look the kind up again at its next call."""
    _found.pop((index, kind), None)


def kind_of(call: Call) -> Kind | None:
    """The kind of a call, in plain numbers: ``concrete`` and ``edge`` fix what is symbolic under torch.compile."""
    (B, H, T, D), gradients = call.q1.shape, bool(call.gradients)
    usual = call.q2.shape[1] == call.k1.shape[1] == H and call.k1.shape[2] == T and call.v.shape[3] == 2 * D
    if not (usual and _plain(call)) or call.k2 is None:
        return None
    passes = REPEATS if torch.are_deterministic_algorithms_enabled() else PASSES[triton.chosen_passes()]
    name = str(call.q1.dtype).removeprefix("torch.")
    return Kind(name, concrete(D), edge(B * H), edge(T), call.is_causal, gradients, passes if gradients else "none")


def edge(n: int) -> int:
    """The first of ``EDGES`` that is not below n, or the last one."""
    for limit in EDGES:
        if n <= limit:
            return limit
    return EDGES[-1]


def candidates(call: Call, ours: bool) -> Iterator[tuple[str, Any]]:
    """The backends that can compute the call, each with its variants, the default first; ours: as in ``look_up``."""
    gradients, plain = bool(call.gradients), _plain(call)
    repeats = gradients and torch.are_deterministic_algorithms_enabled()
    small = call.documents is not None or (plain and aligned(call))  # SDPA needs no mask
    sdpa_first = not ours or (gradients and small and not repeats and not _measured(call))
    if sdpa_first:
        yield from _over_sdpa(call, repeats)
    if ours:
        for variant in triton.variants(call.q1, call.v, plain, gradients):
            yield "triton", variant
    if not sdpa_first and not repeats:
        yield from _over_sdpa(call, repeats)
    flash = Flash.unsupported_reason(call.q1.device, call.q1.dtype) or Flash.unsupported_call_reason(call)
    if flash is None and not repeats and (call.documents is None or Flash.takes_packed(call)):
        yield "flash", None


def _over_sdpa(call: Call, repeats: bool) -> list[tuple[str, Any]]:
    """SDPA's plans; ``repeats``: those whose gradients repeat bit for bit."""
    offered = plans(call) if call.documents is None else packed_plans(call)
    if repeats:
        last = SdpaPlan("efficient", False, 1, concrete(call.v.shape[3]))
        offered = [plan for plan in offered if plan.kernel not in ATOMICS] or [last]
    return [("sdpa", plan) for plan in offered]


def _plain(call: Call) -> bool:
    return call.attn_mask is None and call.window is None and call.documents is None


def name_of(backend: str, variant: Any) -> str:
    """As verdicts and logs name it."""
    return backend if variant is None else f"{backend} ({variant.name})"


def _measured(call: Call) -> bool:
    """Whether a record says that the Triton kernels train fastest in this kind of call."""
    D, device = concrete(call.q1.shape[3]), call.q1.device
    half = call.q1.dtype in (torch.bfloat16, torch.float16)
    return half and call.v.shape[3] == 2 * D and D in MEASURED.get(capability(device.type, device.index), ())


def capability(device: str, index: int | None) -> tuple[int, int] | None:
    """The compute capability of a GPU; None for another device, or where there is none."""
    if device != "cuda" or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_capability(index)


@cache
def installation(device: str, index: int | None) -> dict[str, str | int]:
    """The GPU, and the versions of all that computes on it."""
    facts: dict[str, str | int] = {"device": device, "torch": torch.__version__, "sources": _sources()}
    for package in ("triton", "flash-attn", "flash-attn-3", "flash-attn-4"):
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            facts[package] = "none"
    if device == "cuda" and torch.cuda.is_available():
        facts["device"] = torch.cuda.get_device_name(index)
        facts["cuda"] = torch.version.cuda or "none"
        facts["cudnn"] = torch.backends.cudnn.version() or 0
    return facts


def _sources() -> str:
    """A digest of the kernels' sources."""
    folder = Path(__file__).parent
    files = sorted([*folder.glob("*.py"), *folder.glob("triton/*.py"), *folder.glob("gluon/*.py")])
    return hashlib.sha256("\n".join(path.read_text() for path in files).encode()).hexdigest()[:16]


def key_of(device: str, index: int | None, kind: Kind) -> dict[str, str | int]:
    """What a verdict depends on."""
    return installation(device, index) | {"gluon": triton.gluon_switches()} | kind._asdict()


def _kept(device: str, index: int | None, kind: tuple, names: tuple[str, ...]) -> str:
    """The name of the kept verdict, or the first; a constant for torch.compile."""
    found = _found.get((index, Kind(*kind)))
    if found is not None and name_of(*found) in names:
        return name_of(*found)
    if tuning() == "force":
        _say_what_replaced_it()
    return kept(key_of(device, index, Kind(*kind)), names)


@cache
def _say_what_replaced_it() -> None:
    log.warning(
        "DIFF_TRANSFORMER_TUNE is 'force', but calls on a GPU are not timed any more; run once on this machine: "
        "diff-transformer bench attention --tune"
    )


@cache
def check_environment() -> None:
    """Refuse bad values of the environment variables at the first call, also where nothing reads them.

    Raises:
        ValueError: DIFF_TRANSFORMER_TUNE or DIFF_TRANSFORMER_GLUON has a value that is not accepted.
    """
    tuning()
    triton.gluon_switches()


# Constants for torch.compile, as in triton/__init__.py.
capability._dynamo_marked_constant = True  # ty: ignore[missing-attribute]
_kept._dynamo_marked_constant = True  # ty: ignore[missing-attribute]
