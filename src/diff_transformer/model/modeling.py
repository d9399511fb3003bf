"""The decoder-only DIFF Transformer and its matched Transformer (``attention="softmax"``), as Hugging Face models."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    Cache,
    DynamicCache,
    GenerationMixin,
    PreTrainedModel,
)
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.utils import can_return_tuple
from transformers.utils.output_capturing import capture_outputs

from diff_transformer.checks import require_known
from diff_transformer.errors import UserError
from diff_transformer.model.attention import Attention
from diff_transformer.model.caches import CACHE
from diff_transformer.model.card import write_card
from diff_transformer.model.config import DiffTransformerConfig
from diff_transformer.model.cores import AttentionCore
from diff_transformer.model.heads import CORES
from diff_transformer.model.implementations import DEFAULT, IMPLEMENTATIONS, attention_backend
from diff_transformer.model.inputs import Packing, Visible, documents_at, restarts, visible_of
from diff_transformer.model.lambdas import LAMBDAS, LearnedLambda, TokenLambda, present_lambda
from diff_transformer.model.layers import PolyNorm, RMSNorm, SwiGLU, keeping_precision
from diff_transformer.ops.arguments import traced


class RotaryEmbedding(LlamaRotaryEmbedding):
    """Llama's, with frequencies that stay fp32 when the model is cast: in bf16, positions beyond 256 would collapse."""

    def _apply(self, fn, recurse=True):
        return super()._apply(keeping_precision(fn), recurse)


