"""A conversion as data: for every tensor of the target, the source tensors that it is computed from.

The file reads top-down: plans, the names that layouts give to tensors, and exact moves of matrix rows.
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diff_transformer.checks import listed
from diff_transformer.errors import UserError
from diff_transformer.model.card import source_facts
from diff_transformer.model.config import DiffTransformerConfig

BUFFERS = ("rotary_emb.inv_freq", "rope.inv_freq")  # ends of names in older checkpoints; the configuration has them


def _same(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True)
class TargetTensor:
    """One target tensor: ``compute`` applied to the tensors named in ``sources``.

    ``dtype`` is the least dtype of the result; None takes that of the first source.
    """

    sources: tuple[str, ...]
    compute: Callable[..., Tensor] = _same
    dtype: torch.dtype | None = None


Plan = dict[str, TargetTensor]


@dataclass
class Conversion:
    """The result of a layout's converter: the target's configuration, its tensors, and notes for the user."""

    config: Any
    plan: Plan
    notes: list[str] = field(default_factory=list)


def assemble(plan: Plan, tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Compute the tensors of a plan, contiguous, without memory shared with ``tensors``.

    ``dtype`` casts every tensor whose dtype the plan leaves open; None keeps the dtype of the source.

    Raises:
        UserError: for tensors that are missing or not known; the output matrix may be there beside tied embeddings.
    """
    needed = {name for target in plan.values() for name in target.sources}
    wrong = {
        "missing": [name for name in needed if name not in tensors],
        "not known": [
            name for name in tensors if name not in needed and not name.endswith((*BUFFERS, "lm_head.weight"))
        ],
    }
    if any(wrong.values()):
        lists = "; ".join(f"{len(names)} {kind}: {listed(sorted(names))}" for kind, names in wrong.items() if names)
        raise UserError(f"the tensors are not those of the model in config.json: {lists}")
    results = {}
    for name, target in plan.items():
        sources = [tensors[source].detach() for source in target.sources]
        result_dtype = dtype or sources[0].dtype
        if target.dtype is not None:
            result_dtype = torch.promote_types(target.dtype, result_dtype)
        result = target.compute(*sources)
        results[name] = result.to(result_dtype, copy=True, memory_format=torch.contiguous_format)
    return results


def load_tensors(kind: Any, config: Any, tensors: dict[str, Tensor], dtype: torch.dtype) -> Any:
    """A model of class ``kind`` in eval mode with these tensors; lambda vectors stay fp32.

    Raises:
        UserError: for tensors of another shape.
    """
    model, info = kind.from_pretrained(
        None, config=config, state_dict=tensors, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True
    )
    if info["mismatched_keys"]:
        name, given, accepted = min(info["mismatched_keys"])
        raise UserError(f"{name} has shape {list(given)}, and the configuration asks for {list(accepted)}")
    return model


def convert_model(conversion: Conversion, kind: Any, model: Any) -> Any:
    """Apply ``conversion`` to a model in memory; return a new model of class ``kind`` that shares no tensor with it.

    Dtypes, device, train/eval mode and ``generation_config`` are those of ``model``.
    """
    tensors = assemble(conversion.plan, model.state_dict())
    target = load_tensors(kind, conversion.config, tensors, model.dtype).to(model.device)
    target.generation_config = copy.deepcopy(model.generation_config)
    target.source_facts = vars(model).get("source_facts") or source_facts(model.config._name_or_path)
    return target.train(model.training)


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
_CORE = "model.layers.{i}.self_attn.core"
PACKAGE_NAMES: Names = {
    **HUGGING_FACE,
    **{name: f"{_CORE}.lam.{name}" for name in LAMBDAS},
    "lambda_proj": f"{_CORE}.lam.proj.weight",
    "head_norm": f"{_CORE}.head_norm.weight",
    "activation_weight": "model.layers.{i}.mlp.act_fn.weight",
    "activation_bias": "model.layers.{i}.mlp.act_fn.bias",
}
# Fields that the configurations of this package and of Llama-like models share.
SHARED_FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "rope_parameters", "rms_norm_eps",
    "tie_word_embeddings", "initializer_range", "pad_token_id", "bos_token_id", "eos_token_id",
)  # fmt: skip


def without(names: Names, *roles: str) -> Names:
    return {role: template for role, template in names.items() if role not in roles}


def package_names(config: DiffTransformerConfig) -> Names:
    """Name templates of the tensors in a model of ``config``."""
    absent = ["head"] if config.tie_word_embeddings else []
    if config.variant.lam != "learned":
        absent += LAMBDAS
    if not config.variant.sigmoids:
        absent.append("lambda_proj")
    if config.variant.head_norm != "weighted":
        absent.append("head_norm")
    if config.hidden_act != "poly_norm":
        absent += ["activation_weight", "activation_bias"]
    return without(PACKAGE_NAMES, *absent)


class Change(NamedTuple):
    """The change of a role's tensor: ``compute`` of it and of the tensors of ``others``, roles of the same layer."""

    compute: Callable[..., Tensor]
    others: tuple[str, ...] = ()


def plan_of(source: Names, target: Names, layers: int, changes: dict[str, Change] | None = None) -> Plan:
    """Plan every tensor of ``target``: the tensor of the same role in ``source``, changed where ``changes`` says how.

    Lambda vectors become at least fp32, which is exact: they stay fp32 in a half-precision model.
    """
    plan: Plan = {}
    for role, template in target.items():
        change = (changes or {}).get(role, Change(_same))
        dtype = torch.float32 if role in LAMBDAS else None
        for i in range(layers) if "{i}" in template else (0,):
            sources = tuple(source[name].format(i=i) for name in (role, *change.others))
            plan[template.format(i=i)] = TargetTensor(sources, change.compute, dtype)
    return plan


def refuse(config: DiffTransformerConfig, target: str, **accepted: Iterable) -> None:
    """Check that each field named in ``accepted`` has one of the values that ``target`` can represent.

    Raises:
        UserError: naming every field that does not.
    """
    wrong = [
        f"{name} is {getattr(config, name)!r}, it holds {' or '.join(map(repr, values))}"
        for name, values in accepted.items()
        if getattr(config, name) not in values
    ]
    if wrong:
        raise UserError(f"{target} cannot hold this model: {'; '.join(wrong)}")


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


def fold_head_norm(output: Tensor, norm: Tensor) -> Tensor:
    """Multiply the head norm's weight into W_O: column ``c`` times ``norm[c % 2d]``; the result is at least fp32.

    The layer computes the product of the two anyway, so a norm without a weight gives the same output with this
    matrix, up to the rounding of the product.
    """
    wide = torch.promote_types(output.dtype, torch.float32)
    columns = output.to(wide).unflatten(1, (-1, norm.numel())) * norm.to(wide)
    return columns.flatten(1)
