"""The mask of a forward pass, made only where the operator's own causal limit and window do not say it all."""

from typing import cast

import torch
from torch import Tensor
from transformers.masking_utils import (
    AttentionMaskInterface,
    create_causal_mask,
    create_sliding_window_causal_mask,
    sdpa_mask,
)

from diff_transformer.model.documents import restarts
from diff_transformer.model.implementations import OWN_NAMES, mask_config

for _name in OWN_NAMES:
    AttentionMaskInterface.register(_name, sdpa_mask)


def causal_mask(
    config, inputs_embeds: Tensor, attention_mask: Tensor | None, cache, position_ids: Tensor | None
) -> Tensor | None:
    """What each query may attend to, bool or additive ``[B, 1, T, S]``; None for every key up to its own (and within
    the window), the last query at the last key.

    Args:
        attention_mask: ``[B, past + T]``, 0 where a token is padding; or a ready mask of four dimensions, kept as is.
        cache: a transformers ``Cache`` with what came before, or None. A static one has keys that are not in use yet,
            and always needs a mask.
        position_ids: ``[B, T]``, where the caller gave them: without mask and cache they may tell of packed documents.
    """
    static = getattr(cache, "is_compileable", False)
    packed = position_ids is not None and cache is None and attention_mask is None and _may_restart(position_ids)
    if not static and not packed and _keeps_all(attention_mask):
        return None
    create = create_causal_mask if config.sliding_window is None else create_sliding_window_causal_mask
    mask = create(
        config=mask_config(config),
        inputs_embeds=inputs_embeds,
        attention_mask=attention_mask,
        past_key_values=cache,
        position_ids=position_ids if packed else None,
        allow_is_causal_skip=False,
    )
    return cast("Tensor | None", mask)  # a BlockMask is for another ``attn_implementation`` than ``mask_config`` names


def _may_restart(position_ids: Tensor) -> bool:
    """Whether positions do not count on by one somewhere; those that cannot be read while a graph is traced may."""
    return torch.compiler.is_compiling() or restarts(position_ids)


def _keeps_all(attention_mask: Tensor | None) -> bool:
    """Whether nothing is padding; a mask that cannot be read while a graph is traced counts as padding."""
    if attention_mask is None:
        return True
    return attention_mask.dim() == 2 and not torch.compiler.is_compiling() and bool(attention_mask.all())
