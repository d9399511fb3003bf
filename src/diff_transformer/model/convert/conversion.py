"""A conversion between two layouts: the target's configuration, and a function from the source's tensors to its own.

Conversions move rows of matrices and rename tensors. The moves are exact: rows change places, no number changes.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diff_transformer.errors import UserError
from diff_transformer.model.card import source_facts
from diff_transformer.model.config import DiffTransformerConfig
from diff_transformer.model.loading import wrong_weights

NamedTensors = Iterable[tuple[str, Tensor]]
# Fields that the configurations of this package and of Llama-like models share.
SHARED_FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "rope_parameters", "rms_norm_eps",
    "tie_word_embeddings", "initializer_range", "pad_token_id", "bos_token_id", "eos_token_id",
)  # fmt: skip


class Conversion(NamedTuple):
    """config: the target's. tensors: from the source's tensors, in any order, to the target's. notes: for the user."""

    config: Any
    tensors: Callable[[NamedTensors], NamedTensors]
    notes: tuple[str, ...] = ()


def renamed(
    tensors: NamedTensors,
    names: Mapping[str, str] | None = None,
    moves: Mapping[str, Callable[[Tensor], Tensor]] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """The tensors with other names and rows.

    Args:
        names: parts of names, and what replaces them.
        moves: by a module's own name, such as "q_proj", the change of its parameters.
    """
    for name, tensor in tensors:
        move = (moves or {}).get(name.split(".")[-2])
        for old, new in (names or {}).items():
            name = name.replace(old, new)
        yield name, tensor if move is None else move(tensor)


def converted(conversion: Conversion, model_class: Any, model: Any, dtype: torch.dtype | None = None) -> Any:
    """A new model of class ``model_class`` that shares no tensor with ``model``.

    Its device, train/eval mode and ``generation_config`` are those of ``model``, and so is its dtype if ``dtype`` is
    None. Lambda vectors are fp32.

    Raises:
        UserError: for a model with other weights than its configuration says.
    """
    tensors = {
        name: tensor.detach().clone(memory_format=torch.contiguous_format)
        for name, tensor in conversion.tensors(model.state_dict().items())
    }
    dtype = model.dtype if dtype is None else dtype
    target, info = model_class.from_pretrained(
        None, config=conversion.config, state_dict=tensors, dtype=dtype, output_loading_info=True,
        ignore_mismatched_sizes=True,
    )  # fmt: skip
    if wrong := wrong_weights(info, unknown=True):
        raise UserError(
            f"{type(model).__name__} has other weights than its configuration says ({wrong}); merge adapters and fold "
            "DEX before the conversion; what differentiate made differential is not converted"
        )
    for name, parameter in target.named_parameters():
        if name.rpartition(".")[2].startswith("lambda_"):
            parameter.data = tensors[name].to(parameter.device, torch.float32)
    target.generation_config = copy.deepcopy(model.generation_config)
    target.source_facts = vars(model).get("source_facts") or source_facts(model.config._name_or_path)
    return target.to(model.device).train(model.training)


def refuse(config: DiffTransformerConfig, target: str, **accepted: Iterable) -> None:
    """Check that each field named in ``accepted`` has one of the values that ``target`` can represent.

    Parts of a core, scales and clipping of this package's own are always refused.

    Raises:
        UserError: naming every field that does not.
    """
    accepted |= {"core": (None, {}), "head_scale": (1.0,), "qk_clip": (None,)}
    wrong = [
        f"{name} is {getattr(config, name)!r}, it holds {' or '.join(map(repr, values))}"
        for name, values in accepted.items()
        if getattr(config, name) not in values
    ]
    if wrong:
        raise UserError(f"{target} cannot hold this model: {'; '.join(wrong)}")


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
