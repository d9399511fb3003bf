"""Differential attention through one call of vLLM's own attention, over a cache as large as the matched Transformer's.

The two key heads of a value head lie side by side, as one head ``[k1 | k2]`` of width 2d. A query of the first map is
``[q1 | 0]``, one of the second ``[0 | q2]``: their products with that key are the logits of the two maps. The call
returns ``A1 V`` and ``A2 V``, which the layer's core subtracts.

Legend: T tokens of all requests, d head width, dv width of a value head, r signal heads for each noise head (1 for
``"diff"``). All head counts are those of one tensor-parallel rank.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.model_executor.layers.attention import Attention as PagedAttention
from vllm.model_executor.layers.linear import QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.selector import get_attn_backend

from diff_transformer.errors import UserError
from diff_transformer.serving.vllm.checks import WIDTHS, head_widths
from diff_transformer.serving.vllm.cores import core_of


class Attention(nn.Module):
    """Projections, rotary embedding, vLLM's attention over its paged cache, core, output."""

    def __init__(self, vllm_config, prefix: str):
        super().__init__()
        config, cache = vllm_config.model_config.hf_config, vllm_config.cache_config
        heads, quantization = config.heads, vllm_config.quant_config
        self.head_dim, self.value_dim = heads.head_dim, heads.value_dim
        unit = rank_unit(config)
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size, unit.width, unit.queries, unit.keys, bias=False, quant_config=quantization,
            prefix=f"{prefix}.qkv_proj", v_head_size=unit.value_width,
        )  # fmt: skip
        self.o_proj = RowParallelLinear(
            heads.outputs * heads.value_dim, config.hidden_size, bias=False, quant_config=quantization,
            prefix=f"{prefix}.o_proj",
        )  # fmt: skip
        queries, keys = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        self.sizes = [queries * unit.width, keys * unit.width, keys * unit.value_width]
        value_heads = self.sizes[2] // heads.value_dim
        self.key_dim, _ = widths = head_widths(config)
        self.rotary_emb = get_rope(
            heads.head_dim, max_position=config.max_position_embeddings, rope_parameters=config.rope_parameters
        )
        self.width = cache_width(max(widths), cache.cache_dtype, has_window=config.sliding_window is not None)
        self.attn = PagedAttention(
            self.sizes[0] // heads.head_dim, self.width, heads.head_dim**-0.5, num_kv_heads=value_heads,
            cache_config=cache, quant_config=quantization, per_layer_sliding_window=config.sliding_window,
            prefix=f"{prefix}.attn",
        )  # fmt: skip
        self.core = core_of(config, extract_layer_index(prefix), quantization, f"{prefix}.core")

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        """``hidden_states [T, hidden_size]`` at ``positions [T]`` -> ``[T, hidden_size]``."""
        qkv, _ = self.qkv_proj(hidden_states)
        q, k, v = qkv.split(self.sizes, dim=-1)
        # Zeros turn into zeros. Placed before the rotation, queries are written once where the model is compiled.
        q, k = self.rotary_emb(positions, self.core.queries(q), k)
        q, k, v = self._padded(q, self.key_dim), self._padded(k, self.key_dim), self._padded(v, self.value_dim)
        out = self.attn(q, k, v)
        heads = out.unflatten(-1, (-1, self.width))[..., : self.value_dim]
        out, _ = self.o_proj(self.core(heads, hidden_states).to(hidden_states.dtype).flatten(1))
        return out

    def _padded(self, x: Tensor, width: int) -> Tensor:
        """``x [T, heads * width]`` with zeros after each head, up to the width that the cache has."""
        if width == self.width:
            return x
        return F.pad(x.unflatten(-1, (-1, width)), (0, self.width - width)).flatten(1)


class RankUnit(NamedTuple):
    """The unit that ``QKVParallelLinear`` calls a head, and gives to one rank whole.

    width: of such a head of queries, and of keys. queries, keys: how many there are. value_width: of values, which are
    as many as keys.
    """

    width: int
    queries: int
    keys: int
    value_width: int


def rank_unit(config) -> RankUnit:
    """The division of W_Q, W_K and W_V among tensor-parallel ranks; ``check_parallel`` says among how many."""
    heads = config.heads
    if config.attention == "diff":  # a pair of query heads, a pair of key heads, their value head
        return RankUnit(2 * heads.head_dim, heads.outputs, heads.values, heads.value_dim)
    if config.attention == "grouped_diff":  # a query head, a key head, half a value head
        return RankUnit(heads.head_dim, heads.queries, heads.keys, heads.value_dim // 2)
    return RankUnit(heads.head_dim, heads.queries, heads.keys, heads.value_dim)


def cache_width(width: int, cache_dtype: str, *, has_window: bool) -> int:
    """The narrowest head that vLLM's attention takes here and that has room for ``width`` numbers.

    Args:
        cache_dtype: vLLM's name of the cache's dtype; the model's is PyTorch's default while vLLM makes it.

    Raises:
        UserError: if there is none.
    """
    for candidate in (width, *(wider for wider in WIDTHS if wider > width)):
        try:
            backend = get_attn_backend(candidate, torch.get_default_dtype(), cache_dtype, has_sliding_window=has_window)
        except (ValueError, NotImplementedError):
            continue
        if backend.supports_head_size(candidate):
            return candidate
    raise UserError(
        f"this model needs heads of width {width} in vLLM's cache (two keys side by side, or a value), which vLLM's "
        "attention does not take here; serve it with `diff-transformer serve --engine transformers`"
    )
