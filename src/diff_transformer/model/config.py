"""The configuration of the DIFF Transformer and of its matched Transformer: one class, one field apart."""

import os
from numbers import Integral
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedConfig

from diff_transformer.checks import did_you_mean, require_known, require_positive
from diff_transformer.errors import UserError
from diff_transformer.model.heads import CORES, HeadCounts, Variant, count_heads, default_key_value_heads, variant_of
from diff_transformer.model.matching import VARIANTS, cost_matched
from diff_transformer.ops.backends import BACKENDS

ACTIVATIONS = ("silu", "poly_norm")
CODE = "diff_transformer_code"  # a file beside the weights, for AutoModel with trust_remote_code=True
_AUTO_MAP = {
    "AutoConfig": f"{CODE}.DiffTransformerConfig",
    "AutoModel": f"{CODE}.DiffTransformerModel",
    "AutoModelForCausalLM": f"{CODE}.DiffTransformerForCausalLM",
}
_STUB = '''"""The classes of this model, from the package diff-transformer: pip install diff-transformer."""

from diff_transformer.model.config import DiffTransformerConfig
from diff_transformer.model.modeling import DiffTransformerForCausalLM, DiffTransformerModel
'''
_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "value_head_dim", "signal_heads_per_noise_head", "max_position_embeddings", "sliding_window",
)  # fmt: skip
# Keys that transformers writes into a configuration, or passes with it, without declaring them as fields.
_TRANSFORMERS_KEYS = {
    "attn_implementation", "experts_implementation", "torch_dtype", "num_labels", "name_or_path", "auto_map",
    "model_type", "output_attentions", "quantization_config", "trust_remote_code", "rope_theta", "rope_scaling",
    "per_layer_config",
}  # fmt: skip


