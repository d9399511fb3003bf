"""The configuration of the DIFF Transformer and of its matched Transformer: one class, one field apart."""

import difflib
from typing import Any

from transformers import PreTrainedConfig

from diff_transformer.checks import require_positive
from diff_transformer.model.heads import ATTENTIONS as ATTENTIONS
from diff_transformer.model.heads import (
    HeadCounts,
    check_head_norm,
    check_rotary_width,
    check_variant,
    count_heads,
    default_key_value_heads,
)
from diff_transformer.model.implementations import check_backend
from diff_transformer.model.lambdas import check_lambda_init

ACTIVATIONS = ("silu", "poly_norm")
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
        attention: ``"diff"``; ``"softmax"`` (the matched Transformer: Llama's architecture); or a relative:
            ``"diff_v2"`` (the second version: lambda of each token and head, both maps share keys and values, no head
            norm), ``"grouped_diff"`` (arXiv 2510.06949: several signal heads share a noise head), ``"dint"`` (arXiv
            2501.17486: the mean of the first map is added, so that rows sum to 1). ``count_heads`` in
            ``model/heads.py`` says how many heads each has.
        hidden_size: d_model.
        intermediate_size: inner width of SwiGLU; None means 8/3 ``hidden_size``, rounded to a multiple of 64.
        num_attention_heads: query heads of width ``head_dim``; even for ``"diff"`` and ``"dint"``, where heads 2i and
            2i+1 are the two maps of differential head i, which has values of width ``2 * head_dim``. For
            ``"diff_v2"``: pairs of query heads. For ``"grouped_diff"``: signal and noise heads together.
        num_key_value_heads: key/value heads for grouped-query attention; None means ``num_attention_heads`` (for
            ``"grouped_diff"`` two for each noise head: one for each of its maps).
        head_dim: d; None means ``hidden_size // num_attention_heads``.
        value_head_dim: width of a value head, and so of a head's output; None means ``2 * head_dim`` for ``"diff"``,
            ``"dint"`` and ``"grouped_diff"``, ``head_dim`` for ``"diff_v2"`` and ``"softmax"``.
        signal_heads_per_noise_head: r of ``"grouped_diff"``; the authors advise 3 or 4. 1 is ``"diff"``.
        rope_parameters: as in transformers, ``{"rope_type": "default", "rope_theta": 10000.0}`` if None.
        lambda_init: ``"depth"`` (0.8 - 0.6 exp(-0.3 i)) or a constant for every layer (ablation of Table 6), below 1,
            since every head is multiplied by ``1 - lambda_init``.
        lambda_learned: False fixes lambda at ``lambda_init``; ``"diff_v2"`` has no fixed one.
        lambda_depth_offset: added to the layer's index in that formula; -1 for checkpoints that count one layer less.
        lambda_std: standard deviation of the lambda vectors at initialisation.
        head_norm: RMSNorm on each head's output: True (with a weight as wide as the head), ``"no_weight"``, or False.
            ``"diff_v2"`` has none, and no ``lambda_init``.
        softmax_head_norm: the same norm, with a weight of width d, on the heads of softmax attention (ablation of
            Table 6); for ``attention="softmax"`` only.
        head_norm_eps: epsilon of that norm; None means ``rms_norm_eps``.
        head_norm_init: initial value of that weight, or one for each layer. 1.0 is the paper's; a smaller one gives
            each head, at the start, an output of the size that softmax attention has (``matched_head_norm_init``
            measures which).
        hidden_act: activation of the gated MLP: ``"silu"`` (SwiGLU), or ``"poly_norm"`` (arXiv 2411.03884), which some
            published models have.
        initializer_range: standard deviation of all matrices, unless one of the next two says otherwise.
        embedding_initializer_range: that of the token embedding.
        output_initializer_range: that of the projections that write to the residual stream (W_O and SwiGLU's W_3).
        backend: backend of ``diff_attention`` for every layer.
        sliding_window: every query sees its last ``sliding_window`` keys (its own position included), in training and
            in the cache, whose memory it bounds; None for all keys.

    Raises:
        TypeError: for a size that is no number.
        ValueError: for sizes that are not positive or do not divide, unknown values, and unknown keys.
    """

    model_type = "diff_transformer"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012  (Trainer adds a list to it)

    attention: str = "diff"
    vocab_size: int = 32000
    hidden_size: int = 1024
    intermediate_size: int | None = None
    num_hidden_layers: int = 12
    num_attention_heads: int = 16
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    value_head_dim: int | None = None
    signal_heads_per_noise_head: int = 3
    max_position_embeddings: int = 4096
    rope_parameters: dict | None = None
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    lambda_init: str | float = "depth"
    lambda_depth_offset: int = 0
    lambda_learned: bool = True
    lambda_std: float = 0.1
    head_norm: bool | str = True
    softmax_head_norm: bool = False
    head_norm_eps: float | None = None
    head_norm_init: float | list[float] = 1.0
    hidden_act: str = "silu"
    initializer_range: float = 0.02
    embedding_initializer_range: float | None = None
    output_initializer_range: float | None = None
    backend: str = "auto"
    sliding_window: int | None = None
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any):
        self._refuse_unknown(kwargs)
        self._require_positive("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
        require_positive(signal_heads_per_noise_head=self.signal_heads_per_noise_head)
        if self.num_key_value_heads is None:
            self.num_key_value_heads = default_key_value_heads(
                self.attention, self.num_attention_heads, self.signal_heads_per_noise_head
            )
        if self.head_dim is None:
            if self.hidden_size % self.num_attention_heads:
                raise ValueError(
                    f"hidden_size {self.hidden_size} is not divisible by num_attention_heads "
                    f"{self.num_attention_heads}; give sizes that divide, or head_dim"
                )
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.intermediate_size is None:
            self.intermediate_size = max(64, 64 * round(self.hidden_size * 8 / 3 / 64))
        self.check()
        super().__post_init__(**kwargs)

    def check(self):
        """Raise ValueError for sizes that are not positive or do not fit together, and for unknown values.

        A model asks again, for ``from_pretrained(folder, attention=...)`` sets fields of a finished configuration.
        """
        self._require_positive("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
        self._require_positive("num_key_value_heads", "head_dim", "intermediate_size", "max_position_embeddings")
        require_positive(sliding_window=self.sliding_window, value_head_dim=self.value_head_dim)
        require_positive(head_norm_eps=self.head_norm_eps)
        _check_choices(self)
        _ = self.heads  # raises for head counts that do not fit

    @property
    def heads(self) -> HeadCounts:
        """Heads of queries, keys, values and outputs, and their widths."""
        assert self.num_key_value_heads is not None  # set by __post_init__
        assert self.head_dim is not None
        return count_heads(
            self.attention,
            self.num_attention_heads,
            self.num_key_value_heads,
            self.head_dim,
            self.value_head_dim,
            self.signal_heads_per_noise_head,
        )

    @property
    def num_diff_heads(self) -> int:
        """The paper's h: heads that are a difference of two maps. Softmax attention: those of its counterpart."""
        return self.num_attention_heads // 2 if self.attention == "softmax" else self.heads.outputs

    @property
    def layer_types(self) -> list[str]:
        """By this transformers makes caches: ``"dint"`` keeps a running mean beside keys and values.

        Raises:
            AttributeError: for every other attention, which needs nothing but keys and values.
        """
        if self.attention != "dint":
            raise AttributeError(f"attention={self.attention!r} has no layer_types")
        return ["hybrid"] * self.num_hidden_layers

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
    """The matched Transformer of a configuration: the same with ``attention="softmax"``, its heads not normalised.

    Parameters agree within 1 %, and for ``"diff"`` FLOPs and the key/value cache too: there nothing but ``attention``
    differs, and the DIFF Transformer has only ``6 head_dim`` parameters a layer more. The same holds for ``"dint"``,
    which computes more, and for a fixed lambda. For ``"diff_v2"`` and ``"grouped_diff"`` ``intermediate_size`` differs
    too: see ``cost_matched`` in ``model/matching.py``.
    """
    from diff_transformer.model.matching import cost_matched

    return cost_matched(config, attention="softmax", softmax_head_norm=False)


def _check_choices(config):
    check_variant(config.attention, lambda_learned=config.lambda_learned, window=config.sliding_window)
    if config.hidden_act not in ACTIVATIONS:
        raise ValueError(f"hidden_act is {config.hidden_act!r}; accepted: {', '.join(map(repr, ACTIVATIONS))}")
    check_backend(config.backend)
    check_head_norm(config.head_norm, config.head_norm_init)
    if config.softmax_head_norm and config.attention != "softmax":
        raise ValueError(
            f"softmax_head_norm is for attention='softmax', not {config.attention!r}; there, set head_norm"
        )
    if isinstance(config.head_norm_init, list | tuple) and len(config.head_norm_init) != config.num_hidden_layers:
        raise ValueError(
            f"head_norm_init has {len(config.head_norm_init)} values for {config.num_hidden_layers} layers; give one "
            f"number for all layers, or one for each"
        )
    check_lambda_init(config.lambda_init)
    check_rotary_width(config.head_dim)
