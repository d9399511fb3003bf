"""The backends by name: what each can compute, and how a choice of one computes a call.

Shapes: B batch, H signal heads, T queries, Dv value width.
"""

from typing import Any, NamedTuple

from torch import Tensor

from diff_transformer.ops import cpu, flash, flex, reference, sdpa, triton
from diff_transformer.ops.arguments import Arguments, active_transform

BACKENDS: dict[str, Any] = {
    "reference": reference,
    "blockwise": cpu,
    "sdpa": sdpa,
    "flex": flex,
    "flash": flash,
    "triton": triton,
}


class Choice(NamedTuple):
    """A backend, and one of its forms; None for the backend's own default."""

    backend: str
    form: Any = None

    @property
    def name(self) -> str:
        return self.backend if self.form is None else f"{self.backend} ({self.form.name})"


class Documents(NamedTuple):
    """The packed documents of a call, checked; as the backends' ``attend_varlen`` takes them."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int


def unsupported_reason(backend: str, tensors: tuple[Tensor, ...], arguments: Arguments) -> str | None:
    """Why the backend cannot compute this call, or None."""
    module = BACKENDS[backend]
    reason = module.unsupported_reason(tensors[0].device, tensors[0].dtype)
    if reason is None and hasattr(module, "unsupported_call_reason"):
        reason = module.unsupported_call_reason(*tensors, *arguments)
    return reason


def takes_packed(backend: str, tensors: tuple[Tensor, ...]) -> bool:
    """Whether the backend computes all packed documents at once."""
    if backend == "sdpa":
        return active_transform() is None and bool(sdpa.packed_forms(*tensors))
    return backend == "triton" or (backend == "flash" and flash.takes_packed())


def attend(choice: Choice, tensors: tuple[Tensor, ...], arguments: Arguments, **options: Any) -> Tensor:
    """[B, H, T, Dv] by the chosen form."""
    return BACKENDS[choice.backend].attend(*tensors, *arguments, **_form_of(choice), **options)


def attend_packed(choice: Choice, tensors: tuple[Tensor, ...], arguments: Arguments, documents: Documents) -> Tensor:
    """[1, H, total, Dv] by the chosen form, within each document."""
    positions = (arguments.is_causal, arguments.window, arguments.scale)
    attend_varlen = BACKENDS[choice.backend].attend_varlen
    return attend_varlen(*tensors, arguments.lam, *documents, *positions, **_form_of(choice))


def _form_of(choice: Choice) -> dict[str, Any]:
    return {} if choice.form is None else {"form": choice.form}