class DiffTransformerConfig(PreTrainedConfig):
    """Configuration of ``DiffTransformerModel`` (sections 2 and 3.1, appendices C and D).

    ``num_attention_heads`` and ``num_key_value_heads`` count the heads of the *matched Transformer* (3B: 24), so the
    two configurations of a pair differ in the field ``attention`` alone; ``num_diff_heads`` is the paper's h (12).
    Fields of a part that the variant lacks (``CORES`` in ``model/heads.py``) are ignored: for ``"diff_v2"``,
    ``"diff_v3"``, ``"gated"`` and ``"softmax"`` those of lambda and of the head norm.

    Raises:
        UserError: for sizes that are not positive or do not divide, unknown values, and unknown keys. A file may hold
            unknown keys, which become attributes.
    """

    model_type = "diff_transformer"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]  # noqa: RUF012  (Trainer adds a list to it)
    auto_map = {}  # noqa: RUF012  (TRL reads it from every configuration)

    attention: str = "diff"
    """``"diff"``; ``"softmax"`` (the matched Transformer: Llama's architecture); ``"diff_v2"`` (lambda of each token
    and head, maps share keys and values, no head norm); ``"diff_v3"`` (V2 with such a weight on the first map too:
    s1 A1 - s2 A2); ``"gated"`` (softmax attention with a gate for each token and head); ``"grouped_diff"`` (arXiv
    2510.06949: several signal heads share a noise head); ``"dint"`` (arXiv 2501.17486: rows sum to 1)."""

    vocab_size: int = 32000
    """Number of tokens in the vocabulary."""

    hidden_size: int = 1024
    """d_model."""

    intermediate_size: int | None = None
    """Inner width of SwiGLU; None means 8/3 ``hidden_size``, rounded to a multiple of 64."""

    num_hidden_layers: int = 12
    """Number of decoder layers."""

    num_attention_heads: int = 16
    """Query heads of width ``head_dim``, as in the matched Transformer. For ``"diff"`` and ``"dint"``, heads 2i and
    2i+1 are the maps of differential head i; for ``"diff_v2"`` they share keys; for ``"grouped_diff"`` they are signal
    and noise heads together."""

    num_key_value_heads: int | None = None
    """Key/value heads for grouped-query attention; None means ``num_attention_heads`` (for ``"grouped_diff"`` two for
    each noise head: one for each of its maps)."""

    head_dim: int | None = None
    """d; None means ``hidden_size // num_attention_heads``."""

    value_head_dim: int | None = None
    """Width of a value head; None means ``2 * head_dim``, with one map or shared keys ``head_dim``."""

    signal_heads_per_noise_head: int = 3
    """r of ``"grouped_diff"``; the authors advise 3 or 4. 1 is ``"diff"``."""

    max_position_embeddings: int = 4096
    """Longest sequence, in tokens."""

    rope_parameters: dict | None = None
    """As in transformers; None means ``{"rope_type": "default", "rope_theta": 10000.0}``."""

    rms_norm_eps: float = 1e-5
    """Epsilon of all norms, unless ``head_norm_eps`` is set."""

    tie_word_embeddings: bool = False
    """True if the language-modelling head shares the weight of the token embedding."""

    lambda_init: str | float = "depth"
    """``"depth"`` (0.8 - 0.6 exp(-0.3 i) in layer i) or a constant for every layer (ablation of Table 6). Below 1:
    every head is multiplied by ``1 - lambda_init``."""

    lambda_depth_offset: int = 0
    """Added to the layer's index in that formula; -1 for checkpoints that count layers from -1."""

    lambda_learned: bool = True
    """False fixes lambda at ``lambda_init``."""

    lambda_std: float = 0.1
    """Standard deviation of the lambda vectors at initialisation."""

    head_norm: bool | str = True
    """RMSNorm on each head's output: True (with a weight as wide as the head), ``"no_weight"``, or False."""

    softmax_head_norm: bool = False
    """The same norm, with a weight of width d, on the heads of ``attention="softmax"`` (ablation of Table 6)."""

    head_norm_eps: float | None = None
    """Epsilon of the head norm; None means ``rms_norm_eps``."""

    head_norm_init: float | list[float] = 1.0
    """Initial weight of the head norm, or a list by layer. The paper has 1.0."""

    head_scale: float | list[float] | str = 1.0
    """Constant that multiplies each head, or a list by layer. With ``"matched"`` a training run measures, before its
    first step, the values with which heads start as large as softmax attention's, and sets them (``with_matched_scale``
    does it for a configuration): the initial weight of the head norm where there is one, else this constant."""

    core: dict[str, Any] | None = None
    """Parts of the core (fields of ``Variant`` in ``model/heads.py``) that replace those of the row ``attention``:
    ``lam``, ``gate``, ``head_norm``, ``factor``, ``initial_ratio``, ``subtract``. ``{"gate": "normed", "head_norm":
    "weighted"}`` gives ``"diff_v2"`` a head norm and a gate after it."""

    qk_clip: float | None = None
    """Largest RMS of each query and key head, which larger ones are scaled down to (3 in published code of V3); None
    for no limit."""

    hidden_act: str = "silu"
    """Activation of the gated MLP: ``"silu"`` (SwiGLU) or ``"poly_norm"`` (arXiv 2411.03884; some published models)."""

    initializer_range: float = 0.02
    """Standard deviation of all matrices at initialisation."""

    embedding_initializer_range: float | None = None
    """Standard deviation of the token embedding; None means ``initializer_range``."""

    backend: str = "auto"
    """Backend of ``diff_attention`` in every layer."""

    sliding_window: int | None = None
    """Keys that a query sees, its own included, in training and in the cache; None for all."""

    use_cache: bool = True
    """True if a forward pass in eval mode returns a key/value cache."""

    pad_token_id: int | None = None
    """Token id of padding."""

    bos_token_id: int | None = None
    """Token id that begins a text."""

    eos_token_id: int | list[int] | None = None
    """Token id, or ids, that end a text."""

    def __post_init__(self, **kwargs: Any):
        for key in _foreign(kwargs):
            raise UserError(f"DiffTransformerConfig has no field {key!r}{did_you_mean(key, self.__dataclass_fields__)}")
        require_known("attention", self.attention, CORES)
        self._check_sizes()
        if self.num_key_value_heads is None:
            self.num_key_value_heads = default_key_value_heads(self.variant, self.num_attention_heads)
        if self.head_dim is None:
            if self.hidden_size % self.num_attention_heads:
                raise UserError(
                    f"hidden_size {self.hidden_size} is not divisible by num_attention_heads "
                    f"{self.num_attention_heads}; give sizes that divide, or head_dim"
                )
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.intermediate_size is None:
            self.intermediate_size = max(64, 64 * round(self.hidden_size * 8 / 3 / 64))
        self.check()
        super().__post_init__(**kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs):
        """A configuration from the content of a file; ``kwargs`` override it.

        Keys that no field has (of other tools, other versions, a user's notes) become attributes, so that
        ``save_pretrained`` writes them again.
        """
        config_dict = {key: value for key, value in config_dict.items() if key != "auto_map"}
        foreign = {key: config_dict.pop(key) for key in _foreign(config_dict)}
        result = super().from_dict(config_dict, **kwargs)
        vars(result[0] if isinstance(result, tuple) else result).update(foreign)
        return result

    def save_pretrained(self, save_directory: str | os.PathLike, *args, **kwargs):
        """As in transformers, with a file that imports this package for ``trust_remote_code=True``."""
        self.auto_map = _AUTO_MAP
        try:
            super().save_pretrained(save_directory, *args, **kwargs)
        finally:
            del self.auto_map
        Path(save_directory, f"{CODE}.py").write_text(_STUB, encoding="utf-8")

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig"):
        """Do nothing: a folder brings no code but an import."""

    def check(self):
        """Raise UserError for sizes that do not fit together, and for unknown values.

        A model checks again, because ``from_pretrained(folder, attention=...)`` sets fields of an existing
        configuration.
        """
        self._check_sizes()
        require_known("backend", self.backend, ("auto", *BACKENDS))
        require_known("hidden_act", self.hidden_act, ACTIVATIONS)
        head_dim = self.head_dim
        require_positive(qk_clip=self.qk_clip, rms_norm_eps=self.rms_norm_eps, head_norm_eps=self.head_norm_eps)
        _ = self.heads  # raises for an unknown variant, and for head counts that do not fit
        for name in ("head_norm_init", "head_scale"):
            values = getattr(self, name)
            if isinstance(values, list) and len(values) != self.num_hidden_layers:
                raise UserError(
                    f"{name} has {len(values)} values for {self.num_hidden_layers} layers; give one number for all "
                    "layers, or one for each"
                )
        if head_dim is not None and head_dim % 2:
            raise UserError(f"head_dim is {head_dim}; rotary embedding needs an even width")

    def _check_sizes(self):
        for name in _SIZES:
            value = getattr(self, name)
            if value is None and getattr(type(self), name) is None:
                continue
            if not isinstance(value, Integral) or value < 1:
                raise UserError(f"{name} is {value!r}; give a positive whole number")
            setattr(self, name, int(value))  # of NumPy's scalars

    @property
    def heads(self) -> HeadCounts:
        """Heads of queries, keys, values and outputs, and their widths."""
        assert self.num_key_value_heads is not None  # set by __post_init__
        assert self.head_dim is not None
        counts = self.num_attention_heads, self.num_key_value_heads, self.head_dim, self.value_head_dim
        return count_heads(self.variant, *counts)

    @property
    def variant(self) -> Variant:
        """The variant of attention that the cores of the layers compute."""
        return variant_of(self)

    @property
    def num_diff_heads(self) -> int:
        """The paper's h: heads that are a difference of two maps; for softmax attention those of its counterpart."""
        return self.num_attention_heads // 2 if self.variant.maps == 1 else self.heads.outputs


def _foreign(settings: dict[str, Any]) -> list[str]:
    """Those of the keys that belong neither to this package nor to transformers."""
    known = {*DiffTransformerConfig.__dataclass_fields__, *GenerationConfig().to_dict(), *_TRANSFORMERS_KEYS}
    return [key for key in settings if key not in known and not key.startswith("_")]


def matched_baseline(config: DiffTransformerConfig) -> DiffTransformerConfig:
    """The matched Transformer of a configuration: the same with ``attention="softmax"``, its heads not normalised.

    Parameters agree within 1 %. For ``"diff"`` FLOPs and the key/value cache agree too: only ``attention`` differs, and
    the DIFF Transformer has ``6 head_dim`` more parameters in each layer. The same holds for a fixed lambda and for
    ``"dint"``, which computes more and has no cache. For the others ``intermediate_size`` may differ too: see
    ``cost_matched`` in ``model/matching.py``.
    """
    return cost_matched(config, **VARIANTS["softmax"], core=None)
