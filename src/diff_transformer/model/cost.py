"""What a model costs, from its configuration alone: parameters by part, FLOPs a token, bytes of key/value cache."""

from dataclasses import dataclass

from diff_transformer.checks import require_positive


@dataclass(frozen=True)
class Cost:
    """``parameters``: by part. ``flops_per_token``: forward, at ``length`` tokens, a multiply-add counted as two.
    ``kv_bytes_per_token``: keys and values of all layers."""

    parameters: dict[str, int]
    flops_per_token: int
    kv_bytes_per_token: int
    length: int

    @property
    def total_parameters(self) -> int:
        return sum(self.parameters.values())

    @property
    def training_flops_per_token(self) -> int:
        """Forward and backward: three times the forward (no recomputation counted)."""
        return 3 * self.flops_per_token


def count_parameters(config) -> dict[str, int]:
    """Parameters by part; a tied embedding counts once."""
    d, width, layers = config.head_dim, config.hidden_size, config.num_hidden_layers
    projections = width * d * (2 * config.num_attention_heads + 2 * config.num_key_value_heads)
    parts = {
        "embedding": config.vocab_size * width,
        "head": 0 if config.tie_word_embeddings else config.vocab_size * width,
        "attention": layers * projections,
        "lambda": 0,
        "head norm": 0,
        "feed-forward": layers * 3 * width * config.intermediate_size,
        "norms": (2 * layers + 1) * width,
    }
    if config.attention == "diff":
        parts["lambda"] = layers * 4 * d
        parts["head norm"] = layers * 2 * d if config.head_norm is True else 0
    elif config.softmax_head_norm:
        parts["head norm"] = layers * d
    return parts


def attention_core_flops(config, length: int) -> float:
    """Forward FLOPs of the attention core for one token, averaged over a causal sequence of ``length``.

    Both maps' scores and one product with V cost what softmax attention with twice the heads costs; the difference
    adds one multiply-add for each entry of a map and the head norm some four a channel.
    """
    keys = (length + 1) / 2
    flops = 2 * 2 * config.num_attention_heads * config.head_dim * keys
    if config.attention == "diff":
        flops += 2 * config.num_diff_heads * keys
    if config.head_norm if config.attention == "diff" else config.softmax_head_norm:
        flops += 4 * config.num_attention_heads * config.head_dim
    return flops


def model_cost(config, *, length: int | None = None, bytes_per_value: int = 2) -> Cost:
    """Cost of ``config`` at sequences of ``length`` tokens (``max_position_embeddings`` if None)."""
    require_positive(length=length, bytes_per_value=bytes_per_value)
    length = length or config.max_position_embeddings
    parameters = count_parameters(config)
    matrices = parameters["attention"] + parameters["feed-forward"] + config.vocab_size * config.hidden_size
    flops = 2 * matrices + config.num_hidden_layers * attention_core_flops(config, length)
    cache = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * bytes_per_value
    return Cost(parameters, round(flops), cache, length)