class DecoderLayer(GradientCheckpointingLayer):
    """``Y = X + MultiHead(RMSNorm(X))``, ``X' = Y + SwiGLU(RMSNorm(Y))`` (section 2.2)."""

    def __init__(self, config: DiffTransformerConfig, layer_idx: int):
        super().__init__()
        self.self_attn = Attention.from_config(config, layer_idx)
        assert config.intermediate_size is not None  # set by the configuration itself
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size, config.hidden_act)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden_states: Tensor, **kwargs) -> Tensor:
        attended, _ = self.self_attn(self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class DiffTransformerPreTrainedModel(PreTrainedModel):
    config: DiffTransformerConfig
    config_class = DiffTransformerConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DecoderLayer"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values", "cache"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_flex_attn = False
    _supports_flash_attn = False
    _can_compile_fullgraph = True
    _can_record_outputs = {"hidden_states": DecoderLayer, "attentions": Attention}  # noqa: RUF012

    def __init__(self, config: DiffTransformerConfig, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        if config.variant.lam == "learned":
            self._keep_in_fp32_modules_strict = ["lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"]
            self._no_split_modules = ["DecoderLayer", "LearnedLambda"]  # units of FSDP: one dtype each

    def _check_and_adjust_attn_implementation(self, attn_implementation, is_init_check=False, allow_all_kernels=False):
        chosen = DEFAULT if attn_implementation is None else attn_implementation
        require_known("attn_implementation", chosen, IMPLEMENTATIONS)
        return chosen

    def set_attn_implementation(self, attn_implementation: str | dict, allow_all_kernels: bool = False):
        """Choose how attention is computed from now on: one of ``IMPLEMENTATIONS``, for both models of a pair."""
        super().set_attn_implementation(attn_implementation, allow_all_kernels)
        for core in self.modules():
            if isinstance(core, AttentionCore):
                core.backend = attention_backend(self.config)

    def save_pretrained(self, save_directory: str | os.PathLike, is_main_process: bool = True, *args, **kwargs):
        """As in transformers, and write a model card, ``README.md``, if there is none."""
        super().save_pretrained(save_directory, is_main_process, *args, **kwargs)
        if is_main_process and Path(save_directory).is_dir():
            write_card(self, Path(save_directory))

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel"):
        """Do nothing: a folder brings no code but an import."""

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        config = self.config
        std = config.initializer_range
        embedding_std = std if config.embedding_initializer_range is None else config.embedding_initializer_range
        if isinstance(module, nn.Linear):
            init.normal_(module.weight, std=std)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight, std=embedding_std)
        elif isinstance(module, PolyNorm):
            init.constant_(module.weight, 1 / 3)
            init.zeros_(module.bias)
        elif isinstance(module, RMSNorm) and module.weight is not None:
            init.constant_(module.weight, module.initial)
        elif isinstance(module, LearnedLambda):
            for vector in module.parameters():
                init.normal_(vector, std=module.std)
        elif isinstance(module, TokenLambda) and module.mean is not None:
            init.constant_(module.mean, 0.5)
        elif isinstance(module, RotaryEmbedding):
            super()._init_weights(module)


class DiffTransformerModel(DiffTransformerPreTrainedModel):
    """Embedding, ``num_hidden_layers`` decoder layers, final norm.

    Packed documents come as transformers' ``DataCollatorWithFlattening`` gives them: ``cu_seq_lens_q`` int32
    [documents + 1] over the rows of the batch one after another, and ``max_length_q``; or as ``position_ids`` that
    restart in each document, without mask and cache; their results then come without a cache, unless ``use_cache=True``
    asks for one, which takes a complete mask.

    ``output_attentions=True`` returns for each layer the difference map ``[B, h, T, S]`` (softmax: ``[B, n, T, S]``).
    """

    def __init__(self, config: DiffTransformerConfig):
        config.check()
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = RotaryEmbedding(config)  # ty: ignore[invalid-argument-type]  (the fields it reads are here too)
        self.gradient_checkpointing = False
        self.post_init()

    def lambdas(self) -> Tensor:
        """The current lambda of each layer, fp32 ``[L]``, without gradient; empty for softmax attention.

        For variants whose lambda depends on the token: the mean over tokens and heads in the last forward pass in
        training mode. ``model.layers[i].self_attn.lambdas(x)`` has those of one layer.
        """
        modules = [module for module in self.modules() if isinstance(module, LAMBDAS)]
        return torch.tensor([present_lambda(module) for module in modules if getattr(module, "mean", 0) is not None])

    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        *,
        cache: Cache | None = None,
        output_attentions: bool | None = None,
        cu_seq_lens_q: Tensor | None = None,
        max_length_q: int | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPast:
        """The last layer's normalised output ``[B, T, hidden_size]``, in the weights' dtype.

        Args:
            input_ids: int64 ``[B, T]``; or ``inputs_embeds`` ``[B, T, hidden_size]`` instead.
            attention_mask: 1 for tokens, 0 for padding, ``[B, S]`` with S the cached and the new tokens; or a boolean
                or additive mask ``[B or 1, heads or 1, T, S]``.
            position_ids: int64 ``[B, T]``; by default they continue from the cache's length. Without mask and cache, a
                new document begins wherever they do not increase by one.
            cache, past_key_values: a cache of transformers, to which these tokens are added, by its new or its old
                name.
            output_attentions: return the attention maps of each layer.
            cu_seq_lens_q: bounds of packed documents, int32 ``[documents + 1]``; ``max_length_q`` is the longest.
            kwargs: arguments that transformers passes to any model, which are ignored.

        Raises:
            UserError: for both or neither of the inputs, or arguments that exclude one another.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise UserError("give exactly one of input_ids and inputs_embeds")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        config, (batch, queries, _) = self.config, inputs_embeds.shape
        cache = past_key_values if cache is None else cache
        means = CORES[config.attention].means
        with_maps = config.output_attentions if output_attentions is None else output_attentions
        documents = None
        if cu_seq_lens_q is not None:
            documents = Packing(cu_seq_lens_q, int(max_length_q or cu_seq_lens_q.diff().max()))
        elif position_ids is not None and attention_mask is None and cache is None:
            by_mask = use_cache or with_maps or traced()  # ``visible_of`` then makes a complete mask
            if (means or not by_mask) and restarts(position_ids):
                documents = documents_at(position_ids, batch)
        if documents is None:
            visible = visible_of(config, inputs_embeds, attention_mask, cache, position_ids)
        elif attention_mask is not None or use_cache:
            raise UserError(
                "packed documents (cu_seq_lens_q, or for attention='dint' positions that begin anew) exclude "
                "attention_mask and use_cache; leave them out"
            )
        else:
            visible = Visible(None, True, config.sliding_window, documents)
            position_ids = documents.positions((batch, queries)) if position_ids is None else position_ids
        if use_cache is None:
            use_cache = config.use_cache and not self.training and documents is None and not means
        if use_cache and cache is None:
            cache = DynamicCache(config=config)
        if position_ids is None:
            start = 0 if cache is None else cache.get_seq_length()
            position_ids = (torch.arange(queries, device=inputs_embeds.device) + start)[None]
        position_embeddings = self.rotary_emb(inputs_embeds, position_ids=position_ids)
        hidden_states, options = inputs_embeds, {CACHE: cache, "output_attentions": with_maps}
        for layer in self.layers[: config.num_hidden_layers]:  # ``generate(assistant_early_exit=n)`` lowers it
            hidden_states = layer(hidden_states, visible=visible, position_embeddings=position_embeddings, **options)
        return BaseModelOutputWithPast(self.norm(hidden_states), cache)


class DiffTransformerForCausalLM(DiffTransformerPreTrainedModel, GenerationMixin):
    """The model with its language-modelling head; ``labels`` are shifted inside, -100 is ignored."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: DiffTransformerConfig):
        super().__init__(config)
        self.model = DiffTransformerModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def lambdas(self) -> Tensor:
        """See ``DiffTransformerModel.lambdas``."""
        return self.model.lambdas()

    def _get_static_cache_init_shape(self):
        """None: a chunked prefill's first call allocates a static cache, whose keys and values have other shapes."""
        return None

    def generate(self, *args, **kwargs):
        """As in transformers; ``attention="dint"``, which has no cache, computes the whole text for each token."""
        if CORES[self.config.attention].means:
            kwargs |= {"use_cache": False, "prefill_chunk_size": None, "cache_implementation": None}
        return super().generate(*args, **kwargs)  # ty: ignore[invalid-argument-type]

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        *,
        cache: Any = None,
        **kwargs,
    ) -> CausalLMOutputWithPast:
        """Logits ``[B, T, vocab_size]`` and, with ``labels``, the mean loss in nats.

        Args:
            labels: int64 ``[B, T]``, the input itself: each token is predicted from those before it; -100 is ignored.
            logits_to_keep: number of last tokens, or indices of the tokens, whose logits are computed; 0 for all.

        The other arguments are those of ``DiffTransformerModel.forward``.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            cache=cache,
            **kwargs,
        )
        positions = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, positions])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss, logits, outputs.get(CACHE), outputs.hidden_states, outputs.attentions)


AutoConfig.register(DiffTransformerConfig.model_type, DiffTransformerConfig, exist_ok=True)
AutoModel.register(DiffTransformerConfig, DiffTransformerModel, exist_ok=True)
AutoModelForCausalLM.register(DiffTransformerConfig, DiffTransformerForCausalLM, exist_ok=True)
