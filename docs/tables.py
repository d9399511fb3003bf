"""Fill the tables of docs/pretraining.md, from the cost model, and of other pages, from the records that they show.

python docs/tables.py          # fill
python docs/tables.py --check  # exit 1 if a page differs
"""

import json
import sys
from pathlib import Path

from claims_table import claims_table

from diff_transformer.lab.recipes import recipe
from diff_transformer.model.cost import BF16_PEAK_FLOPS, model_cost, training_seconds
from diff_transformer.report.generated import filled, keep
from diff_transformer.train.recompute import FILLED, memory_by_recomputation

DOCS = Path(__file__).resolve().parent
RECIPES = (
    "scaling_830m",
    "scaling_1p4b",
    "scaling_2p8b",
    "paper_3b",
    "scaling_6p8b",
    "scaling_13b",
    "long_context_64k",
)
GPUS = (1, 8, 16, 64, 256)
GPU_GIB = 80


def memory() -> str:
    """What is recomputed, GiB on each GPU and days for the recipe's tokens, with the settings that the recipe has."""
    heads = "| recipe | parameters | tokens | rows a pass | "
    lines = [heads + " | ".join(f"{n} GPU{'s' * (n > 1)}" for n in GPUS) + " |"]
    lines.append("|---" * (len(GPUS) + 4) + "|")
    for name in RECIPES:
        run = recipe(name)
        config = _config(run)
        tokens = run.train.steps * run.train.batch_size * run.data.length
        cells = [_cell(run, config, tokens, devices) for devices in GPUS]
        size, rows = model_cost(config).total_parameters, run.train.rows_of_a_pass()
        lines.append(f"| `{name}` | {size / 1e9:.2f}B | {tokens / 1e9:,.1f}B | {rows} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(run, config, tokens: int, devices: int) -> str:
    sharing = run.train.parallel.context_parallel
    if devices % sharing:
        return f"{sharing} GPUs share a row"
    if run.train.batch_size % (devices // sharing):
        return f"{run.train.batch_size} rows only"
    needed = memory_by_recomputation(run, config, devices, sharded=True)
    needed = {what: used.gib for what, used in needed.items()}
    if min(needed.values()) > FILLED * GPU_GIB:
        return f"{min(needed.values()):.0f} GiB: too much"
    what, used = next((what, gib) for what, gib in needed.items() if gib <= FILLED * GPU_GIB)
    seconds = training_seconds(
        config, tokens=tokens, length=run.data.length, devices=devices, peak_flops=BF16_PEAK_FLOPS["H100"]
    )
    return f"{what}, {used:.0f} GiB, {_days(seconds)}"


def _config(run):
    from diff_transformer.model.config import DiffTransformerConfig

    return DiffTransformerConfig(**run.model)


def _days(seconds: float) -> str:
    days = seconds / 86_400
    return f"{days:,.0f} days" if days >= 10 else f"{days:.1f} days" if days >= 1 else f"{24 * days:.1f} hours"


def reliability() -> str:
    """The faults of the reliability record by part; those with the same outcomes share a line."""
    rows = json.loads((DOCS.parent / "benchmarks" / "results" / "reliability.json").read_text())["rows"]
    lines = []
    for part in dict.fromkeys(row["part"] for row in rows):
        same: dict[str, tuple[list[str], int]] = {}
        for row in (row for row in rows if row["part"] == part):
            outcomes = row["outcomes"].items()
            said = ", ".join(name if count == row["tried"] else f"{count} {name}" for name, count in outcomes)
            faults, tried = same.get(said, ([], 0))
            same[said] = ([*faults, row["fault"]], tried + row["tried"])
        lines += ["", f"**{part}**", "", "| of | tried | outcome |", "|---|---|---|"]
        for said, (faults, tried) in same.items():
            lines.append(f"| {'; '.join(faults)} | {tried:,} | {said} |")
    total, minutes = sum(row["tried"] for row in rows), sum(row["seconds"] for row in rows) / 60
    said = f"{total:,} faults in {len(rows)} scenarios, which took {minutes:.0f} minutes together."
    return "\n".join([said, *lines])


def architectures() -> str:
    """Which decoders ``differentiate`` takes, and why not the others."""
    record = json.loads((DOCS.parent / "benchmarks" / "results" / "differentiate.json").read_text())
    taken = [row["model"] for row in record["rows"] if not row["refused"]]
    lines = ["| model | |", "|---|---|", f"| {'; '.join(taken)} | taken, as `diff_v2` and as `diff` |"]
    refused = {row["model"]: row["refused"].split(" is not taken: ")[-1] for row in record["rows"] if row["refused"]}
    lines += [f"| {name} | refused: {reason} |" for name, reason in refused.items()]
    return "\n".join([*lines, "", f"transformers {record['transformers']}."])


TABLES = {
    DOCS / "pretraining.md": {"memory": memory},
    DOCS / "pretrained_to_diff.md": {"architectures": architectures},
    DOCS / "reproduction.md": {"claims": claims_table},
    DOCS / "reliability.md": {"reliability": reliability},
}


def main(arguments: list[str]) -> int:
    made = {page: filled(page, {name: table() for name, table in tables.items()}) for page, tables in TABLES.items()}
    return keep(made, check=arguments == ["--check"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
