"""What ``backend="auto"`` means on a GPU: a lookup. Nothing is timed in a user's call.

Read top-down: ``choose`` looks the kind of call up, ``candidates`` lists the forms, the default first: the Triton
kernels with two passes or one in the backward, with and without the Hopper kernels; the flash-attn package; and the
forms over PyTorch's scaled_dot_product_attention. FlexAttention is not among them: compiling it takes tens of seconds.

The default is the Triton kernels where a record says that they are the fastest (``MEASURED``), without gradients, and
where SDPA would need an N x N mask. Elsewhere, for training, it is the first form over SDPA, a public kernel. On
request (``diff-transformer bench attention --tune``) ``verdict`` times all forms on this machine and keeps the fastest,
which then takes the default's place. Every form is compared with the fp64 reference before it is timed, and left out if
it is wrong: ours by the numerics budget, others by ``TOLERANCE``.
"""

import hashlib
import logging
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from operator import index as concrete
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from diff_transformer.ops import backends, flash, reference, sdpa, triton
from diff_transformer.ops.arguments import Arguments, autocast_off
from diff_transformer.ops.backends import Choice, Documents, unsupported_reason
from diff_transformer.ops.dispatch import Timer, Verdict, fastest, judge, tuning, wall_clock

log = logging.getLogger("diff_transformer")

# By compute capability: widths D, with values of 2 D, at which two passes of the Triton kernels train in less time than
# every public form. From benchmarks/results/attention_gpu.json, half precision; a test holds them equal.
MEASURED = {(9, 0): (64, 96, 128)}
PASSES = {None: "any", True: "one", False: "two"}
REPEATS = "two, deterministic"  # the passes of a call whose gradients must repeat bit for bit
ATOMICS = ("flash", "cudnn")  # kernels of SDPA whose backward adds in any order
EDGES = (1, 8, 64, 256, 1024, 4096, 16384, 65536)  # lengths up to the same edge share a verdict
CHECKED = 160, 192  # queries and keys of the comparison with the reference, at most
# Relative error of public kernels, or twice the eager form's, since they round the output of each map. In fp64 and at
# the lengths above, a window one key too wide changes the output by 5 %, a scale a tenth too large by 12 %.
TOLERANCE = 0.02


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


_chosen: dict[tuple[int | None, Kind], Choice] = {}  # by index of the GPU


def choose(tensors: tuple[Tensor, ...], arguments: Arguments, documents: Documents | None = None) -> Choice:
    """The form of a checked call on a GPU: a dictionary lookup once its kind was met.

    Raises:
        ValueError: DIFF_TRANSFORMER_TUNE is neither 0, 1 nor force; or as ``triton.gluon_switches``.
    """
    kind, device = kind_of(tensors, arguments, documents), tensors[0].device
    compiling = torch.compiler.is_compiling()
    if not compiling and (device.index, kind) in _chosen:
        return _chosen[device.index, kind]
    offered = candidates(tensors, arguments, kind)
    found = offered[_kept(device.type, device.index, tuple(kind), tuple(offered))]
    if not compiling:
        _chosen[device.index, kind] = found
    return found


