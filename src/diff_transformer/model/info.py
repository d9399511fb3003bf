"""What ``diff-transformer info`` prints."""

from rich.table import Table

from diff_transformer.model.config import matched_baseline
from diff_transformer.model.cost import model_cost
from diff_transformer.model.presets import PRESETS, preset


def pair_table(name: str, length: int | None = None) -> Table:
    """Both sides of the preset ``name``, and how far apart they are.

    Raises:
        ValueError: for an unknown preset or a length that is not positive.
    """
    config = preset(name)
    diff, softmax = model_cost(config, length=length), model_cost(matched_baseline(config), length=length)
    d = config.head_dim or 0
    heads = f"{config.num_diff_heads} heads, d {config.head_dim}"
    table = Table(
        title=f"{name}: d_model {config.hidden_size}, {config.num_hidden_layers} layers", title_justify="left"
    )
    table.add_column("")
    table.add_column(f"DIFF Transformer\n{heads}, values {2 * d}", justify="right")
    table.add_column(f"Transformer\n{config.num_attention_heads} heads, d {config.head_dim}", justify="right")
    table.add_column("difference", justify="right")
    for part in diff.parameters:
        _row(table, f"parameters: {part}", diff.parameters[part], softmax.parameters[part])
    table.add_section()
    _row(table, "parameters", diff.total_parameters, softmax.total_parameters)
    _row(table, f"forward FLOPs a token, {diff.length} tokens", diff.flops_per_token, softmax.flops_per_token)
    _row(table, "training FLOPs a token", diff.training_flops_per_token, softmax.training_flops_per_token)
    _row(table, "KV cache, bytes a token (bf16)", diff.kv_bytes_per_token, softmax.kv_bytes_per_token)
    full = diff.length
    _row(
        table, f"KV cache, bytes at {full} tokens", diff.kv_bytes_per_token * full, softmax.kv_bytes_per_token * full
    )  # fmt: skip
    return table


def preset_table() -> Table:
    """All presets and recipes, a line each."""
    from diff_transformer.recipes import RECIPES

    table = Table(title="presets", title_justify="left")
    for column in ("preset", "parameters", "d_model", "layers", "DIFF heads", "d", "length"):
        table.add_column(column, justify="left" if column == "preset" else "right")
    for name in PRESETS:
        c = preset(name)
        cells = (c.hidden_size, c.num_hidden_layers, c.num_diff_heads, c.head_dim, c.max_position_embeddings)
        table.add_row(name, f"{model_cost(c).total_parameters / 1e6:,.1f}M", *map(str, cells))
    table.caption = f"recipes: {', '.join(RECIPES)}"
    return table


def _row(table: Table, label: str, ours: int, theirs: int):
    difference = "" if ours == theirs else f"{100 * (ours / theirs - 1):+.3f} %" if theirs else f"+{ours:,}"
    table.add_row(label, f"{ours:,}", f"{theirs:,}", difference)
