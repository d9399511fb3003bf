"""A conversion as data: for every tensor of the target, the source tensors that it is made from.

Nothing is computed until a tensor is read, so a large model passes through in pieces. The file reads top-down: named
tensors (``TensorSource``), plans over them, the names that layouts give to tensors, and exact moves of matrix rows.
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from diff_transformer.checks import listed
from diff_transformer.errors import UserError
from diff_transformer.model.card import source_facts

Shapes = dict[str, tuple[int, ...]]
BUFFERS = ("rotary_emb.inv_freq", "rope.inv_freq")  # ends of names in older checkpoints; the configuration has them


class TensorSource(Protocol):
    """Named tensors that are loaded on demand."""

    def shapes(self) -> Shapes: ...

    def dtype(self, name: str) -> torch.dtype: ...

    def tensor(self, name: str) -> Tensor: ...


class StateDict:
    """A ``TensorSource`` over tensors in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        self._tensors = tensors

    def shapes(self) -> Shapes:
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].dtype

    def tensor(self, name: str) -> Tensor:
        return self._tensors[name].detach()


# Plans.


def _same(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True)
class Made:
    """One target tensor: ``make`` applied to the tensors named in ``sources``.

    ``dtype`` is the dtype of the result; None takes that of the first source.
    """

    sources: tuple[str, ...]
    make: Callable[..., Tensor] = _same
    dtype: torch.dtype | None = None


Plan = dict[str, Made]


@dataclass
class Conversion:
    """The result of a layout's converter: the target's configuration, its tensors, and notes for the user."""

    config: object
    plan: Plan
    notes: list[str] = field(default_factory=list)


class Planned:
    """The result of a plan as a ``TensorSource``, so that two conversions chain without a copy in between.

    ``dtype`` casts every tensor whose dtype the plan leaves open; None keeps the dtype of the source.
    """

    def __init__(self, source: TensorSource, plan: Plan, shapes: Shapes, dtype: torch.dtype | None = None):
        self._source, self._plan, self._shapes, self._dtype = source, plan, shapes, dtype

    def shapes(self) -> Shapes:
        return self._shapes

    def dtype(self, name: str) -> torch.dtype:
        made = self._plan[name]
        asked = self._dtype or self._source.dtype(made.sources[0])
        return asked if made.dtype is None else torch.promote_types(made.dtype, asked)

    def tensor(self, name: str) -> Tensor:
        """Compute one tensor; it is contiguous.

        Raises:
            ValueError: if its shape is not the one that the target has.
        """
        made = self._plan[name]
        tensor = made.make(*(self._source.tensor(source) for source in made.sources))
        if tuple(tensor.shape) != self._shapes[name]:
            raise UserError(
                f"{name}, made of {', '.join(made.sources)}, has shape {tuple(tensor.shape)} where the target has "
                f"{self._shapes[name]}"
            )
        return tensor.to(self.dtype(name)).contiguous()


def convert_model(conversion: Conversion, kind: type, model) -> Any:
    """Apply ``conversion`` to a model in memory; return a new model of class ``kind`` that shares no tensor with it.

    Dtypes, train/eval mode and ``generation_config`` are those of ``model``. Buffers, such as the frequencies of the
    rotary embedding, keep the precision in which ``kind`` creates them.
    """
    target = kind(conversion.config)
    shapes = {name: tuple(tensor.shape) for name, tensor in target.state_dict().items()}
    planned = Planned(StateDict(model.state_dict()), conversion.plan, shapes)
    target.load_state_dict({name: planned.tensor(name).clone() for name in conversion.plan}, strict=False, assign=True)
    target.tie_weights()
    target.generation_config = copy.deepcopy(model.generation_config)
    target.source_facts = vars(model).get("source_facts") or source_facts(model.config._name_or_path)
    return target.train(model.training)


