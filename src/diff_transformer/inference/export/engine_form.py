"""The models in the form that inference engines run without a plugin; copied whole into an exported folder.

An engine reads from ``config.json`` how many heads its attention call has, and how wide they are. For differential
attention the two key heads of a value head are one head ``[k1 | k2]`` of width 2d, and query heads are ``[q1 | 0]`` or
``[0 | q2]``: one call of ``ALL_ATTENTION_FUNCTIONS`` returns ``A1 V`` and ``A2 V``, which are subtracted afterwards. So
``num_attention_heads``, ``num_key_value_heads`` and ``head_dim`` are those of the call here.

Legend: B batch, T tokens, d width of a query before it is placed, dv width of a value head.
"""

import copy
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache, DynamicCache, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    eager_attention_forward,
)


class DiffEngineConfig(PreTrainedConfig):
    """Fields of ``DiffTransformerConfig``; the head counts and ``head_dim`` are those of the attention call.

    query_dim: d. outputs: heads that reach W_O. group: query heads with one noise head, the last (0: no second map).
    """

    model_type = "diff_transformer_engine"

    attention: str = "diff"
    vocab_size: int = 32000
    hidden_size: int = 1024
    intermediate_size: int = 2752
    num_hidden_layers: int = 12
    num_attention_heads: int = 16
    num_key_value_heads: int = 8
    head_dim: int = 128
    query_dim: int = 64
    outputs: int = 8
    group: int = 2
    max_position_embeddings: int = 4096
    rope_parameters: dict | None = None
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    lambda_init: str | float = "depth"
    lambda_depth_offset: int = 0
    lambda_learned: bool = True
    head_norm: bool | str = True
    head_norm_eps: float = 1e-5
    hidden_act: str = "silu"
    mlp_bias: bool = False
    initializer_range: float = 0.02
    sliding_window: int | None = None
    layer_types: list[str] | None = None
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None


class Attention(nn.Module):
    """Projections, rotary embedding, the one attention call, subtraction and head norm, output."""

    def __init__(self, config: DiffEngineConfig, layer_idx: int):
        super().__init__()
        self.config, self.layer_idx, self.is_causal = config, layer_idx, True
        self.head_dim, self.query_dim, self.group = config.head_dim, config.query_dim, config.group
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = config.query_dim**-0.5
        keys = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, config.num_attention_heads * config.query_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(config.outputs * config.head_dim, config.hidden_size, bias=False)
        self.core = Core(config, layer_idx)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        **kwargs,
    ) -> tuple[Tensor, Tensor | None]:
        """``hidden_states [B, T, hidden_size]`` -> the same shape, and what the call returns as weights."""
        B, T = hidden_states.shape[:2]
        q = rotate(self.q_proj(hidden_states).view(B, T, -1, self.query_dim), *position_embeddings)
        k = rotate(self.k_proj(hidden_states).view(B, T, -1, self.query_dim), *position_embeddings)
        if self.query_dim < self.head_dim:
            q = self.core.placed(q)
        q = q.transpose(1, 2)  # [B, query heads, T, head_dim]
        k = k.reshape(B, T, -1, self.head_dim).transpose(1, 2)
        v = self.v_proj(hidden_states).view(B, T, -1, self.head_dim).transpose(1, 2)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        attention_interface = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        out, weights = attention_interface(
            self,
            q,
            k,
            v,
            attention_mask,
            dropout=0.0,
            scaling=self.scaling,
            sliding_window=self.config.sliding_window,
            **kwargs,
        )
        out = self.core(out.reshape(B, T, -1, self.head_dim), hidden_states)
        return self.o_proj(out.to(hidden_states.dtype).flatten(2)), weights


