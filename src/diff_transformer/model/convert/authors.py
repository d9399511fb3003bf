"""The authors' layout, version 1: ``multihead_diffattn.py`` and ``multihead_flashdiff_*.py`` of microsoft/unilm.

In these files, neighbouring heads form a pair, as in this package; the rotary embedding rotates neighbouring channels;
the head norm ``subln`` has eps 1e-5 (and no weight before 25 October 2024); ``num_heads`` counts differential heads.

Under grouped-query attention the naive file (``multihead_diffattn.py``) pairs other keys than the flash files. It
repeats the 2g key heads of the g key/value pairs r times, one after another, and takes neighbours as the two maps. So
differential head i uses keys 2i // r and (2i + 1) // r, while the flash files give it both keys of pair i // r; values
agree. With an even r both maps use the same key. Multi-head attention (r = 1) is not affected.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from diff_transformer.model.attention import DiffAttention
from diff_transformer.model.config import DiffTransformerConfig
from diff_transformer.model.convert.authors_config import (
    LAYER,
    AuthorsConfig,
    read_params,
    shapes_of_params,
    write_params,
)
from diff_transformer.model.convert.checkpoint import Checkpoint
from diff_transformer.model.convert.ours import our_names, plain_rope_theta, refuse
from diff_transformer.model.convert.plan import (
    LAMBDAS,
    Change,
    Conversion,
    Names,
    Shapes,
    halves_from_interleaved,
    interleaved_from_halves,
    plan_of,
    take_heads,
    without,
)

HEAD_NORM_EPS = 1e-5


def read_config(checkpoint: Checkpoint, *, naive_grouped_query: bool = False) -> AuthorsConfig:
    return read_params(checkpoint, version=1, naive=naive_grouped_query)


def write_config(config: AuthorsConfig, folder: Path, dtype: torch.dtype) -> None:
    write_params(config, folder)


def tensors(config: AuthorsConfig) -> Shapes:
    return shapes_of_params(config)


def to_ours(config: AuthorsConfig) -> Conversion:
    """To ``attention="diff"`` with the head norm's weight; rows of W_Q and W_K move, nothing else changes.

    For a model of the naive file, key and value heads are repeated (see ``naive_sources``).
    """
    keys, values = naive_sources(config.n_heads, config.n_kv_heads) if config.naive else (None, None)
    pairs = len(values) if values else config.n_kv_heads
    ours = DiffTransformerConfig(
        attention="diff",
        num_attention_heads=2 * config.n_heads,
        num_key_value_heads=2 * pairs,
        head_norm_eps=None if config.norm_eps == HEAD_NORM_EPS else HEAD_NORM_EPS,
        head_norm=True if config.has_head_norm_weight else "no_weight",
        **shared_fields(config),
    )
    changes = _to_ours(config.head_dim, keys, values)
    notes = config.notes()
    if values and pairs != config.n_kv_heads:
        notes.append(
            f"key and value heads are repeated, {config.n_kv_heads} pairs to {pairs}, to keep what the naive file "
            "computed: the cache grows as much, and training on would let the repeated heads part"
        )
    return Conversion(ours, plan_of(config.names(), our_names(ours), config.n_layers, changes), notes)


def from_ours(config: DiffTransformerConfig, *, naive_grouped_query: bool = False) -> Conversion:
    """The inverse, for the authors' flash files, or for the naive file with ``naive_grouped_query``.

    Raises:
        ValueError: for what their layer cannot hold: another attention or lambda_init, a model without head norm or
            with another epsilon in it, another activation, a window, a rotary embedding that is scaled.
    """
    refuse(
        config, "the authors' layout",
        attention=("diff",), head_norm=(True, "no_weight"), lambda_init=("depth",), lambda_depth_offset=(0,),
        lambda_learned=(True,), value_head_dim=(None, 2 * config.heads.head_dim), hidden_act=("silu",),
        head_norm_eps=(HEAD_NORM_EPS, None) if config.rms_norm_eps == HEAD_NORM_EPS else (HEAD_NORM_EPS,),
        sliding_window=(None,),
    )  # fmt: skip
    pairs, heads = config.heads.values, config.heads.outputs
    naive = naive_grouped_query and pairs != heads
    if naive and pairs % 2:
        raise ValueError(
            f"the naive grouped-query file cannot hold {pairs} key/value pairs for {heads} differential heads: with an "
            "even number of heads a pair it has neighbouring pairs alike; convert without --naive-grouped-query"
        )
    authors = AuthorsConfig(
        n_heads=heads,
        n_kv_heads=pairs // 2 if naive else pairs,
        has_head_norm_weight=config.head_norm is True,
        naive=naive,
        **shared_params(config),
    )
    plan = plan_of(our_names(config), authors.names(), authors.n_layers, _from_ours(authors.head_dim, naive))
    return Conversion(authors, plan)


def shared_fields(config: AuthorsConfig) -> dict:
    """Fields of ``DiffTransformerConfig`` that both versions determine."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "intermediate_size": config.hidden_dim,
        "num_hidden_layers": config.n_layers,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_seq_len,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied,
    }


