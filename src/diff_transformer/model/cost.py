"""The cost of a model, from its configuration alone.

Inference: parameters by part, FLOPs for each token, bytes of key/value cache. Training: memory on each device. Training
keeps 16 bytes for each parameter, with AdamW on fp32 master weights: 4 for the weight, 4 for its gradient, 8 for both
moments. Sharding divides them by the number of devices; the weights in use are gathered one layer at a time.
"""

from dataclasses import dataclass

from diff_transformer.checks import require_positive

_GIB = 1 << 30


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
    cached = config.num_hidden_layers * (heads.keys * heads.head_dim + heads.values * heads.value_dim)
    return Cost(parameters, round(flops), cached * bytes_per_value, length, config.sliding_window)


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes on one device, without the allocator's overhead (5 to 20 % in practice).

    weights: the device's share of the parameters; their gradients take as much.
    optimizer: its share of AdamW's two moments.
    gathered: weights of the layers in use, and with context parallel a layer's keys and values of whole rows.
    activations: saved for the backward pass.
    logits: logits and their gradient.
    """

    weights: int
    optimizer: int
    gathered: int
    activations: int
    logits: int

    @property
    def states(self) -> int:
        """Weights, gradients and moments."""
        return 2 * self.weights + self.optimizer

    @property
    def total(self) -> int:
        return self.states + self.gathered + self.activations + self.logits

    @property
    def gib(self) -> float:
        return self.total / _GIB


def training_memory(
    config,
    *,
    tokens: int,
    devices: int = 1,
    mixed: bool = True,
    activation_checkpointing: str = "none",
    loss_chunk: int = 0,
    tensor_parallel: int = 1,
    context_parallel: int = 1,
) -> TrainingMemory:
    """Memory of a training step on each of ``devices`` that shard weights and optimizer state (FSDP).

    Args:
        tokens: tokens in one forward and backward pass on one device (its part of the rows).
        mixed: bf16 computation on fp32 weights; otherwise everything is fp32.
        activation_checkpointing: "none", "selective" (keep the results of products and attention) or "full" (keep each
            layer's input).
        loss_chunk: tokens whose logits are in memory at a time; 0 for all.
        tensor_parallel: devices that share each layer, times ``devices``.
        context_parallel: devices that share each row. Each holds a layer's keys and values of the whole row three
            times: as received, in the order of the row, and their gradient.

    Raises:
        UserError: for numbers that are not positive.
    """
    ways = tensor_parallel
    require_positive(tokens=tokens, devices=devices, tensor_parallel=ways, context_parallel=context_parallel)
    parameters = sum(count_parameters(config).values())
    weights, states = (-(-of_each * parameters // (devices * ways)) for of_each in (4, 16))
    alive = min(loss_chunk, tokens) if loss_chunk else tokens
    per_token = activation_bytes(config, mixed=mixed, ways=ways)
    saved = per_token[activation_checkpointing] * config.num_hidden_layers
    if activation_checkpointing != "none":
        saved += per_token["none"]  # of the layer that is computed again
    computed = 2 if mixed else 4
    gathered = 0
    if devices > 1:
        gathered = 2 * computed * _parameters_of_a_layer(config) + computed * config.vocab_size * config.hidden_size
        gathered //= ways
    if context_parallel > 1:
        heads = config.heads
        of_a_token = computed * (heads.keys * heads.head_dim + heads.values * heads.value_dim)
        gathered += 3 * of_a_token * tokens * context_parallel // ways
    return TrainingMemory(
        weights=weights,
        optimizer=states - 2 * weights,
        gathered=gathered,
        activations=tokens * saved,
        logits=alive * config.vocab_size * (computed + 4 + 4) // ways,
    )


def activation_bytes(config, *, mixed: bool, ways: int = 1) -> dict[str, int]:
    """Bytes for each token that a layer keeps for its backward pass, by ``activation_checkpointing``.

    "none": of the model's width the residual stream before and after attention, and both norms' scaled inputs and
    outputs; queries, keys, values and outputs of the heads, for differential attention also the head norm's scaled
    input and output; four tensors of SwiGLU. In mixed precision the residual stream and the norms are fp32, inputs of
    matrices bf16. "selective": the layer's input, and the results of its seven matrices and of attention. "full": the
    input. ``ways`` devices share a layer by its heads.
    """
    heads, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    width, inner, two_maps = config.hidden_size, config.intermediate_size, config.variant.maps == 2
    computed = 2 if mixed else 4
    shared = ((2 + 4 * two_maps if mixed else 2 + 2 * two_maps) * heads + 2 * keys + 4 * inner) * computed // ways
    products = 2 * width + (2 * heads + 2 * keys + 2 * inner) // ways
    return {
        "none": (26 if mixed else 24) * width + shared,
        "selective": 4 * width + computed * products,
        "full": 4 * width,
    }


def _parameters_of_a_layer(config) -> int:
    parts = count_parameters(config)
    return (sum(parts.values()) - parts["embedding"] - parts["head"]) // config.num_hidden_layers
