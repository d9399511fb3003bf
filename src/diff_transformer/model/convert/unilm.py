"""Attention layers of microsoft/unilm, folders Diff-Transformer and Diff-Transformer-V2: the authors' own code.

In these files, neighbouring heads form a pair, as in this package; the rotary embedding rotates neighbouring channels;
the head norm ``subln`` has eps 1e-5 (and no weight before 25 October 2024); ``num_heads`` counts differential heads. In
the second version, neighbours of the 2h query heads share keys and values, the sigmoid of ``lambda_proj`` is lambda for
each token and head, and there is no head norm.

Under grouped-query attention the naive file (``multihead_diffattn.py``) pairs other keys than the flash files. It
repeats the 2g key heads of the g key/value pairs r times, one after another, and takes neighbours as the two maps. So
differential head i uses keys 2i // r and (2i + 1) // r, while the flash files give it both keys of pair i // r; values
agree. With an even r both maps use the same key. Multi-head attention (r = 1) is not affected.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from diff_transformer.errors import UserError
from diff_transformer.model.attention import DiffAttention
from diff_transformer.model.convert.conversion import halves_from_interleaved, take_heads

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
    state: Mapping[str, Tensor], depth: int, *, rope_theta: float | None = 10000.0, naive_grouped_query: bool = False
) -> DiffAttention:
    """Convert one layer of the authors' code to a causal ``DiffAttention`` with equal outputs.

    Args:
        state: ``state_dict()`` of ``MultiheadDiffAttn``, ``MultiheadFlashDiff*`` or ``MultiheadFlashDiffV2``.
        depth: the layer's index from 0, as the authors' constructors take it.
        rope_theta: base of the rotary embedding in ``rel_pos``; None for a layer without one.
        naive_grouped_query: the layer comes from ``multihead_diffattn.py`` and uses grouped-query attention.

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
        if naive_grouped_query:
            keys, values = naive_sources(heads, pairs)
            tensors["k_proj.weight"] = take_heads(tensors["k_proj.weight"], keys, d)
            tensors["v_proj.weight"] = take_heads(tensors["v_proj.weight"], values, 2 * d)
            pairs = len(values)
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


def naive_sources(diff_heads: int, pairs: int) -> tuple[list[int], list[int]]:
    """The heads of the naive file that each key and value head of this package copies, so that the outputs are equal.

    Returns:
        The source of every key head (two for each key/value pair of this package) and of every value head (one).
        Consecutive differential heads with the same keys and values share a pair: an even r gives twice as many pairs
        as the naive file has, an odd r gives as many as differential heads.
    """
    r = diff_heads // pairs
    used = [((2 * i) // r, (2 * i + 1) // r, i // r) for i in range(diff_heads)]
    sizes = (size for size in range(diff_heads, 0, -1) if diff_heads % size == 0)
    size = next(size for size in sizes if all(x == used[i - i % size] for i, x in enumerate(used)))
    blocks = used[::size]
    return [key for first, second, _ in blocks for key in (first, second)], [value for _, _, value in blocks]
