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

from diff_transformer.errors import UserError
from diff_transformer.model.config import DiffTransformerConfig
from diff_transformer.model.convert.conversion import Conversion, NamedTensors, renamed
from diff_transformer.model.differentiate import FIRST, check_start, each_head_twice
from diff_transformer.model.heads import CORES
from diff_transformer.model.parts import DEX


def to_differential(config: DiffTransformerConfig, attention: str, lambda_init: float = 0.5) -> Conversion:
    """Plan the conversion of a softmax Transformer to ``attention``.

    "diff": W_Q and W_K double in size; values keep their width (``value_head_dim``); heads have no norm. The two pairs
    of lambda vectors are equal, so lambda is exactly ``lambda_init``. "diff_v2": W_Q doubles in size; keys, values and
    their cache stay. lambda is sigmoid(X W_lambda). W_lambda starts at 0, so lambda starts at 1/2 for every token.
    "diff_v3" also gates the first map: the gates start at 1/2 and 1/4.

    Args:
        attention: "diff", "diff_v2" or "diff_v3".
        lambda_init: c, lambda of every layer at the start, between 0 and 1.

    Raises:
        UserError: for a model without softmax attention, another ``attention``, or a ``lambda_init`` that gives the
            second map no gradient.
    """
    check_start(attention, lambda_init)
    if config.attention != "softmax":
        raise UserError(f"the model has attention={config.attention!r} already; give a softmax Transformer")
    if config.variant != CORES["softmax"]:
        raise UserError(
            "the model's heads have a norm, a gate or a scale (softmax_head_norm, core, head_scale); converted heads "
            "have none, so that the logits would differ"
        )
    target, d, layers = copy.deepcopy(config), config.heads.head_dim, range(config.num_hidden_layers)
    target.attention, target.lambda_learned = attention, True
    twice = partial(each_head_twice, width=d)
    prefix, new = "model.layers.{}.self_attn.core.lam.", dict[str, Tensor]()
    if attention == "diff":
        assert config.num_key_value_heads is not None  # set by the configuration itself
        target.lambda_init, target.head_norm, target.head_norm_init = float(lambda_init), False, 1.0
        target.num_attention_heads = 2 * config.num_attention_heads
        target.num_key_value_heads = 2 * config.num_key_value_heads
        target.value_head_dim = config.heads.value_dim
        remaining = (1.0 - lambda_init) ** 2  # of the old map, and the factor 1 - lambda_init of every head
        moves = {"q_proj": twice, "k_proj": twice, "o_proj": partial(torch.mul, other=1 / remaining)}
        draw = torch.Generator().manual_seed(0)
        for i in layers:
            q, k = target.lambda_std * torch.randn(2, d, generator=draw)
            vectors = {"lambda_q1": q, "lambda_k1": k, "lambda_q2": q, "lambda_k2": k}
            new |= {prefix.format(i) + name: vector for name, vector in vectors.items()}
    else:
        if attention == "diff_v3":
            target.core = {"initial_ratio": float(lambda_init)}
        moves = {"q_proj": twice, "o_proj": partial(torch.mul, other=1 / ((1 - lambda_init) * FIRST[attention]))}
        zeros = torch.zeros(target.variant.sigmoids * target.num_diff_heads, target.hidden_size)
        new = {f"{prefix.format(i)}proj.weight": zeros for i in layers}

    def tensors(softmax: NamedTensors) -> NamedTensors:
        yield from renamed(softmax, moves=moves)
        yield from new.items()

    return Conversion(target, tensors)


_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "tie_word_embeddings",
)  # fmt: skip


def nearest(config: Any) -> Any:
    """The configuration of this package with the sizes and attention of any other decoder's: what it costs, nearly."""
    if isinstance(config, DiffTransformerConfig):
        return config
    sizes = {name: value for name in _SIZES if (value := getattr(config, name, None)) is not None}
    softmax = DiffTransformerConfig(attention="softmax", **sizes)
    entry = getattr(config, "differential", None)
    return softmax if entry is None or entry["kind"] == DEX else to_differential(softmax, entry["kind"]).config
