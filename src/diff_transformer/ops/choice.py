"""What ``backend="auto"`` means on a GPU: the form of a call that was measured to be the fastest there.

Read top-down: ``choose`` looks the kind of call up, ``decide`` measures a kind that is new, ``candidates`` lists the
forms: the Triton kernels with two passes or one in the backward, with and without the Hopper kernels; the flash-attn
package; and the forms over PyTorch's scaled_dot_product_attention. FlexAttention is not among them: compiling it takes
tens of seconds. Every form is compared with the fp64 reference before it is timed, and left out if it is wrong: ours by
the numerics budget, others by ``TOLERANCE``.

A kind of call is measured at its first call, with that call's tensors. Not so within CUDA-graph capture, torch.compile
and dispatch modes, and in other processes of a job than rank 0: there the kept verdict holds, else the default. That is
the Triton kernels on Hopper and without gradients. For training on other GPUs it is the first form over SDPA, unless
this would need an N x N mask. No rank waits for another, so none can hang. A process does not change its answer, except
that ``choices`` and ``adopt`` give all ranks those of rank 0 between two steps.
"""

import hashlib
import logging
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from operator import index as concrete
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes

from diff_transformer.ops import backends, flash, reference, sdpa, triton
from diff_transformer.ops.arguments import Arguments, autocast_off
from diff_transformer.ops.backends import Choice, Documents, unsupported_reason
from diff_transformer.ops.dispatch import NotNow, Timer, Verdict, fastest, judge, wall_clock

log = logging.getLogger("diff_transformer")

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
    """The form of a checked call on a GPU: a dictionary lookup once its kind is decided."""
    kind = kind_of(tensors, arguments, documents)
    if torch.compiler.is_compiling():
        offered = candidates(tensors, arguments, kind)
        return offered[_kept(tensors[0].device.type, tensors[0].device.index, tuple(kind), tuple(offered))]
    chosen = _chosen.get((tensors[0].device.index, kind))
    return decide(kind, tensors, arguments, documents) if chosen is None else chosen


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


def decide(kind: Kind, tensors: tuple[Tensor, ...], arguments: Arguments, documents: Documents | None) -> Choice:
    """Measure a new kind of call, or read the kept verdict. The answer stands in this process.

    Raises:
        ValueError: DIFF_TRANSFORMER_TUNE is neither 0, 1 nor force; or as ``triton.gluon_switches``.
    """
    capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    measure = not capturing and is_first_rank() and all(type(x) in (Tensor, torch.nn.Parameter) for x in tensors)
    offered = candidates(tensors, arguments, kind)
    with _disable_current_modes() if measure else nullcontext():  # selective checkpointing is such a mode, for example
        found = offered[verdict(kind, tensors, arguments, documents, measure).fastest]
    if not capturing:
        _chosen[tensors[0].device.index, kind] = found
    return found


def verdict(
    kind: Kind,
    tensors: tuple[Tensor, ...],
    arguments: Arguments,
    documents: Documents | None = None,
    measure: bool = True,
) -> Verdict:
    """The kept verdict on a kind of call, or a new one, measured on this call."""
    device = tensors[0].device
    offered = candidates(tensors, arguments, kind)
    runs = {name: timed(choice, tensors, arguments, documents) for name, choice in offered.items()}
    return judge(key_of(device.type, device.index, kind), runs, clock(device), measure)


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
    sdpa_first = not offered or (kind.gradients and small and not on_hopper(device.type, device.index))
    offered = over_sdpa + offered if sdpa_first else offered + over_sdpa
    if unsupported_reason("flash", tensors, arguments) is None and (flash.takes_packed() or not kind.documents):
        offered.append(Choice("flash"))
    if kind.passes == REPEATS:
        ours = [choice for choice in offered if choice.backend == "triton"]
        theirs = [c for c in offered if isinstance(c.form, sdpa.Form) and c.form.kernel not in ATOMICS]
        offered = ours or theirs or [Choice("sdpa", sdpa.Form("efficient", False, 1, kind.Dv))]
    return {choice.name: choice for choice in offered}


def timed(
    choice: Choice, tensors: tuple[Tensor, ...], arguments: Arguments, documents: Documents | None
) -> Callable[[], None]:
    """A function that computes the call, with gradients if it needs them. The first call checks the form.

    Hooks on saved tensors, as activation checkpointing sets them, do not see what it saves.
    """
    inputs = (*tensors, arguments.lam)
    gradients = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    strict = {"strict": True} if choice.backend == "sdpa" and tensors[0].device.type == "cuda" else {}
    by_gluon = False  # whether a Hopper kernel may compute: there is a form without it too
    if choice.backend == "triton" and choice.form.gluon:
        plain = arguments.attn_mask is None and arguments.window is None and documents is None
        by_gluon = choice.form._replace(gluon=False) in triton.forms(tensors[0], tensors[4], plain, gradients)
    checked = False

    def run() -> None:
        nonlocal checked
        device = tensors[0].device
        on_device = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        with (
            torch.set_grad_enabled(gradients),
            saved_tensors_hooks(_itself, _itself),
            autocast_off(device.type),
            on_device,
        ):
            if not checked:
                check(choice, tensors, arguments, documents is not None)
                checked = True
            *given, lam = (x.detach().requires_grad_(x.requires_grad and gradients) for x in inputs)
            if tensors[3] is tensors[2]:
                given[3] = given[2]
            rest = arguments._replace(lam=lam)
            if documents is None:
                out = backends.attend(choice, tuple(given), rest, **strict)
            else:
                out = backends.attend_packed(choice, tuple(given), rest, documents)
            if by_gluon and triton.untried():
                raise NotNow("the Hopper kernels could not be tried")
            if gradients:
                leaves = {id(x): x for x in (*given, lam) if x.requires_grad}
                torch.autograd.grad(out, list(leaves.values()), out.detach())

    return run


