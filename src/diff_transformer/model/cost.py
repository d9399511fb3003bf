"""What a model costs, from its configuration alone: parameters by part, FLOPs a token, bytes of key/value cache."""

from dataclasses import dataclass

from diff_transformer.checks import require_positive


@dataclass(frozen=True)
class Cost:
    """``parameters``: by part. ``flops_per_token``: forward, at ``length`` tokens, a multiply-add counted as two.
    ``kv_bytes_per_token``: keys and values of all layers; ``kv_bytes``: of a whole cache, of which a sliding window of
    ``window`` tokens keeps no more than that."""

    parameters: dict[str, int]
    flops_per_token: int
    kv_bytes_per_token: int
    length: int
    window: int | None = None

    def kv_bytes(self, length: int) -> int:
        """Bytes of the cache of one sequence after ``length`` tokens."""
        return self.kv_bytes_per_token * (length if self.window is None else min(length, self.window))

    @property
    def total_parameters(self) -> int:
        return sum(self.parameters.values())

    @property
    def training_flops_per_token(self) -> int:
        """Forward and backward: three times the forward (no recomputation counted)."""
        return 3 * self.flops_per_token


def count_parameters(config) -> dict[str, int]:
    """Parameters by part; a tied embedding counts once. ``lambda`` holds the projection of ``diff_v2``'s lambda."""
    width, layers, heads = config.hidden_size, config.num_hidden_layers, config.heads
    projections = heads.queries + heads.keys
    values = (heads.values + heads.outputs) * heads.value_dim
    return {
        "embedding": config.vocab_size * width,
        "head": 0 if config.tie_word_embeddings else config.vocab_size * width,
        "attention": layers * width * (projections * heads.head_dim + values),
        "lambda": layers * _lambda_parameters(config),
        "head norm": layers * heads.value_dim if _head_norm(config) is True else 0,
        "feed-forward": layers * (3 * width * config.intermediate_size + 4 * (config.hidden_act == "poly_norm")),
        "norms": (2 * layers + 1) * width,
    }


def _lambda_parameters(config) -> int:
    if config.attention == "diff_v2":
        return config.hidden_size * config.heads.outputs
    return 4 * config.head_dim if config.attention != "softmax" and config.lambda_learned else 0


def _head_norm(config) -> bool | str:
    if config.attention == "softmax":
        return config.softmax_head_norm
    return config.attention != "diff_v2" and config.head_norm


def attention_core_flops(config, length: int) -> float:
    """Forward FLOPs of the attention core for one token, averaged over a causal sequence of ``length``.

    Scores of every query head, and one product with V for each head of the output: the maps are subtracted first, a
    multiply-add for each entry of a map. ``dint`` has a second product, of the first map, for its running mean. The
    head norm costs some four operations a channel.
    """
    keys, heads = _mean_keys(length, config.sliding_window), config.heads
    out = heads.outputs * heads.value_dim
    flops = 2 * keys * (heads.queries * heads.head_dim + out * (2 if config.attention == "dint" else 1))
    if config.attention != "softmax":
        flops += 2 * heads.outputs * keys
    return flops + (4 * out if _head_norm(config) else 0)


def _mean_keys(length: int, window: int | None) -> float:
    """Keys that a query sees, averaged over a causal sequence: query t sees t of them, or the last ``window``."""
    near = length if window is None else min(length, window)
    return (near * (near + 1) / 2 + (length - near) * near) / length


def model_cost(config, *, length: int | None = None, bytes_per_value: int = 2) -> Cost:
    """Cost of ``config`` at sequences of ``length`` tokens (``max_position_embeddings`` if None)."""
    require_positive(length=length, bytes_per_value=bytes_per_value)
    length = length or config.max_position_embeddings
    parameters = count_parameters(config)
    matrices = parameters["attention"] + parameters["feed-forward"] + config.vocab_size * config.hidden_size
    if config.attention == "diff_v2":
        matrices += parameters["lambda"]
    flops = 2 * matrices + config.num_hidden_layers * attention_core_flops(config, length)
    heads = config.heads
    cached = config.num_hidden_layers * (heads.keys * heads.head_dim + heads.values * heads.value_dim)
    return Cost(parameters, round(flops), cached * bytes_per_value, length, config.sliding_window)
