"""The public operator, top-down: check the arguments, choose a backend, let it attend."""

import logging
from functools import cache

import torch
from torch import Tensor

from diff_transformer.ops import backends, flex, reference, triton
from diff_transformer.ops import choice as on_gpu
from diff_transformer.ops.arguments import (
    DTYPES,
    Arguments,
    active_transform,
    autocast_inputs,
    autocast_off,
    check,
    exporting,
    flag,
    is_empty,
    zeros,
)
from diff_transformer.ops.backends import BACKENDS, Choice, unsupported_reason
from diff_transformer.ops.dispatch import tuning
from diff_transformer.ops.reference import DiffMaps

LOOKED_UP = ("cuda",)  # types of devices on which "auto" looks its form up
PURE_PYTORCH = ("reference", "sdpa")  # follow PyTorch's transforms as far as PyTorch's own operators do

log = logging.getLogger("diff_transformer")


def diff_attention(
    q1: Tensor,
    q2: Tensor,
    k1: Tensor,
    k2: Tensor,
    v: Tensor,
    lam: float | Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """Differential attention: softmax(q1 k1^T scale) v - lam softmax(q2 k2^T scale) v (arXiv 2410.05258, eq. 1).

    The maps are subtracted in fp32 (fp64 for fp64 inputs). The paper's head norm and its factor 1 - lambda_init are not
    part of the operator.

    Args:
        q1: queries of the signal map, [B, H, T, D]; float32, bfloat16, float16 or float64, like all tensors but lam.
        q2: queries of the noise map, [B, Hn, T, D]. Hn divides H; signal head j uses noise head j // (H // Hn).
        k1, k2: keys, [B, G, S, D]; k2 may be k1. G divides Hn; head j of n uses key/value head j // (n // G).
        v: values, [B, G, S, Dv]; Dv may differ from D (the paper has Dv = 2 D).
        lam: a float, or a tensor that is scalar, [H] or broadcastable to [B, H, T, 1], as [H, 1, 1] is. Used in fp32
            (fp64 for fp64 inputs).
        attn_mask: bool (True = attend) or floating (added to the scaled scores), broadcastable to [B, H, T, S], the
            same for both maps. Only "reference" computes its gradient, and "auto" then chooses it. Use -inf to mask:
            in a row masked by large finite values, gradients of "triton" and "sdpa" are wrong from about -1e6 on, and
            for finfo.min "triton" and the compiled "blockwise" return 0, the others the mean of the values.
        is_causal: mask later keys. The last query is aligned to the last key (lower right corner), as decoding over a
            cache needs. Where T differs from S, SDPA's flag aligns differently. Combines with attn_mask.
        window: each query sees the last ``window`` keys up to its own position; needs is_causal.
        scale: factor of the scores, D ** -0.5 by default.
        backend: "auto" or one of ``available_backends``. A named backend never falls back to another. On a GPU "auto"
            takes what records or ``bench attention --tune`` found to be the fastest (ops/choice.py).

    Returns:
        [B, H, T, Dv] in the dtype of v. A fully masked row is 0, and so are its gradients. B, T and S may be 0. Under
        autocast, q, k and v are first cast to the autocast dtype, as SDPA does; lam is not.

    Raises:
        TypeError: an argument of a wrong type or dtype.
        ValueError: shapes, head counts, devices or names that do not fit.
        RuntimeError: the named backend cannot work here.
        NotImplementedError: it cannot compute a needed gradient, or does not support forward-mode AD or a transform of
            torch.func (vmap, jvp, ...), where "auto" is "reference".
    """
    q1, q2, k1, k2, v = autocast_inputs(q1, q2, k1, k2, v)
    arguments = check(q1, q2, k1, k2, v, lam, attn_mask, flag("is_causal", is_causal), window, scale)
    return attend(choose_for(q1, q2, k1, k2, v, arguments, backend), q1, q2, k1, k2, v, arguments)


def attend(choice: Choice, q1, q2, k1, k2, v, arguments: Arguments) -> Tensor:
    """[B, H, T, Dv] by the chosen backend, of cast and checked tensors and arguments."""
    if is_empty(q1, k1):
        mask = () if arguments.attn_mask is None else (arguments.attn_mask,)
        return zeros((*q1.shape[:3], v.shape[3]), v.dtype, q1, q2, k1, k2, v, arguments.lam, *mask)
    with autocast_off(q1.device.type):
        return backends.attend(choice, (q1, q2, k1, k2, v), arguments)


def choose_for(q1, q2, k1, k2, v, arguments: Arguments, backend: str) -> Choice:
    """The backend that computes a checked call, with all gradients that it needs.

    Raises:
        NotImplementedError: the named backend cannot compute a needed gradient. Others as ``resolve``.
    """
    mask = arguments.attn_mask
    mask_gradient = mask is not None and mask.requires_grad and torch.is_grad_enabled()
    choice = resolve(backend, (q1, q2, k1, k2, v), arguments, mask_gradient)
    if mask_gradient and choice.backend != "reference":
        raise NotImplementedError(
            f"attn_mask requires grad, which backend={choice.backend!r} does not compute; "
            "give backend='reference' or 'auto', or detach the mask"
        )
    refuse_missing_gradients(choice.backend, (q1, q2, k1, k2, v), arguments.lam)
    return choice


def resolve(
    backend: str, tensors: tuple[Tensor, ...], arguments: Arguments, mask_gradient: bool = False, measured: bool = True
) -> Choice:
    """The backend for checked tensors (q1, q2, k1, k2, v) and arguments. Logs what "auto" chooses.

    measured: False leaves the form on a GPU open, for calls whose forms only the caller knows.

    Raises:
        TypeError: no name. ValueError: an unknown name, or as ``check_environment``. RuntimeError: the named backend
        cannot work here, or not on these arguments. NotImplementedError: it does not support the transform that the
        call is made in.
    """
    device, dtype = tensors[0].device, tensors[0].dtype
    if not torch.compiler.is_compiling():
        check_environment()
    if backend == "auto":
        choice, because = choose(tensors, arguments, mask_gradient, measured)
        if not torch.compiler.is_compiling():
            _announce(device.type, dtype, choice, because)
        return choice
    if not isinstance(backend, str):
        raise TypeError(f"backend is {backend!r}; give one name: 'auto' or one of {', '.join(BACKENDS)}")
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; give 'auto' or one of {', '.join(BACKENDS)}")
    reason = unsupported_reason(backend, tensors, arguments)
    if reason is not None:
        here = ", ".join(available_backends(device, dtype)) or "none"
        raise RuntimeError(f"backend={backend!r} is not available: {reason}; available here: {here}")
    transform = active_transform()
    if transform is not None and backend not in PURE_PYTORCH:
        raise NotImplementedError(
            f"backend={backend!r} does not follow {transform}; give backend='reference' or 'auto', which is that here"
        )
    return Choice(backend)


def choose(
    tensors: tuple[Tensor, ...], arguments: Arguments, mask_gradient: bool, measured: bool = True
) -> tuple[Choice, str]:
    """What "auto" means: (the fastest backend that supports the call here, the reason for not taking a faster one)."""
    if mask_gradient:
        return Choice("reference"), "attn_mask requires grad"
    transform = active_transform()
    if transform is not None:
        return Choice("reference"), f"inside {transform}"
    if exporting():
        return Choice("sdpa"), "an exported program must load without this package's operators"
    device = tensors[0].device.type
    if device == "cpu" and device not in LOOKED_UP:
        return Choice("blockwise"), ""
    reason = unsupported_reason("triton", tensors, arguments)
    because = "" if reason is None else f"not 'triton', since {reason}"
    if measured and device in LOOKED_UP:
        return on_gpu.choose(tensors, arguments), because
    return Choice("triton" if reason is None else "sdpa"), because


def refuse_missing_gradients(backend: str, tensors: tuple[Tensor, ...], lam: Tensor) -> None:
    """Raise NotImplementedError if a tensor requires a gradient that the backend cannot compute here."""
    if backend == "flex" and torch.is_grad_enabled():
        named = zip(("q1", "q2", "k1", "k2", "v", "lam"), (*tensors, lam), strict=True)
        needing = [name for name, x in named if x.requires_grad]
        reason = flex.no_gradients_reason(lam.device)
        if needing and reason is not None:
            raise NotImplementedError(f"{', '.join(needing)} require grad: {reason}")


@cache
def check_environment() -> None:
    """Refuse bad values of the environment variables at the first call, also where nothing reads them.

    Raises:
        ValueError: DIFF_TRANSFORMER_TUNE or DIFF_TRANSFORMER_GLUON has a value that is not accepted.
    """
    tuning()
    triton.gluon_switches()


@cache
def _announce(device: str, dtype: torch.dtype, choice: Choice, because: str) -> None:
    name, form = str(dtype).removeprefix("torch."), "" if choice.form is None else f", {choice.form.name}"
    because = because and f" ({because})"
    log.info("diff_attention on %s, %s: backend=%r%s%s", device, name, choice.backend, form, because)


def diff_attention_maps(
    q1: Tensor,
    q2: Tensor,
    k1: Tensor,
    k2: Tensor,
    lam: float | Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
) -> DiffMaps:
    """The attention maps themselves: first = softmax(q1 k1^T scale), second, and first - lam * second.

    Arguments and errors as in ``diff_attention``. Each map is [B, H, T, S] in fp32 (fp64 for fp64 inputs), so memory
    holds several T x S maps. Rows of the difference sum to 1 - lam.
    """
    q1, q2, k1, k2 = autocast_inputs(q1, q2, k1, k2)
    arguments = check(q1, q2, k1, k2, None, lam, attn_mask, flag("is_causal", is_causal), window, scale)
    if is_empty(q1, k1):
        empty = zeros((*q1.shape[:3], k1.shape[2]), arguments.lam.dtype, q1, q2, k1, k2, arguments.lam)
        return DiffMaps(empty, empty, empty)
    with autocast_off(q1.device.type):
        return reference.maps(q1, q2, k1, k2, *arguments)


def available_backends(device: str | torch.device, dtype: torch.dtype) -> list[str]:
    """Names that ``diff_attention(backend=...)`` accepts for tensors of this device and dtype, the specification first.

    "flex" is listed where its forward works; on the CPU it has no backward. "triton" is not listed for the CPU, where
    only its interpreter runs (TRITON_INTERPRET=1, for tests). The list is empty for dtypes other than bfloat16,
    float16, float32 and float64, and for a device that this machine does not have.

    Raises:
        TypeError: dtype is no torch.dtype, or device is neither a name nor a device.
        RuntimeError: PyTorch does not know the device's name.
    """
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype is {dtype!r}; give a torch.dtype, such as torch.float32")
    if not isinstance(device, str | int | torch.device):
        raise TypeError(f"device is {device!r}; give a name, such as 'cuda', or a torch.device")
    device = torch.device(device)
    if dtype not in DTYPES or not _exists(device):
        return []
    names = [name for name, backend in BACKENDS.items() if backend.unsupported_reason(device, dtype) is None]
    return [name for name in names if not (name == "triton" and device.type == "cpu")]


def _exists(device: torch.device) -> bool:
    """Whether this machine has the device; true for devices without an availability check, such as meta."""
    module = getattr(torch, device.type, None)
    if module is None or not hasattr(module, "is_available"):
        return True
    return module.is_available() and (device.index is None or device.index < module.device_count())
