"""Convert a trained softmax Transformer to a DIFF Transformer with the same logits that trains from its first step.

Every head becomes a differential head whose two maps are both the old map: q2, k2 are copies of q1, k1. With lambda = c
the difference of the maps is (1 - c) times the old map. Dividing W_O by this factor restores the logits. The copies
separate at the first training step, because their gradients have opposite signs: the first map's scores get the old
map's gradient times 1 / (1 - c), the second map's scores get it times -c / (1 - c). Setting lambda and its vectors to 0
would also keep the logits, but then the gradients of the second map and of lambda would stay 0.

With c = 1/2 every factor is a power of two, so even bf16 weights are scaled without rounding.
"""

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from diff_transformer.errors import UserError
from diff_transformer.model.config import DiffTransformerConfig
from diff_transformer.model.convert.llama import from_llama
from diff_transformer.model.convert.package import PACKAGE_NAMES, package_names
from diff_transformer.model.convert.plan import (
    LAMBDAS,
    Change,
    Conversion,
    Made,
    convert_model,
    each_head_twice,
    plan_of,
    without,
)
from diff_transformer.model.cost import model_cost
from diff_transformer.model.differentiate import check_start
from diff_transformer.model.modeling import DiffTransformerForCausalLM

HALF = 0.5


def softmax_to_diff(
    model: DiffTransformerForCausalLM | LlamaForCausalLM, attention: str = "diff", **options
) -> DiffTransformerForCausalLM:
    """Convert ``model``, a softmax Transformer of this package or a Llama, to a DIFF Transformer with equal logits.

    Args:
        attention: ``"diff"`` (see ``to_diff``, which takes the options) or ``"diff_v2"`` (see ``to_diff_v2``).

    Raises:
        TypeError: for a model of another class.
        ValueError: for a model with differential attention, head norms or biases, or an unknown option.
    """
    if not isinstance(model, DiffTransformerForCausalLM | LlamaForCausalLM):
        raise UserError(
            f"the model is a {type(model).__name__}; accepted: DiffTransformerForCausalLM with attention='softmax', "
            "or LlamaForCausalLM. `diff-transformer convert` takes folders of other models"
        )
    ways = {"diff": to_diff, "diff_v2": to_diff_v2}
    if attention not in ways:
        raise UserError(f"attention is {attention!r}; accepted: {', '.join(map(repr, ways))}")
    softmax: Any = from_llama(model) if isinstance(model, LlamaForCausalLM) else model
    return convert_model(ways[attention](softmax.config, **options), DiffTransformerForCausalLM, softmax)


def to_diff(config: DiffTransformerConfig, *, lambda_init: float = HALF, seed: int = 0) -> Conversion:
    """Plan the conversion of a softmax Transformer to ``attention="diff"``.

    W_Q and W_K double in size; values keep their width (``value_head_dim``); heads have no norm.

    Args:
        lambda_init: c, lambda of every layer at the start, between 0 and 1.
        seed: seed of the lambda vectors. The two pairs of vectors are equal, so lambda is exactly c.

    Raises:
        ValueError: for a model without softmax attention, or a ``lambda_init`` that gives the second map no gradient.
    """
    _check(config)
    check_start("diff", lambda_init)
    assert config.num_key_value_heads is not None  # set by the configuration itself
    target = copy.deepcopy(config)
    target.attention, target.lambda_init, target.lambda_learned = "diff", float(lambda_init), True
    target.head_norm, target.head_norm_init = False, 1.0
    target.num_attention_heads = 2 * config.num_attention_heads
    target.num_key_value_heads = 2 * config.num_key_value_heads
    target.value_head_dim = config.heads.value_dim
    twice = Change(partial(each_head_twice, width=config.heads.head_dim))
    kept = (1.0 - lambda_init) ** 2  # of the old map, and the factor 1 - lambda_init of every head
    names = package_names(target)
    plan = plan_of(
        package_names(config), without(names, *LAMBDAS), config.num_hidden_layers,
        {"q": twice, "k": twice, "o": Change(partial(torch.mul, other=1 / kept))},
    )  # fmt: skip
    draw = torch.Generator().manual_seed(seed)
    for i in range(config.num_hidden_layers):
        q, k = target.lambda_std * torch.randn(2, config.heads.head_dim, generator=draw)
        for role, vector in zip(LAMBDAS, (q, k, q, k), strict=True):
            plan[names[role].format(i=i)] = _instead(vector, i)
    notes = [_growth(config, target), f"lambda starts at {lambda_init:g} in every layer"]
    return Conversion(target, plan, notes)


def to_diff_v2(config: DiffTransformerConfig) -> Conversion:
    """Plan the conversion to ``attention="diff_v2"``: W_Q doubles in size; keys, values and their cache stay.

    lambda is sigmoid(X W_lambda). W_lambda starts at 0, so lambda starts at 1/2 for every token.

    Raises:
        ValueError: for a model without softmax attention.
    """
    _check(config)
    target = copy.deepcopy(config)
    target.attention, target.lambda_learned = "diff_v2", True
    names = package_names(target)
    twice = Change(partial(each_head_twice, width=config.heads.head_dim))
    changes = {"q": twice, "o": Change(partial(torch.mul, other=1 / HALF))}
    plan = plan_of(package_names(config), without(names, "lambda_proj"), config.num_hidden_layers, changes)
    for i in range(config.num_hidden_layers):
        plan[names["lambda_proj"].format(i=i)] = _instead(torch.zeros(target.num_diff_heads, target.hidden_size), i)
    return Conversion(target, plan, [_growth(config, target), "lambda starts at 0.5 for every token"])


_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "tie_word_embeddings",
)  # fmt: skip


def nearest(config: Any) -> Any:
    """The configuration of this package with the sizes and attention of any other decoder's: what it costs, nearly."""
    if isinstance(config, DiffTransformerConfig):
        return config
    sizes = {name: value for name in _SIZES if (value := getattr(config, name, None)) is not None}
    made = DiffTransformerConfig(attention="softmax", **sizes)
    entry = getattr(config, "differential", None)
    return made if entry is None else {"diff": to_diff, "diff_v2": to_diff_v2}[entry["kind"]](made).config


def has_experts(config: Any) -> bool:
    """True if a decoder is a mixture of experts, of which ``nearest`` counts one."""
    return any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))


def _check(config: DiffTransformerConfig):
    if config.attention != "softmax":
        raise UserError(f"the model has attention={config.attention!r} already; give a softmax Transformer")
    if config.softmax_head_norm:
        raise UserError("softmax_head_norm is True; the converted heads have no norm, so that the logits would differ")


def _growth(source: DiffTransformerConfig, target: DiffTransformerConfig) -> str:
    before, after = model_cost(source), model_cost(target)
    more = after.total_parameters / before.total_parameters - 1
    cache = after.kv_bytes_per_token / before.kv_bytes_per_token
    return (
        f"parameters: {before.total_parameters:,} -> {after.total_parameters:,} (+{more:.1%}); key/value cache: "
        f"{cache:g} times as large"
    )


def _instead(tensor: Tensor, layer: int) -> Made:
    """A new tensor: fp32 for the lambda vectors, else in the dtype of the layer's W_Q."""
    dtype = torch.float32 if tensor.dim() == 1 else None
    return Made((PACKAGE_NAMES["q"].format(i=layer),), lambda source: tensor.to(source.device, copy=True), dtype)