def shared_params(config: DiffTransformerConfig) -> dict:
    """The inverse of ``shared_fields``."""
    return {
        "vocab_size": config.vocab_size,
        "dim": config.hidden_size,
        "hidden_dim": config.intermediate_size,
        "n_layers": config.num_hidden_layers,
        "head_dim": config.heads.head_dim,
        "max_seq_len": config.max_position_embeddings,
        "rope_theta": plain_rope_theta(config, "the authors' layout"),
        "norm_eps": config.rms_norm_eps,
        "tied": config.tie_word_embeddings,
    }


def attention_from_authors(
    state: Mapping[str, Tensor], depth: int, *, rope_theta: float | None = 10000.0, naive_grouped_query: bool = False
) -> DiffAttention:
    """Convert one layer of the authors' code to a causal ``DiffAttention`` with equal outputs.

    Args:
        state: ``state_dict()`` of ``MultiheadDiffAttn`` or ``MultiheadFlashDiff*``.
        depth: the layer's index from 0, as the authors' constructors take it.
        rope_theta: base of the rotary embedding in ``rel_pos``; None for a layer without one.
        naive_grouped_query: the layer comes from ``multihead_diffattn.py`` and uses grouped-query attention.

    Raises:
        ValueError: if tensors are missing or unknown.
    """
    weight = "subln.weight" in state
    names = LAYER[1] if weight else without(LAYER[1], "head_norm")
    if set(names.values()) != set(state):
        raise ValueError(f"the layer has {sorted(state)}; expected {sorted(names.values())}")
    d = state["lambda_q1"].numel()
    heads, pairs = (state[name].shape[0] // (2 * d) for name in ("q_proj.weight", "k_proj.weight"))
    keys, values = naive_sources(heads, pairs) if naive_grouped_query else (None, None)
    layer = DiffAttention(
        state["q_proj.weight"].shape[1],
        2 * heads,
        num_key_value_heads=2 * (len(values) if values else pairs),
        head_dim=d,
        is_causal=True,
        rope_theta=rope_theta,
        layer_index=depth,
        head_norm=True if weight else "no_weight",
        norm_eps=HEAD_NORM_EPS,
    )
    changes = _to_ours(d, keys, values, rotary=rope_theta is not None)
    made = {role: changes[role].make(state[name]) if role in changes else state[name] for role, name in names.items()}
    layer.to(state["q_proj.weight"].dtype).load_state_dict({_OUR_LAYER[role]: tensor for role, tensor in made.items()})
    return layer


_OUR_LAYER: Names = {
    **{role: f"{role}_proj.weight" for role in "qkvo"},
    **{name: f"core.lam.{name}" for name in LAMBDAS},
    "head_norm": "core.head_norm.weight",
}


def _to_ours(d: int, keys: list[int] | None, values: list[int] | None, rotary: bool = True) -> dict[str, Change]:
    def turned(weight: Tensor) -> Tensor:
        return halves_from_interleaved(weight, d) if rotary else weight

    changes = {"q": Change(turned), "k": Change(turned)}
    if keys is not None and values is not None:
        changes["k"] = Change(lambda weight: turned(take_heads(weight, keys, d)))
        changes["v"] = Change(lambda weight: take_heads(weight, values, 2 * d))
    return changes


def _from_ours(d: int, naive: bool) -> dict[str, Change]:
    turned = partial(interleaved_from_halves, head_dim=d)
    changes = {"q": Change(turned), "k": Change(turned)}
    if naive:
        changes["k"] = Change(lambda weight: single_keys(turned(weight), d))
        changes["v"] = Change(partial(single_values, value_dim=2 * d))
    return changes


def naive_sources(diff_heads: int, pairs: int) -> tuple[list[int], list[int]]:
    """The heads of the naive file that each key and value head of this package copies, so that the outputs are equal.

    Returns:
        The source of every key head (two for each key/value pair of this package) and of every value head (one).
        Consecutive differential heads with the same keys and values share a pair: an even r gives twice as many pairs
        as the naive file has, an odd r gives as many as differential heads.
    """
    r = diff_heads // pairs
    used = [((2 * i) // r, (2 * i + 1) // r, i // r) for i in range(diff_heads)]
    size = next(s for s in range(diff_heads, 0, -1) if diff_heads % s == 0 and _same_in_blocks(used, s))
    kept = used[::size]
    return [key for first, second, _ in kept for key in (first, second)], [value for _, _, value in kept]


def _same_in_blocks(items: list, size: int) -> bool:
    return all(item == items[i - i % size] for i, item in enumerate(items))


def single_keys(weight: Tensor, head_dim: int) -> Tensor:
    """The inverse for W_K and an even r: keep one of every two equal key heads.

    Raises:
        ValueError: if they differ, so that the naive file cannot hold the model.
    """
    return _halved(weight, head_dim, "the two maps of a key/value pair have different keys")


def single_values(weight: Tensor, value_dim: int) -> Tensor:
    """The inverse for W_V and an even r: keep one of every two equal value heads."""
    return _halved(weight, value_dim, "neighbouring key/value pairs have different values")


def _halved(weight: Tensor, width: int, difference: str) -> Tensor:
    heads = weight.unflatten(0, (-1, 2, width))
    if not torch.equal(heads[:, 0], heads[:, 1]):
        raise ValueError(
            f"the naive grouped-query file cannot hold this model: {difference}; convert it without "
            "--naive-grouped-query, for the authors' flash files"
        )
    return take_heads(weight, list(range(0, 2 * len(heads), 2)), width)