class Core(nn.Module):
    """What follows the call: ``[B, T, query heads, dv]`` -> ``[B, T, output heads, dv]``, in fp32."""

    def __init__(self, config: DiffEngineConfig, layer_idx: int):
        super().__init__()
        self.group, self.attention = config.group, config.attention
        depth = config.lambda_init == "depth"
        decay = math.exp(-0.3 * (layer_idx + config.lambda_depth_offset))
        self.initial = 0.8 - 0.6 * decay if depth else float(config.lambda_init)
        self.eps, self.has_norm = config.head_norm_eps, bool(config.head_norm)
        self.lam = self.head_norm = None
        if config.attention == "diff_v2":
            self.lam = TokenLambda(config.hidden_size, config.outputs)
        elif config.attention != "softmax":
            self.lam = LearnedLambda(config.query_dim, self.initial) if config.lambda_learned else None
            self.head_norm = HeadWeight(config.head_dim) if config.head_norm is True else None

    def placed(self, q: Tensor) -> Tensor:
        """``q [B, T, query heads, d]`` -> ``[q1 | 0]`` and ``[0 | q2]``, ``[B, T, query heads, 2d]``."""
        groups = q.unflatten(2, (-1, self.group))
        zeros = torch.zeros_like(groups)
        first = torch.cat((groups, zeros), dim=-1)[:, :, :, :-1]
        second = torch.cat((zeros, groups), dim=-1)[:, :, :, -1:]
        return torch.cat((first, second), dim=3).flatten(2, 3)

    def forward(self, out: Tensor, hidden_states: Tensor) -> Tensor:
        if self.attention == "softmax":
            return out
        groups = out.unflatten(2, (-1, self.group)).float()
        first, second = groups[:, :, :, :-1], groups[:, :, :, -1:]
        lam = self.initial if self.lam is None else self.lam(hidden_states)
        difference = (first - lam * second).flatten(2, 3)
        if self.attention == "diff_v2":
            return difference
        if self.has_norm:
            weight = None if self.head_norm is None else self.head_norm.weight.float()
            difference = F.rms_norm(difference, difference.shape[-1:], weight, self.eps)
        return difference * (1.0 - self.initial)


class LearnedLambda(nn.Module):
    """One lambda for all heads of a layer, in fp32."""

    def __init__(self, width: int, initial: float):
        super().__init__()
        self.initial = initial
        self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2 = (
            nn.Parameter(torch.zeros(width)) for _ in range(4)
        )

    def forward(self, hidden_states: Tensor) -> Tensor:
        first = (self.lambda_q1.float() * self.lambda_k1.float()).sum().exp()
        second = (self.lambda_q2.float() * self.lambda_k2.float()).sum().exp()
        return first - second + self.initial


class TokenLambda(nn.Module):
    """lambda of each token and head, fp32 ``[B, T, heads, 1, 1]``."""

    def __init__(self, hidden_size: int, heads: int):
        super().__init__()
        self.proj = nn.Linear(hidden_size, heads, bias=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.proj(hidden_states).float().sigmoid()[..., None, None]


class HeadWeight(nn.Module):
    """The weight of the head norm. Engines replace modules that compute an RMSNorm; this one computes nothing."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of ``x [B, T, heads, d]`` by tables ``[B, T, d]``."""
    left, right = x.chunk(2, dim=-1)
    return x * cos[:, :, None] + torch.cat((-right, left), dim=-1) * sin[:, :, None]


class DecoderLayer(nn.Module):
    def __init__(self, config: DiffEngineConfig, layer_idx: int):
        super().__init__()
        self.self_attn = Attention(config, layer_idx)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_states: Tensor, **kwargs) -> Tensor:
        attended, _ = self.self_attn(self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class DiffEnginePreTrainedModel(PreTrainedModel):
    config_class = DiffEngineConfig
    base_model_prefix = "model"
    _no_split_modules = ["DecoderLayer"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_attention_backend = True
    _keep_in_fp32_modules_strict = ["lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"]  # noqa: RUF012


class DiffEngineModel(DiffEnginePreTrainedModel):
    """Embedding, decoder layers, final norm."""

    def __init__(self, config: DiffEngineConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        rotary = copy.copy(config)
        rotary.head_dim = config.query_dim
        self.rotary_emb = LlamaRotaryEmbedding(rotary)  # ty: ignore[invalid-argument-type]  (reads the shared fields)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPast:
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        cache = kwargs.pop("cache", past_key_values)  # its name from transformers 5.24
        if (self.config.use_cache if use_cache is None else use_cache) and cache is None:
            cache = DynamicCache(config=self.config)
        if position_ids is None:
            seen = cache.get_seq_length() if cache is not None else 0
            position_ids = (torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device) + seen)[None]
        create = create_causal_mask if self.config.sliding_window is None else create_sliding_window_causal_mask
        mask = create(self.config, inputs_embeds, attention_mask, cache, position_ids)
        tables = self.rotary_emb(inputs_embeds, position_ids=position_ids)
        hidden_states = inputs_embeds
        kwargs.pop("return_dict", None)
        for layer in self.layers:
            hidden_states = layer(
                hidden_states,
                position_embeddings=tables,
                attention_mask=mask,
                cache=cache,
                **kwargs,
            )
        return BaseModelOutputWithPast(self.norm(hidden_states), cache)


class DiffEngineForCausalLM(DiffEnginePreTrainedModel, GenerationMixin):
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: DiffEngineConfig):
        super().__init__(config)
        self.model = DiffEngineModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, *args, logits_to_keep: int | Tensor = 0, **kwargs) -> CausalLMOutputWithPast:
        outputs = self.model(*args, **kwargs)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        return CausalLMOutputWithPast(None, logits, *outputs.to_tuple()[1:])