def check(choice: Choice, tensors: tuple[Tensor, ...], arguments: Arguments, packed: bool = False) -> None:
    """Raise AssertionError unless the form is right on a small problem of the same kind, with its gradients.

    If ``packed``, the problem is two documents in one row, a third of the lengths and the rest.
    """
    from diff_transformer.testing import assert_within_budget, eager_diff_attention, make_inputs

    q1, q2, k1, k2, v = tensors
    (_, H, T, D), Hn, G, S = q1.shape, q2.shape[1], k1.shape[1], k1.shape[2]
    decoded = not packed and T <= triton.MAX_DECODE_QUERIES  # over a cache long enough for the decoding kernel
    most = 2 * triton.MIN_DECODE_KEYS if decoded else CHECKED[1]
    if T == S:  # needs no mask for the causal limit, and shall need none here
        most = CHECKED[0]
    T, S = min(T, CHECKED[0]), min(S, most)
    x = make_inputs(1, H, T, D, Hn=Hn, G=G, S=S, Dv=v.shape[3], dtype=q1.dtype, device=q1.device, requires_grad=False)
    mask = arguments.attn_mask
    mask = mask if mask is None else mask[:1, :, :T, :S]
    window = None if arguments.window is None else min(arguments.window, CHECKED[0] // 2)  # one that leaves keys out
    small = arguments._replace(attn_mask=mask, window=window)
    options = {name: value for name, value in small._asdict().items() if name != "lam"}
    ends_q, ends_k = ([0, T // 3, T], [0, S // 3, S]) if packed and min(T, S) >= 3 else ([0, T], [0, S])
    names = [name for name in x._fields if not (k2 is k1 and name == "k2")]
    gradients = torch.is_grad_enabled()

    def results(function: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        y = x.to(dtype)
        y = y._replace(k2=y.k1) if k2 is k1 else y
        leaves = [getattr(y, name).requires_grad_(gradients) for name in names]
        out = function(*y)
        return [out.detach(), *(torch.autograd.grad(out, leaves, torch.ones_like(out)) if gradients else ())]

    def by_document(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def function(q1, q2, k1, k2, v, lam) -> Tensor:
            outs = []
            for (a, b), (c, d) in zip(pairwise(ends_q), pairwise(ends_k), strict=True):
                query1, query2, part = (x[:, :, a:b] for x in (q1, q2, lam))
                outs.append(attend(query1, query2, *(x[:, :, c:d] for x in (k1, k2, v)), part, **options))
            return torch.cat(outs, dim=2)

        return function

    def ours(*y: Tensor) -> Tensor:
        if not packed:
            return backends.attend(choice, y[:5], small._replace(lam=y[5]))
        ends = (torch.tensor(x, dtype=torch.int32, device=q1.device) for x in (ends_q, ends_k))
        return backends.attend_packed(choice, y[:5], small._replace(lam=y[5]), Documents(*ends, T, S))

    exact, eager = by_document(reference.attend), by_document(eager_diff_attention)
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


def _itself(x: Tensor) -> Tensor:
    return x


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


def is_first_rank() -> bool:
    """Whether this process decides: rank 0 of a job, or a process alone."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return not distributed or torch.distributed.get_rank() == 0


def choices(device: torch.device) -> dict[Kind, Choice]:
    """What this process chose on a GPU, to be sent to other ranks."""
    return {kind: choice for (index, kind), choice in _chosen.items() if index == device.index}


def adopt(found: dict[Kind, Choice], device: torch.device) -> None:
    """Choose on this process's GPU what rank 0 chose on its own; between two steps, not between a forward and its
    backward, which may compute the forward again."""
    _chosen.update({(device.index, kind): choice for kind, choice in found.items()})


def on_hopper(device: str, index: int | None) -> bool:
    return device == "cuda" and torch.cuda.is_available() and torch.cuda.get_device_capability(index)[0] == 9


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
    return fastest(key_of(device, index, Kind(*kind)), dict.fromkeys(names, _never), measure=False)


def _never() -> None:
    raise AssertionError("nothing is measured here")


# Constants for torch.compile, as in triton/__init__.py.
on_hopper._dynamo_marked_constant = True  # ty: ignore[missing-attribute]
_kept._dynamo_marked_constant = True  # ty: ignore[missing-attribute]