def kind_of(tensors: tuple[Tensor, ...], arguments: Arguments, documents: Documents | None) -> Kind:
    """The kind of a call, in plain numbers: ``concrete`` and ``edge`` fix what is symbolic under torch.compile."""
    q1, q2, k1, k2, v = tensors
    (B, H, T, D), Hn, G, S = q1.shape, q2.shape[1], k1.shape[1], k1.shape[2]
    T, S = (T, S) if documents is None else (documents.max_seqlen_q, documents.max_seqlen_k)
    D, Dv, noise_group, key_group = map(concrete, (D, v.shape[3], H // Hn, Hn // G))
    mask, window = arguments.attn_mask, arguments.window
    gradients = torch.is_grad_enabled() and any(x.requires_grad for x in (*tensors, arguments.lam))
    passes = REPEATS if torch.are_deterministic_algorithms_enabled() else PASSES[triton.chosen_passes()]
    return Kind(
        str(q1.dtype).removeprefix("torch."), D, Dv, noise_group, key_group, edge(B * H), edge(T), edge(S), k2 is k1,
        "none" if mask is None else ("boolean" if mask.dtype == torch.bool else "additive") + str(mask_shape(mask)),
        arguments.is_causal, sdpa.aligned(q1, k1, arguments.is_causal), 0 if window is None else edge(window),
        documents is not None, gradients,
        passes if gradients else "none",
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


def verdict(tensors: tuple[Tensor, ...], arguments: Arguments) -> Verdict:
    """Time all forms of a kind of call, on this call, and keep the fastest. Not for packed documents."""
    kind, device = kind_of(tensors, arguments, None), tensors[0].device
    runs = {name: timed(choice, tensors, arguments) for name, choice in candidates(tensors, arguments, kind).items()}
    _chosen.pop((device.index, kind), None)
    return judge(key_of(device.type, device.index, kind), runs, clock(device), measure=True, again=True)


def candidates(tensors: tuple[Tensor, ...], arguments: Arguments, kind: Kind) -> dict[str, Choice]:
    """The forms that can compute the call, by name, the default first."""
    q1, v, device = tensors[0], tensors[4], tensors[0].device
    plain = kind.mask == "none" and not kind.window and not kind.documents
    offered: list[Choice] = []
    if unsupported_reason("triton", tensors, arguments) is None:
        offered = [Choice("triton", form) for form in triton.forms(q1, v, plain, kind.gradients)]
    forms = sdpa.packed_forms(*tensors) if kind.documents else sdpa.forms(*tensors, *arguments[1:4])
    over_sdpa = [Choice("sdpa", form) for form in forms]
    small = kind.documents or (plain and kind.aligned)  # needs no mask
    sdpa_first = not offered or (kind.gradients and small and not _measured(device.type, device.index, kind))
    offered = over_sdpa + offered if sdpa_first else offered + over_sdpa
    if unsupported_reason("flash", tensors, arguments) is None and (flash.takes_packed() or not kind.documents):
        offered.append(Choice("flash"))
    if kind.passes == REPEATS:
        ours = [choice for choice in offered if choice.backend == "triton"]
        theirs = [c for c in offered if isinstance(c.form, sdpa.Form) and c.form.kernel not in ATOMICS]
        offered = ours or theirs or [Choice("sdpa", sdpa.Form("efficient", False, 1, kind.Dv))]
    return {choice.name: choice for choice in offered}


def _measured(device: str, index: int | None, kind: Kind) -> bool:
    """Whether a record says that the Triton kernels train fastest in this kind of call."""
    half = kind.dtype in ("bfloat16", "float16")
    return half and kind.Dv == 2 * kind.D and kind.D in MEASURED.get(capability(device, index), ())


def timed(choice: Choice, tensors: tuple[Tensor, ...], arguments: Arguments) -> Callable[[], None]:
    """A function that computes the call, with gradients if it needs them. The first call checks the form."""
    inputs = (*tensors, arguments.lam)
    gradients = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    strict = {"strict": True} if choice.backend == "sdpa" and tensors[0].device.type == "cuda" else {}
    checked = False

    def run() -> None:
        nonlocal checked
        device = tensors[0].device
        on_device = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        with torch.set_grad_enabled(gradients), autocast_off(device.type), on_device:
            if not checked:
                check(choice, tensors, arguments)
                checked = True
            *given, lam = (x.detach().requires_grad_(x.requires_grad and gradients) for x in inputs)
            if tensors[3] is tensors[2]:
                given[3] = given[2]
            out = backends.attend(choice, tuple(given), arguments._replace(lam=lam), **strict)
            if gradients:
                leaves = {id(x): x for x in (*given, lam) if x.requires_grad}
                torch.autograd.grad(out, list(leaves.values()), out.detach())

    return run


def check(choice: Choice, tensors: tuple[Tensor, ...], arguments: Arguments) -> None:
    """Raise AssertionError unless the form is right on a small problem of the same kind, with its gradients."""
    from diff_transformer.testing import assert_within_budget, eager_diff_attention, make_inputs

    q1, q2, k1, k2, v = tensors
    (_, H, T, D), Hn, G, S = q1.shape, q2.shape[1], k1.shape[1], k1.shape[2]
    # A few queries: over a cache that is long enough for the decoding kernel.
    most = 2 * triton.MIN_DECODE_KEYS if T <= triton.MAX_DECODE_QUERIES else CHECKED[1]
    if T == S:  # needs no mask for the causal limit, and shall need none here
        most = CHECKED[0]
    T, S = min(T, CHECKED[0]), min(S, most)
    x = make_inputs(1, H, T, D, Hn=Hn, G=G, S=S, Dv=v.shape[3], dtype=q1.dtype, device=q1.device, requires_grad=False)
    mask = arguments.attn_mask
    mask = mask if mask is None else mask[:1, :, :T, :S]
    window = None if arguments.window is None else min(arguments.window, CHECKED[0] // 2)  # one that leaves keys out
    small = arguments._replace(attn_mask=mask, window=window)
    options = {name: value for name, value in small._asdict().items() if name != "lam"}
    names = [name for name in x._fields if not (k2 is k1 and name == "k2")]
    gradients = torch.is_grad_enabled()

    def results(function: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        y = x.to(dtype)
        y = y._replace(k2=y.k1) if k2 is k1 else y
        leaves = [getattr(y, name).requires_grad_(gradients) for name in names]
        out = function(*y)
        return [out.detach(), *(torch.autograd.grad(out, leaves, torch.ones_like(out)) if gradients else ())]

    def ours(*y: Tensor) -> Tensor:
        return backends.attend(choice, y[:5], small._replace(lam=y[5]))

    exact, eager = partial(reference.attend, **options), partial(eager_diff_attention, **options)
    values = results(ours, q1.dtype), results(exact, torch.float64), results(eager, q1.dtype)
    try:
        for what, actual, expected, by_eager in zip(("out", *names), *values, strict=False):
            if choice.backend == "triton":
                assert_within_budget(actual, expected, by_eager, what=what)
            elif (size := float(expected.norm())) > 1e-6:  # of one key, queries have no gradient
                error, of_eager = (float((y - expected).norm()) / size for y in (actual, by_eager))
                if not error <= max(TOLERANCE, 2 * of_eager):
                    raise AssertionError(f"{what} has a relative error of {error:.1%}")
    except AssertionError as error:
        log.warning("%s is wrong on %s and is not used: %s", choice.name, q1.device, error)
        raise


def clock(device: torch.device) -> Timer:
    """A timer for functions that run on the device."""
    if device.type != "cuda":
        return wall_clock

    def seconds(run: Callable[[], object]) -> float:
        with torch.cuda.device(device):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            end.synchronize()
        return begin.elapsed_time(end) / 1e3

    return seconds


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
    chosen = _chosen.get((index, Kind(*kind)))
    if chosen is not None and chosen.name in names:
        return chosen.name
    if tuning() == "force":
        _say_what_replaced_it()
    return fastest(key_of(device, index, Kind(*kind)), dict.fromkeys(names, _never), measure=False)


@cache
def _say_what_replaced_it() -> None:
    log.warning(
        "DIFF_TRANSFORMER_TUNE is 'force', but calls on a GPU are not timed any more; run once on this machine: "
        "diff-transformer bench attention --tune"
    )


def _never() -> None:
    raise AssertionError("nothing is measured here")


# Constants for torch.compile, as in triton/__init__.py.
capability._dynamo_marked_constant = True  # ty: ignore[missing-attribute]
_kept._dynamo_marked_constant = True  # ty: ignore[missing-attribute]
