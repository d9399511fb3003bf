"""The configuration of the DIFF Transformer and of its matched Transformer: one class, one field apart."""

import copy
import difflib
from typing import Any

from transformers import PreTrainedConfig

from diff_transformer.checks import require_positive
from diff_transformer.model.heads import check_heads

ATTENTIONS = ("diff", "softmax")
HEAD_NORMS = (True, False, "no_weight")
# Keys that transformers itself writes into, or passes with, a configuration without declaring them as fields.
_FOREIGN_KEYS = {
    "attn_implementation", "experts_implementation", "torch_dtype", "num_labels", "name_or_path", "auto_map",
    "model_type", "output_attentions", "quantization_config", "trust_remote_code", "rope_theta", "rope_scaling",
    "per_layer_config",
}  # fmt: skip


class DiffTransformerConfig(PreTrainedConfig):
    """Configuration of ``DiffTransformerModel`` (sections 2 and 3.1, appendices C and D).

    ``num_attention_heads`` and ``num_key_value_heads`` count the heads of the *matched Transformer* (3B: 24), so the
    two configurations of a pair differ in the field ``attention`` alone; ``num_diff_heads`` is the paper's h (12).

    Args:
        attention: ``"diff"`` or ``"softmax"`` (the matched Transformer: Llama's architecture).
        hidden_size: d_model.
        intermediate_size: inner width of SwiGLU; None means 8/3 ``hidden_size``, rounded to a multiple of 64.
        num_attention_heads: query heads of width ``head_dim``; even for ``"diff"``, where heads 2i and 2i+1 are the
            two maps of differential head i, which has values of width ``2 * head_dim``.
        num_key_value_heads: key/value heads for grouped-query attention; None means ``num_attention_heads``.
        head_dim: d; None means ``hidden_size // num_attention_heads``.
        rope_parameters: as in transformers, ``{"rope_type": "default", "rope_theta": 10000.0}`` if None.
        lambda_init: ``"depth"`` (0.8 - 0.6 exp(-0.3 i)) or a constant for every layer (ablation of Table 6).
        lambda_std: standard deviation of the lambda vectors at initialisation.
        head_norm: RMSNorm on each head's output: True (with a weight of width 2d), ``"no_weight"``, or False.
        softmax_head_norm: the same norm, with a weight of width d, on the heads of softmax attention (ablation of
            Table 6); for ``attention="softmax"`` only.
        head_norm_init: initial value of that weight. 1.0 is the paper's; a smaller one gives each head, at the start,
            an output of the size that softmax attention has.
        initializer_range: standard deviation of all matrices, unless one of the next two says otherwise.
        embedding_initializer_range: that of the token embedding.
        output_initializer_range: that of the projections that write to the residual stream (W_O and SwiGLU's W_3).
        backend: backend of ``diff_attention`` for every layer.

    Raises:
        ValueError: for sizes that are not positive or do not divide, unknown values, and unknown keys.
    """

    model_type = "diff_transformer"
    keys_to_ignore_at_inference = ("past_key_values",)

    attention: str = "diff"
    vocab_size: int = 32000
    hidden_size: int = 1024
    intermediate_size: int | None = None
    num_hidden_layers: int = 12
    num_attention_heads: int = 16
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 4096
    rope_parameters: dict | None = None
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    lambda_init: str | float = "depth"
    lambda_std: float = 0.1
    head_norm: bool | str = True
    softmax_head_norm: bool = False
    head_norm_init: float = 1.0
    initializer_range: float = 0.02
    embedding_initializer_range: float | None = None
    output_initializer_range: float | None = None
    backend: str = "auto"
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any):
        self._refuse_unknown(kwargs)
        self._require_positive("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            if self.hidden_size % self.num_attention_heads:
                raise ValueError(
                    f"hidden_size {self.hidden_size} is not divisible by num_attention_heads "
                    f"{self.num_attention_heads}; give sizes that divide, or head_dim"
                )
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.intermediate_size is None:
            self.intermediate_size = max(64, 64 * round(self.hidden_size * 8 / 3 / 64))
        self._require_positive("num_key_value_heads", "head_dim", "intermediate_size", "max_position_embeddings")
        _check_choices(self)
        check_heads(self.num_attention_heads, self.num_key_value_heads, paired=self.attention == "diff")
        super().__post_init__(**kwargs)

    @property
    def num_diff_heads(self) -> int:
        """The paper's h: differential heads, half of ``num_attention_heads``."""
        return self.num_attention_heads // 2

    def _require_positive(self, *names: str):
        require_positive(**{name: getattr(self, name) for name in names})

    def _refuse_unknown(self, kwargs: dict[str, Any]):
        from transformers import GenerationConfig

        known = _FOREIGN_KEYS | set(GenerationConfig().to_dict())
        fields = sorted(self.__class__.__dataclass_fields__)
        for key in kwargs:
            if key in known or key.startswith("_"):
                continue
            near = difflib.get_close_matches(key, fields, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "see the docstring of DiffTransformerConfig for the fields"
            raise ValueError(f"DiffTransformerConfig has no field {key!r}; {hint}")


def matched_baseline(config: DiffTransformerConfig) -> DiffTransformerConfig:
    """The matched Transformer of a configuration: the same in every field but ``attention="softmax"``.

    Parameters and FLOPs agree within 1 %: the DIFF Transformer has only ``6 head_dim`` parameters a layer more.
    """
    baseline = copy.deepcopy(config)
    baseline.attention = "softmax"
    return baseline


def _check_choices(config):
    if config.attention not in ATTENTIONS:
        raise ValueError(f"attention is {config.attention!r}; accepted: {', '.join(map(repr, ATTENTIONS))}")
    if config.head_norm not in HEAD_NORMS:
        raise ValueError(f"head_norm is {config.head_norm!r}; accepted: True, False, 'no_weight'")
    if config.softmax_head_norm and config.attention != "softmax":
        raise ValueError(
            f"softmax_head_norm is for attention='softmax', not {config.attention!r}; there, set head_norm"
        )
    if config.head_norm is not True and config.head_norm_init != 1.0:
        raise ValueError(
            f"head_norm_init={config.head_norm_init} sets the weight of the head norm, which head_norm="
            f"{config.head_norm!r} leaves out; set head_norm=True or head_norm_init=1.0"
        )
    if isinstance(config.lambda_init, str) and config.lambda_init != "depth":
        raise ValueError(f"lambda_init is {config.lambda_init!r}; accepted: 'depth' or a number")
    if config.head_dim % 2:
        raise ValueError(f"head_dim is {config.head_dim}; rotary embedding needs an even width")
