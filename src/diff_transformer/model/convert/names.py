"""What the tensors of a decoder do (roles), and what each layout calls them.

A layout's names are a template for each role, ``{i}`` being the layer. Roles that a model has not (a tied head, the
weight of a norm without one) are left out before a plan is made.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from diff_transformer.model.convert.plan import Made, Plan

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
_PREFIX = "model.layers.{i}.self_attn.core"
OURS: Names = {
    **HUGGING_FACE,
    **{name: f"{_PREFIX}.lam.{name}" for name in LAMBDAS},
    "lambda_proj": f"{_PREFIX}.lam.proj.weight",
    "head_norm": f"{_PREFIX}.head_norm.weight",
    "activation_weight": "model.layers.{i}.mlp.act_fn.weight",
    "activation_bias": "model.layers.{i}.mlp.act_fn.bias",
}


@dataclass(frozen=True)
class Change:
    """How a role's tensor changes on its way: ``make`` of it and of the tensors of ``others``, roles of the layer."""

    make: Callable[..., Tensor]
    others: tuple[str, ...] = ()


def without(names: Names, *roles: str) -> Names:
    return {role: template for role, template in names.items() if role not in roles}


def plan_of(source: Names, target: Names, layers: int, changes: dict[str, Change] | None = None) -> Plan:
    """Every tensor of ``target``: the tensor of the same role in ``source``, changed where ``changes`` says how.

    Lambda vectors become fp32 (exact): they stay so in a model of half precision.
    """
    changes = changes or {}
    plan: Plan = {}
    for role, template in target.items():
        change = changes.get(role)
        roles = (role, *change.others) if change else (role,)
        dtype = torch.float32 if role in LAMBDAS else None
        for i in range(layers) if "{i}" in template else (0,):
            sources = tuple(source[name].format(i=i) for name in roles)
            made = Made(sources, change.make, dtype) if change else Made(sources, dtype=dtype)
            plan[template.format(i=i)] = made
    return plan
