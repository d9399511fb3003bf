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
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from operator import index as concrete
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

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
    """What a verdict depends on, beside the GPU and the installation."""

    dtype: str
    D: int
    Dv: int
    noise_group: int  # signal heads of a noise head
    key_group: int  # noise heads of a key/value head
    heads: int  # edge of B * H
    T: int  # edge of the number of queries; with packed documents, of the longest one
    S: int  # edge of the number of keys
    shared_keys: bool
    mask: str
    is_causal: bool
    aligned: bool  # whether SDPA needs no mask for the positions
    window: int  # edge; 0 for none
    documents: bool
    gradients: bool
    passes: str  # which backward passes may be taken


_found: dict[tuple[int | None, Kind], tuple[str, Any]] = {}  # by index of the GPU


def look_up(call: Call) -> tuple[str, Any]:
    """The backend of a call on a GPU, and its variant: a dictionary lookup once the kind of call was met.

    Raises:
        ValueError: as ``check_environment``.
    """
    kind, device = kind_of(call), call.q1.device
    compiling = torch.compiler.is_compiling()
    if not compiling and (device.index, kind) in _found:
        return _found[device.index, kind]
    offered = candidates(call, kind)
    found = offered[_kept(device.type, device.index, tuple(kind), tuple(offered))]
    if not compiling:
        _found[device.index, kind] = found
    return found


def forget(index: int | None, kind: Kind) -> None:
    """Look the kind up again at its next call."""
    _found.pop((index, kind), None)


def kind_of(call: Call) -> Kind:
    """The kind of a call, in plain numbers: ``concrete`` and ``edge`` fix what is symbolic under torch.compile."""
    q1, mask, window, documents = call.q1, call.attn_mask, call.window, call.documents
    (B, H, T, D), Hn, G, S = q1.shape, call.q2.shape[1], call.k1.shape[1], call.k1.shape[2]
    T, S = (T, S) if documents is None else (documents.max_seqlen_q, documents.max_seqlen_k)
    D, Dv, noise_group, key_group = map(concrete, (D, call.v.shape[3], H // Hn, Hn // G))
    passes = REPEATS if torch.are_deterministic_algorithms_enabled() else PASSES[triton.chosen_passes()]
    return Kind(
        str(q1.dtype).removeprefix("torch."), D, Dv, noise_group, key_group, edge(B * H), edge(T), edge(S),
        call.k2 is None,
        "none" if mask is None else ("boolean" if mask.dtype == torch.bool else "additive") + str(mask_shape(mask)),
        call.is_causal, aligned(call), 0 if window is None else edge(window), documents is not None,
        bool(call.gradients), passes if call.gradients else "none",
    )  # fmt: skip


def mask_shape(mask: Tensor) -> list[bool]:
    """Whether a mask differs by head, by query and by key."""
    return [size > 1 for size in mask.shape[1:]]


def edge(n: int) -> int:
    """The first of ``EDGES`` that is not below n, or the last one."""
    for limit in EDGES:
        if n <= limit:
            return limit
    return EDGES[-1]


def candidates(call: Call, kind: Kind) -> dict[str, tuple[str, Any]]:
    """The backends and variants that can compute the call, by name, the default first."""
    device, given = call.q1.device, (call.q1.device, call.q1.dtype)
    plain = kind.mask == "none" and not kind.window and not kind.documents
    ours: list[tuple[str, Any]] = []
    if (triton.unsupported_reason(*given) or triton.unsupported_call_reason(call)) is None:
        ours = [("triton", variant) for variant in triton.variants(call.q1, call.v, plain, kind.gradients)]
    over_sdpa = [("sdpa", plan) for plan in (packed_plans(call) if kind.documents else plans(call))]
    if kind.passes == REPEATS:
        over_sdpa = [each for each in over_sdpa if each[1].kernel not in ATOMICS]
        offered = ours or over_sdpa or [("sdpa", SdpaPlan("efficient", False, 1, kind.Dv))]
        return {name_of(*each): each for each in offered}
    small = kind.documents or (plain and kind.aligned)  # needs no mask
    sdpa_first = not ours or (kind.gradients and small and not _measured(device.type, device.index, kind))
    offered = over_sdpa + ours if sdpa_first else ours + over_sdpa
    if (Flash.unsupported_reason(*given) or Flash.unsupported_call_reason(call)) is None:
        offered += [("flash", None)] if not kind.documents or Flash.takes_packed(call) else []
    return {name_of(*each): each for each in offered or [("sdpa", None)]}


def name_of(backend: str, variant: Any) -> str:
    """As verdicts and logs name it."""
    return backend if variant is None else f"{backend} ({variant.name})"


def _measured(device: str, index: int | None, kind: Kind) -> bool:
    """Whether a record says that the Triton kernels train fastest in this kind of call."""
    half = kind.dtype in ("bfloat16", "float16")
    return half and kind.Dv == 2 * kind.D and kind.D in MEASURED.get(capability(device, index), ())


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
