"""The lines that ``diff-transformer info`` prints."""

from collections.abc import Iterable

from rich.table import Table

from diff_transformer.lab.sides import name_of
from diff_transformer.model.config import matched_baseline
from diff_transformer.model.cost import model_cost
from diff_transformer.model.matching import variant
from diff_transformer.model.presets import PRESETS, preset


def pair_table(name: str, length: int | None = None, attention: str = "diff") -> Table:
    """The preset ``name`` with a variant of differential attention and its matched Transformer, and how far apart they
    are.

    Raises:
        UserError: for an unknown preset or variant, one the preset's heads do not fit, or a length that is not
            positive.
    """
    baseline = matched_baseline(preset(name))
    config = preset(name) if attention == "diff" else variant(baseline, attention)
    diff, softmax = model_cost(config, length=length), model_cost(baseline, length=length)
    heads, d = config.heads, config.head_dim
    table = Table(
        title=f"{name}: d_model {config.hidden_size}, {config.num_hidden_layers} layers", title_justify="left"
    )
    table.add_column("")
    shown = f"{heads.outputs} heads, d {d}, values {heads.value_dim}"
    table.add_column(f"{name_of(attention)}\n{shown}", justify="right")
    table.add_column(f"Transformer\n{baseline.num_attention_heads} heads, d {d}", justify="right")
    table.add_column("difference", justify="right")
    assert config.intermediate_size is not None  # set by the configuration itself
    assert baseline.intermediate_size is not None
    if config.intermediate_size != baseline.intermediate_size:
        _row(table, "feed-forward width", config.intermediate_size, baseline.intermediate_size)
        table.add_section()
    for part in diff.parameters:
        _row(table, f"parameters: {part}", diff.parameters[part], softmax.parameters[part])
    table.add_section()
    _row(table, "parameters", diff.total_parameters, softmax.total_parameters)
    _row(table, f"forward FLOPs a token, {diff.length} tokens", diff.flops_per_token, softmax.flops_per_token)
    _row(table, "training FLOPs a token", diff.training_flops_per_token, softmax.training_flops_per_token)
    _row(table, "KV cache, bytes a token (bf16)", diff.kv_bytes_per_token, softmax.kv_bytes_per_token)
    full = diff.length
    _row(table, f"KV cache, bytes at {full} tokens", diff.kv_bytes(full), softmax.kv_bytes(full))
    return table


def preset_table(recipes: Iterable[str] = ()) -> Table:
    """All presets, a line each, and the names of ``recipes`` below."""
    table = Table(title="presets", title_justify="left", caption_justify="left")
    for column in ("preset", "parameters", "d_model", "layers", "DIFF heads", "d", "length"):
        table.add_column(column, justify="left" if column == "preset" else "right")
    for name in PRESETS:
        c = preset(name)
        cells = (c.hidden_size, c.num_hidden_layers, c.num_diff_heads, c.head_dim, c.max_position_embeddings)
        table.add_row(name, f"{model_cost(c).total_parameters / 1e6:,.1f}M", *map(str, cells))
    table.caption = f"recipes: {', '.join(recipes)}"
    return table


def _row(table: Table, label: str, ours: int, theirs: int):
    difference = "" if ours == theirs else f"{100 * (ours / theirs - 1):+.3f} %" if theirs else f"+{ours:,}"
    table.add_row(label, f"{ours:,}", f"{theirs:,}", difference)
