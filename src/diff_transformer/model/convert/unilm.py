"""Attention layers of microsoft/unilm, folders Diff-Transformer and Diff-Transformer-V2: the authors' own code.

In these files, neighbouring heads form a pair, as in this package; the rotary embedding rotates neighbouring channels;
the head norm ``subln`` has eps 1e-5 (and no weight before 25 October 2024); ``num_heads`` counts differential heads. In
the second version, neighbours of the 2h query heads share keys and values, the sigmoid of ``lambda_proj`` is lambda for
each token and head, and there is no head norm.

Under grouped-query attention the naive file (``multihead_diffattn.py``) pairs other keys than the flash files, so that
its layers cannot be told from theirs and compute something else: only those with as many key/value heads as heads are
read rightly.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from diff_transformer.errors import UserError
from diff_transformer.model.attention import DiffAttention
from diff_transformer.model.convert.conversion import halves_from_interleaved

HEAD_NORM_EPS = 1e-5
LAMBDAS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")
_NAMES = {
    **{f"{name}_proj.weight": f"{name}_proj.weight" for name in "qkvo"},
    "out_proj.weight": "o_proj.weight",
    **{name: f"core.lam.{name}" for name in LAMBDAS},
    "subln.weight": "core.head_norm.weight",
    "lambda_proj.weight": "core.lam.proj.weight",
}
_V1 = {"q_proj.weight", "k_proj.weight", "v_proj.weight", "out_proj.weight", *LAMBDAS}
_V2 = {"q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight", "lambda_proj.weight"}


def attention_from_unilm(
    state: Mapping[str, Tensor], depth: int, *, rope_theta: float | None = 10000.0
) -> DiffAttention:
    """Convert one layer of the authors' code to a causal ``DiffAttention`` with equal outputs.

    Args:
        state: ``state_dict()`` of ``MultiheadDiffAttn``, ``MultiheadFlashDiff*`` or ``MultiheadFlashDiffV2``.
        depth: the layer's index from 0, as the authors' constructors take it.
        rope_theta: base of the rotary embedding in ``rel_pos``; None for a layer without one.

    Raises:
        UserError: if tensors are missing or unknown.
    """
    names = set(state) - {"subln.weight"}
    if names not in (_V1, _V2):
        raise UserError(f"the layer has {sorted(state)}; expected {sorted(_V1)}, or for V2 {sorted(_V2)}")
    tensors, fields = dict(state), dict[str, Any]()
    if names == _V1:
        d = state["lambda_q1"].numel()
        heads, pairs = (state[name].shape[0] // (2 * d) for name in ("q_proj.weight", "k_proj.weight"))
        norm = True if "subln.weight" in state else "no_weight"
        fields |= {"num_key_value_heads": 2 * pairs, "head_norm": norm, "norm_eps": HEAD_NORM_EPS}
        heads *= 2
    else:
        heads = state["lambda_proj.weight"].shape[0]
        d = state["o_proj.weight"].shape[1] // heads
        fields |= {"num_key_value_heads": state["k_proj.weight"].shape[0] // d, "attention": "diff_v2"}
    if rope_theta is not None:
        for name in ("q_proj.weight", "k_proj.weight"):
            tensors[name] = halves_from_interleaved(tensors[name], d)
    width = state["q_proj.weight"].shape[1]
    layer = DiffAttention(width, heads, head_dim=d, is_causal=True, rope_theta=rope_theta, layer_index=depth, **fields)
    layer.to(state["q_proj.weight"].dtype).load_state_dict({_NAMES[name]: x for name, x in tensors.items()})
    return layer
