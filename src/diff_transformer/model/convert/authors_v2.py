"""The authors' layout, version 2: ``Diff-Transformer-V2/multihead_flashdiffv2.py`` of microsoft/unilm.

In this file, neighbours of the 2h query heads form a pair; keys and values have the baseline's heads; the sigmoid of
``lambda_proj`` is lambda for each token and head; there is no head norm; the rotary embedding rotates neighbouring
channels.
"""

from functools import partial
from pathlib import Path

import torch

from diff_transformer.model.config import DiffTransformerConfig
from diff_transformer.model.convert.authors import shared_fields, shared_params
from diff_transformer.model.convert.authors_config import (
    AuthorsConfig,
    read_params,
    shapes_of_params,
    write_params,
)
from diff_transformer.model.convert.checkpoint import Checkpoint
from diff_transformer.model.convert.ours import our_names, refuse
from diff_transformer.model.convert.plan import (
    Change,
    Conversion,
    Shapes,
    halves_from_interleaved,
    interleaved_from_halves,
    plan_of,
)


def read_config(checkpoint: Checkpoint) -> AuthorsConfig:
    return read_params(checkpoint, version=2)


def write_config(config: AuthorsConfig, folder: Path, dtype: torch.dtype) -> None:
    write_params(config, folder)


def tensors(config: AuthorsConfig) -> Shapes:
    return shapes_of_params(config)


def to_ours(config: AuthorsConfig) -> Conversion:
    """To ``attention="diff_v2"``; rows of W_Q and W_K move, nothing else changes."""
    ours = DiffTransformerConfig(
        attention="diff_v2",
        num_attention_heads=config.n_heads,
        num_key_value_heads=config.n_kv_heads,
        **shared_fields(config),
    )
    turned = Change(partial(halves_from_interleaved, head_dim=config.head_dim))
    plan = plan_of(config.names(), our_names(ours), config.n_layers, {"q": turned, "k": turned})
    return Conversion(ours, plan, config.notes())


def from_ours(config: DiffTransformerConfig) -> Conversion:
    """The inverse.

    Raises:
        ValueError: for another attention, other widths of values, another activation, a window, scaled positions.
    """
    refuse(
        config, "the authors' second layout",
        attention=("diff_v2",), value_head_dim=(None, config.heads.head_dim), hidden_act=("silu",),
        sliding_window=(None,),
    )  # fmt: skip
    authors = AuthorsConfig(
        n_heads=config.heads.outputs,
        n_kv_heads=config.heads.keys,
        version=2,
        has_head_norm_weight=False,
        **shared_params(config),
    )
    turned = Change(partial(interleaved_from_halves, head_dim=authors.head_dim))
    plan = plan_of(our_names(config), authors.names(), authors.n_layers, {"q": turned, "k": turned})
    return Conversion(authors, plan)
