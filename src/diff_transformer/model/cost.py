"""The cost of a model, from its configuration alone.

Parameters by part, FLOPs for each token, and bytes of key/value cache.
"""

from dataclasses import dataclass

from diff_transformer.checks import require_positive


@dataclass(frozen=True)
class Cost:
    """Cost of a model.

    parameters: by part.
    flops_per_token: of the forward pass at ``length`` tokens; a multiply-add counts as two.
    kv_bytes_per_token: keys and values of all layers.
    window: tokens that the cache keeps with a sliding window; None keeps all.
    """

    parameters: dict[str, int]
    flops_per_token: int
    kv_bytes_per_token: int
    length: int
    window: int | None = None

    def kv_bytes(self, length: int) -> int:
        """Bytes of one sequence's cache after ``length`` tokens."""
        return self.kv_bytes_per_token * (length if self.window is None else min(length, self.window))

    @property
    def total_parameters(self) -> int:
        return sum(self.parameters.values())

    @property
    def training_flops_per_token(self) -> int:
        """Forward and backward: three times the forward pass; recomputation does not count."""
        return 3 * self.flops_per_token


def count_parameters(config) -> dict[str, int]:
    """Parameters by part; a tied embedding counts once. ``lambda`` includes the projection to gates."""
    width, layers, heads = config.hidden_size, config.num_hidden_layers, config.heads
    projections = heads.queries + heads.keys
    values = (heads.values + heads.outputs) * heads.value_dim
    return {
        "embedding": config.vocab_size * width,
        "head": 0 if config.tie_word_embeddings else config.vocab_size * width,
        "attention": layers * width * (projections * heads.head_dim + values),
        "lambda": layers * _lambda_parameters(config),
        "head norm": layers * heads.value_dim if config.variant.head_norm == "weighted" else 0,
        "feed-forward": layers * (3 * width * config.intermediate_size + 4 * (config.hidden_act == "poly_norm")),
        "norms": (2 * layers + 1) * width,
    }


def _lambda_parameters(config) -> int:
    """Lambda's four vectors, or the projection to the sigmoids of each token: lambda, a gate, or both."""
    vectors = 4 * config.head_dim * (config.variant.lam == "learned")
    return vectors + config.hidden_size * config.heads.outputs * config.variant.sigmoids


def attention_core_flops(config, length: int) -> float:
    """Forward FLOPs of the attention core for one token, averaged over a causal sequence of ``length``.

    Counted are the scores of every query head, one multiply-add for each entry of a map (the subtraction), and one
    product with V for each output head. ``dint`` has a second product, of the first map with V. The head norm costs
    about four operations for each channel.
    """
    keys, heads, variant = _mean_keys(length, config.sliding_window), config.heads, config.variant
    out = heads.outputs * heads.value_dim
    flops = 2 * keys * (heads.queries * heads.head_dim + out * (2 if variant.means else 1))
    if variant.maps == 2:
        flops += 2 * heads.outputs * keys
    return flops + out * (4 * (variant.head_norm is not None) + (variant.gate is not None))


def _mean_keys(length: int, window: int | None) -> float:
    """Keys that a query sees, averaged over a causal sequence: query t sees t keys, at most ``window``."""
    near = length if window is None else min(length, window)
    return (near * (near + 1) / 2 + (length - near) * near) / length


def model_cost(config, *, length: int | None = None, bytes_per_value: int = 2) -> Cost:
    """Cost of ``config`` at sequences of ``length`` tokens (``max_position_embeddings`` if None)."""
    require_positive(length=length, bytes_per_value=bytes_per_value)
    length = length or config.max_position_embeddings
    parameters = count_parameters(config)
    matrices = parameters["attention"] + parameters["feed-forward"] + config.vocab_size * config.hidden_size
    if config.variant.sigmoids:
        matrices += parameters["lambda"]
    flops = 2 * matrices + config.num_hidden_layers * attention_core_flops(config, length)
    heads = config.heads
    layers = 0 if config.variant.means else config.num_hidden_layers  # that have a cache
    cached = layers * (heads.keys * heads.head_dim + heads.values * heads.value_dim)
    return Cost(parameters, round(flops), cached * bytes_per_value, length, config.sliding_window)
