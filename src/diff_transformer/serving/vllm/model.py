"""The DIFF Transformer and its matched Transformer for vLLM: Llama's model with another attention layer."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from vllm.distributed import (
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_reduce,
)
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from vllm.model_executor.models.llama import LlamaDecoderLayer, LlamaForCausalLM, LlamaMLP, LlamaModel

from diff_transformer.serving.vllm import published
from diff_transformer.serving.vllm.attention import Attention
from diff_transformer.serving.vllm.checks import check_config, check_parallel
from diff_transformer.serving.vllm.cores import finish


class PolyNormMLP(nn.Module):
    """The gated MLP with ``hidden_act="poly_norm"`` (``PolyNorm`` in ``model/layers.py``)."""

    def __init__(self, config, quantization, prefix: str):
        super().__init__()
        width = config.intermediate_size
        self.width = width
        self.gate_up_proj = MergedColumnParallelLinear(
            config.hidden_size, [width] * 2, bias=False, quant_config=quantization, prefix=f"{prefix}.gate_up_proj"
        )
        self.down_proj = RowParallelLinear(
            width, config.hidden_size, bias=False, quant_config=quantization, prefix=f"{prefix}.down_proj"
        )
        self.act_fn = ShardedPolyNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        gate_up, _ = self.gate_up_proj(x)
        gate, up = gate_up.chunk(2, dim=-1)
        out, _ = self.down_proj(self.act_fn(gate) * up)
        return out


class ShardedPolyNorm(nn.Module):
    """``PolyNorm`` of a row that is divided among tensor-parallel ranks; ``width`` is that of the whole row."""

    def __init__(self, width: int, eps: float = 1e-6):
        super().__init__()
        self.width, self.eps = width, eps
        self.weight = nn.Parameter(torch.full((3,), 1 / 3), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(1), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        powers = torch.stack((wide**3, wide**2, wide), dim=-2)  # [T, 3, width of this rank]
        squares = powers.square().sum(-1, keepdim=True)
        if get_tensor_model_parallel_world_size() > 1:
            squares = tensor_model_parallel_all_reduce(squares)
        normed = powers * torch.rsqrt(squares / self.width + self.eps)
        return ((normed * self.weight.float()[:, None]).sum(-2) + self.bias.float()).to(x.dtype)


class DecoderLayer(LlamaDecoderLayer):
    """Llama's layer around one of our attention layers."""

    def __init__(self, vllm_config, prefix: str = ""):
        nn.Module.__init__(self)
        config, quantization = vllm_config.model_config.hf_config, vllm_config.quant_config
        self.hidden_size = config.hidden_size
        self.self_attn = Attention(vllm_config, f"{prefix}.self_attn")
        if config.hidden_act == "silu":
            self.mlp = LlamaMLP(
                config.hidden_size, config.intermediate_size, "silu", quantization, prefix=f"{prefix}.mlp"
            )
        else:
            self.mlp = PolyNormMLP(config, quantization, f"{prefix}.mlp")
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class DiffTransformerForCausalLM(LlamaForCausalLM):
    """A saved model of this package in vLLM: all variants but ``"dint"``; tensor and pipeline parallel, LoRA.

    Also what others published as DiffLlama or Motif (``published.py``).
    """

    def __init__(self, *, vllm_config, prefix: str = ""):
        config, name = vllm_config.model_config.hf_config, vllm_config.model_config.model
        check_config(config, name)
        check_parallel(config, get_tensor_model_parallel_world_size())
        super().__init__(vllm_config=vllm_config, prefix=prefix)

    def _init_model(self, vllm_config, prefix: str = "", layer_type=None) -> LlamaModel:
        return LlamaModel(vllm_config=vllm_config, prefix=prefix, layer_type=DecoderLayer)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load a checkpoint, and derive from its parameters what a forward pass needs."""
        if getattr(self.config, "published", None):
            weights = published.conversion(self.config.published).tensors(weights)
        loaded = super().load_weights(weights)
        finish(self)
        return loaded
