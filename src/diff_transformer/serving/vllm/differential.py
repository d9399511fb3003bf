"""Models that ``differentiate`` changed in place, in vLLM's Transformers backend: transformers' code, vLLM's cache.

vLLM is told of 2n query heads (``config_check.py``). Its attention computes them in one call a layer, over the source's
cache, and the two maps of each pair of heads are subtracted here.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from vllm.model_executor.models.transformers import (
    TransformersForCausalLM,
    TransformersMoEForCausalLM,
    vllm_attention_forward,
)
from vllm.model_executor.models.transformers.fusers.attention import VLLM_ATTN_IMPL

from diff_transformer.model.differentiate import GATE, LAMBDA

IMPLEMENTATION = "diff_vllm"


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """transformers' attention function: q ``[1, 2n, T, d]``, k and v ``[1, m, T, d]`` -> ``[1, T, n, d]``."""
    out, _ = vllm_attention_forward(module, query, key, value, attention_mask, **kwargs)
    first, second = out.unflatten(-1, (-1, 2, query.shape[-1])).float().unbind(2)
    lam = kwargs[LAMBDA][0].transpose(0, 1)  # [T, n, 1]
    if (gate := kwargs.get(GATE)) is not None:
        first = first * gate[0].transpose(0, 1)
    return torch.addcmul(first, second, lam, value=-1).to(query.dtype)[None], None


AttentionInterface.register(IMPLEMENTATION, attend)


class DifferentialForCausalLM(TransformersForCausalLM):
    """A decoder of transformers that ``differentiate`` changed to ``"diff_v2"`` or ``"diff_v3"``."""

    def __init__(self, *, vllm_config: Any, prefix: str = ""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        if scaling := getattr(self.text_config, "logits_scaling", None):  # Granite's, of which vLLM's class knows none
            self.logits_processor.scale /= scaling

    def _patch_config(self) -> None:
        super()._patch_config()
        self.text_config._attn_implementation = IMPLEMENTATION  # which `restore` leaves as it is

    def recursive_replace(self) -> None:
        """Replace modules by vLLM's; it looks for attention under its own name."""
        self.model.tp_plan[f"layers.*.self_attn.{LAMBDA}.proj"] = "colwise"  # on the rank of the queries
        self.text_config._attn_implementation = VLLM_ATTN_IMPL
        super().recursive_replace()
        self.text_config._attn_implementation = IMPLEMENTATION


class DifferentialMoEForCausalLM(DifferentialForCausalLM, TransformersMoEForCausalLM):
    """One with experts."""
