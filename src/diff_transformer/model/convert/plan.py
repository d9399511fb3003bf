"""A conversion as data: for every tensor of the target, the tensors of the source that it is made of.

Nothing is computed until a tensor is asked for, so that a large model passes through in pieces.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from diff_transformer.checks import listed

Shapes = dict[str, tuple[int, ...]]


class Source(Protocol):
    """Named tensors, each loaded when asked for."""

    def shapes(self) -> Shapes: ...

    def dtype(self, name: str) -> torch.dtype: ...

    def tensor(self, name: str) -> Tensor: ...


def _same(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True)
class Made:
    """One tensor of the target: ``make`` of the tensors called ``sources``, cast to ``dtype`` (the first one's)."""

    sources: tuple[str, ...]
    make: Callable[..., Tensor] = _same
    dtype: torch.dtype | None = None


Plan = dict[str, Made]


@dataclass
class Conversion:
    """What a layout's converter returns: the target's configuration, its tensors, and what a user should know."""

    config: object
    plan: Plan
    notes: list[str] = field(default_factory=list)


class StateDict:
    """A ``Source`` of tensors in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        self._tensors = tensors

    def shapes(self) -> Shapes:
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].dtype

    def tensor(self, name: str) -> Tensor:
        return self._tensors[name].detach()


class Planned:
    """The target of a plan, itself a ``Source``, so that two conversions chain without a copy in between.

    ``dtype`` casts every tensor whose dtype the plan leaves open; None keeps that of the source.
    """

    def __init__(self, source: Source, plan: Plan, shapes: Shapes, dtype: torch.dtype | None = None):
        self._source, self._plan, self._shapes, self._dtype = source, plan, shapes, dtype

    def shapes(self) -> Shapes:
        return self._shapes

    def dtype(self, name: str) -> torch.dtype:
        made = self._plan[name]
        return made.dtype or self._dtype or self._source.dtype(made.sources[0])

    def tensor(self, name: str) -> Tensor:
        """The tensor, contiguous.

        Raises:
            ValueError: if it comes out in another shape than the target's.
        """
        made = self._plan[name]
        tensor = made.make(*(self._source.tensor(source) for source in made.sources))
        if tuple(tensor.shape) != self._shapes[name]:
            raise ValueError(
                f"{name}, made of {', '.join(made.sources)}, has shape {tuple(tensor.shape)} where the target has "
                f"{self._shapes[name]}"
            )
        return tensor.to(self.dtype(name)).contiguous()


def check_tensors(found: Shapes, expected: Shapes, ignored: Iterable[str], what: str) -> None:
    """Check the tensors of a checkpoint against those that its configuration asks for.

    Raises:
        ValueError: with the names that are missing, not known, or of another shape; long lists end in a count.
    """
    ignored = set(ignored)
    missing = [name for name in expected if name not in found]
    extra = [name for name in found if name not in expected and name not in ignored]
    other = [
        f"{name} {found[name]} (expected {shape})"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    lines = [
        f"{len(names)} {kind}: {listed(names)}"
        for kind, names in (("missing", missing), ("not known", extra), ("of another shape", other))
        if names
    ]
    if lines:
        raise ValueError(f"the tensors are not those of {what}\n  " + "\n  ".join(lines))