def check_tensors(found: Shapes, expected: Shapes, ignored: Iterable[str], what: str) -> None:
    """Check the tensors of a checkpoint against those that its configuration requires.

    Raises:
        ValueError: with the names that are missing, unknown or of another shape; long lists end in a count.
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
        raise UserError(f"the tensors are not those of {what}\n  " + "\n  ".join(lines))


# Names. A role is what a tensor does in a decoder. A layout has one template for each role, ``{i}`` being the layer.
# Roles that a model lacks (a tied head, the weight of a norm without one) are removed before a plan is made.

Names = dict[str, str]

LAMBDAS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")
HUGGING_FACE: Names = {
    "embedding": "model.embed_tokens.weight",
    "attention_norm": "model.layers.{i}.input_layernorm.weight",
    "q": "model.layers.{i}.self_attn.q_proj.weight",
    "k": "model.layers.{i}.self_attn.k_proj.weight",
    "v": "model.layers.{i}.self_attn.v_proj.weight",
    "o": "model.layers.{i}.self_attn.o_proj.weight",
    "mlp_norm": "model.layers.{i}.post_attention_layernorm.weight",
    "gate": "model.layers.{i}.mlp.gate_proj.weight",
    "up": "model.layers.{i}.mlp.up_proj.weight",
    "down": "model.layers.{i}.mlp.down_proj.weight",
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
}


def without(names: Names, *roles: str) -> Names:
    return {role: template for role, template in names.items() if role not in roles}


@dataclass(frozen=True)
class Change:
    """The change of a role's tensor: ``make`` of it and of the tensors of ``others``, roles of the same layer."""

    make: Callable[..., Tensor]
    others: tuple[str, ...] = ()


def plan_of(source: Names, target: Names, layers: int, changes: dict[str, Change] | None = None) -> Plan:
    """Plan every tensor of ``target``: the tensor of the same role in ``source``, changed where ``changes`` says how.

    Lambda vectors become at least fp32, which is exact: they stay fp32 in a half-precision model.
    """
    changes = changes or {}
    plan: Plan = {}
    for role, template in target.items():
        change = changes.get(role)
        roles = (role, *change.others) if change else (role,)
        dtype = torch.float32 if role in LAMBDAS else None
        for i in _layers(template, layers):
            sources = tuple(source[name].format(i=i) for name in roles)
            made = Made(sources, change.make, dtype) if change else Made(sources, dtype=dtype)
            plan[template.format(i=i)] = made
    return plan


def shapes_by_role(names: Names, by_role: dict[str, tuple[int, ...]], layers: int) -> Shapes:
    """Shapes of all tensors of a model, from one shape for each role."""
    return {template.format(i=i): by_role[role] for role, template in names.items() for i in _layers(template, layers)}


def _layers(template: str, layers: int) -> Iterable[int]:
    return range(layers) if "{i}" in template else (0,)


# Rows. A projection has one row for each output channel, head after head: [heads * width, inputs]. These moves are
# exact: rows change places, no number changes.


def halves_from_interleaved(weight: Tensor, head_dim: int) -> Tensor:
    """Reorder W_Q or W_K from a rotary embedding over neighbours (2i, 2i + 1) to one over halves (i, i + d/2).

    Queries and keys move alike, so every score ``q . k`` is the same sum in another order.
    """
    heads = weight.unflatten(0, (-1, head_dim // 2, 2))  # [heads, d / 2, 2, inputs]
    return heads.transpose(1, 2).flatten(0, 2)


def adjacent_from_split(weight: Tensor, head_dim: int) -> Tensor:
    """Make heads i and i + n/2, a pair in ``DiffLlama``, neighbours 2i and 2i + 1, a pair in this package."""
    heads = weight.unflatten(0, (2, -1, head_dim))  # [2, n / 2, d, inputs]
    return heads.transpose(0, 1).flatten(0, 2)


def split_from_adjacent(weight: Tensor, head_dim: int) -> Tensor:
    """The inverse of ``adjacent_from_split``."""
    heads = weight.unflatten(0, (-1, 2, head_dim))  # [n / 2, 2, d, inputs]
    return heads.transpose(0, 1).flatten(0, 2)


def take_heads(weight: Tensor, heads: list[int], width: int) -> Tensor:
    """Select the heads of ``weight`` in the order of ``heads``; a head may appear several times."""
    return weight.unflatten(0, (-1, width))[torch.tensor(heads)].flatten(0, 1)


def each_head_twice(weight: Tensor, width: int) -> Tensor:
    """Repeat every head of [heads * width, ...]: heads 2i and 2i + 1 are copies of head i."""
    return weight.unflatten(0, (-1, width)).repeat_interleave(2, dim=0).flatten(0, 1)


def fold_head_norm(output: Tensor, norm: Tensor) -> Tensor:
    """Multiply the head norm's weight into W_O: column ``c`` times ``norm[c % 2d]``; the result is at least fp32.

    The layer computes the product of the two anyway, so a norm without a weight gives the same output with this
    matrix, up to the rounding of the product.
    """
    wide = torch.promote_types(output.dtype, torch.float32)
    columns = output.to(wide).unflatten(1, (-1, norm.numel())) * norm.to(wide)
    return columns.flatten(1)
