"""Refusals before vLLM loads a model: of what it would otherwise compute wrong."""

from diff_transformer.errors import UserError
from diff_transformer.model.heads import HeadCounts

ARCHITECTURE = "DiffTransformerForCausalLM"
DIFFERENTIAL = ("DifferentialForCausalLM", "DifferentialMoEForCausalLM")  # made so in place, without and with experts
WIDTHS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # of heads, to pad to where a backend does not take one


def check_config(config, name: str) -> None:
    """Raise UserError for a configuration that the plugin cannot run; ``name`` is the folder or hub name."""
    if config.attention == "dint":
        raise UserError(
            f"{name} has attention='dint', whose running mean over all earlier queries has no place in vLLM's paged "
            "cache; use `diff-transformer serve --engine transformers`, or `diff-transformer generate`"
        )
    if config.core or config.qk_clip or config.head_scale != 1:
        raise UserError(
            f"{name} sets core, head_scale or qk_clip, which the plugin does not apply; use `diff-transformer serve "
            "--engine transformers`"
        )


def head_widths(config) -> tuple[int, int]:
    """Width of a key in vLLM's cache, 2d where two lie side by side, and of a value."""
    heads: HeadCounts = config.heads
    return heads.head_dim * heads.keys // heads.values, heads.value_dim


def check_parallel(config, ranks: int) -> None:
    """Raise UserError unless the heads of ``config`` divide among ``ranks`` tensor-parallel ranks.

    The two maps of a head, and a noise head with its signal heads, stay on one rank. Key/value heads are repeated where
    there are fewer than ranks, except those of ``grouped_diff``.
    """
    heads: HeadCounts = config.heads
    queries, keys = config.num_attention_heads, heads.values
    if config.attention == "diff":
        queries //= 2
    elif config.attention == "grouped_diff":
        queries = heads.queries - heads.outputs  # noise heads
    repeatable = config.attention != "grouped_diff"
    accepted = [
        n for n in range(1, queries + 1) if queries % n == 0 and (keys % n == 0 or (repeatable and n % keys == 0))
    ]
    if ranks not in accepted:
        raise UserError(
            f"tensor_parallel_size is {ranks}, which does not divide {queries} heads with {keys} key/value heads of "
            f"attention={config.attention!r}; sizes that fit: {', '.join(map(str, accepted))}"
        )


def check_differential(config, name: str) -> None:
    """Raise UserError for a model made differential in place that vLLM's Transformers backend does not run."""
    kind = config.differential.get("kind")
    if kind == "dex":
        raise UserError(f"{name} has the extension DEX, which vLLM does not know; fold it first: fold(model)")
    if kind not in ("diff_v2", "diff_v3"):
        raise UserError(
            f"{name} was made differential in place as {kind!r}, each of whose maps has its own keys, and vLLM's cache "
            "would need values for each; use `diff-transformer serve --engine transformers`, or differentiate(model, "
            "'diff_v2')"
        )


def check_differential_ranks(config, ranks: int) -> None:
    """Raise UserError unless both maps of a head, and their keys and values, stay on one of ``ranks`` ranks."""
    plan, n, m = config.base_model_tp_plan or {}, config.num_attention_heads, config.num_key_value_heads
    styles = [plan.get(f"layers.*.self_attn.{name}_proj") for name in "qkvo"]
    by_heads = styles == ["colwise"] * 3 + ["rowwise"] and n % ranks == 0 and (m % ranks == 0 or ranks % m == 0)
    if ranks > 1 and not by_heads:
        raise UserError(
            f"tensor_parallel_size is {ranks}, which does not divide the {n} heads of this {config.model_type} model, "
            f"made differential in place, with their {m} key/value heads, or transformers' plan does not divide it by "
            "heads; leave it out"
        )
