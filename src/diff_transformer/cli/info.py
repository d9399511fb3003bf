"""The lines that ``diff-transformer info`` prints."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.table import Table

from diff_transformer.checks import require_positive
from diff_transformer.lab.sides import name_of
from diff_transformer.model.config import matched_baseline
from diff_transformer.model.cost import BF16_PEAK_FLOPS, model_cost
from diff_transformer.model.matching import variant
from diff_transformer.model.presets import PRESETS, preset
from diff_transformer.train.estimate import SHARE


def pair_table(name: str, length: int | None = None, attention: str = "diff") -> Table:
    """The preset ``name`` with a variant of differential attention and its matched Transformer, and how far apart they
    are.

    Raises:
        ValueError: for an unknown preset or variant, one the preset's heads do not fit, or a length that is not
            positive.
    """
    config = variant(preset(name), attention)
    baseline = matched_baseline(config)
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


def folder_table(folder: Path, length: int | None = None) -> Table:
    """The model in ``folder``: sizes, heads and cache.

    Raises:
        UserError: if the folder holds no model; for a length that is not positive.
    """
    from diff_transformer.model.convert.folder import LAYOUTS, layout_of, model_without_weights, package_config

    (layout, settings), config = layout_of(folder), package_config(folder)
    kind = LAYOUTS[layout].title if layout else f"a {settings.get('model_type')!r} model"
    table = Table(title=f"{folder}: {kind}", title_justify="left", show_header=False)
    if config is None:
        table.add_row("parameters", f"{model_without_weights(folder).num_parameters():,}")
        keys = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
        for key in (*keys, "max_position_embeddings"):
            if key in settings:
                table.add_row(key, str(settings[key]))
        return table
    heads, cost = config.heads, model_cost(config, length=length)
    table.add_row("parameters", f"{cost.total_parameters:,}")
    table.add_row("attention", name_of(config.attention))
    table.add_row("layers, width, vocabulary", f"{config.num_hidden_layers}, {config.hidden_size}, {config.vocab_size}")
    table.add_row("heads", f"{heads.queries} query, {heads.keys} key of width {heads.head_dim}")
    table.add_row("", f"{heads.values} value, {heads.outputs} output of width {heads.value_dim}")
    table.add_row("positions", f"{config.max_position_embeddings:,}")
    table.add_row(f"forward FLOPs a token, {cost.length} tokens", f"{cost.flops_per_token:,}")
    table.add_row("KV cache, bytes a token (bf16)", f"{cost.kv_bytes_per_token:,}")
    table.add_row(f"KV cache, bytes at {cost.length} tokens", f"{cost.kv_bytes(cost.length):,}")
    return table


_GIB = 1 << 30
_PARTS = {  # of TrainingMemory
    "weights, fp32": "weights",
    "gradients, fp32": "weights",
    "AdamW's moments, fp32": "optimizer",
    "weights in use, gathered": "gathered",
    "activations": "activations",
    "logits": "logits",
}


def fit_table(run: Any, gpus: int, memory: float) -> tuple[str, Table, str]:
    """Memory of a training step of ``run``, a RunConfig, on each of ``gpus`` with ``memory`` GiB, and what fits:
    a heading, the table by what is recomputed, and sentences.

    Raises:
        ValueError: for numbers that are not positive, or GPUs over which the run cannot be spread.
    """
    from diff_transformer.train.plan import resolve
    from diff_transformer.train.recompute import FILLED, memory_by_recomputation

    require_positive(gpus=gpus, memory=memory)
    plan = resolve(run, gpus)
    strategy, config, parallel = plan.strategy, plan.model, run.train.parallel
    needed = memory_by_recomputation(run, config, gpus, sharded=strategy == "fsdp")
    room, sharing = FILLED * memory, parallel.tensor_parallel * parallel.context_parallel
    rows, share = run.train.rows_of_a_pass(gpus // sharing), run.train.batch_size // (gpus // sharing)
    size, passes = model_cost(config).total_parameters, -(-share // rows)
    heading = (
        f"{run.name}: {size / 1e9:.2f}B parameters, {gpus} GPU{'s' * (gpus > 1)} ({strategy}), "
        f"{passes} pass{'es' * (passes > 1)} a step of {rows} x {run.data.length:,} tokens"
    )
    table = Table()
    table.add_column("GiB on each GPU; activation_checkpointing")
    for what in needed:
        table.add_column(what, justify="right")
    for label, part in _PARTS.items():
        table.add_row(label, *(f"{getattr(used, part) / _GIB:.1f}" for used in needed.values()))
    table.add_section()
    table.add_row("sum", *(f"{used.gib:.1f}" for used in needed.values()))
    table.add_row(f"fits {room:.1f} GiB", *("yes" if used.gib <= room else "no" for used in needed.values()))
    chosen = next((what for what, used in needed.items() if used.gib <= room), None)
    tokens = run.train.batch_size * run.data.length
    flops = model_cost(config, length=run.data.length).training_flops_per_token * tokens
    seconds = flops / (SHARE * gpus * BF16_PEAK_FLOPS["H100"])
    lines = [
        f"{FILLED:.0%} of {memory:g} GiB may be used; the allocator takes 5 to 20 % more than these sums.",
        f"A step computes for {seconds:.2f} s on H100s at {SHARE:.0%} of their peak.",
    ]
    if chosen is not None:
        lines.append(f"It fits with train.activation_checkpointing={chosen}: {needed[chosen].gib:.1f} GiB.")
    else:
        lines.append(
            f"It does not fit: {needed['full'].gib:.1f} GiB are needed, {room:.1f} may be used. Give more GPUs under "
            "train.parallel.strategy=fsdp, train.micro_batch_size=1, or train.loss_chunk."
        )
    return heading, table, "\n".join(lines)


def preset_table(recipes: Iterable[str] = ()) -> Table:
    """All presets, a line each, and the names of ``recipes`` below."""
    table = Table(title="presets", title_justify="left")
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
