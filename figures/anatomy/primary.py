"""The outcomes that preregistration.md names, from the record beside this file, as tables in Markdown.

python figures/anatomy/primary.py
"""

import sys
from pathlib import Path

import pandas as pd

sys.path.append(str(Path(__file__).resolve().parents[1]))
from gate_norm_subtraction.primary import interval, p_value

from diff_transformer.lab.per_example import GOAL
from diff_transformer.lab.quantities import QUANTITIES
from diff_transformer.lab.rows import Rows, read_rows
from diff_transformer.lab.sides import name_of
from diff_transformer.lab.stats import holm

RECORD = Path(__file__).resolve().parent / "measured.jsonl.gz"
GATE = RECORD.parents[1] / "gate_norm_subtraction" / RECORD.name
NAMES = {  # the quantities of redundancy and smoothness, and the sign of a difference that the property claims
    "anatomy_distance": 1, "anatomy_cka": -1, "hessian_largest": -1, "hessian_smallest": 1,
}  # fmt: skip
LEVELS = {
    "anatomy_negative_mass": "negative", "anatomy_distance": "distance", "anatomy_cka": "CKA",
    "hessian_largest": "largest", "hessian_smallest": "smallest",
}  # fmt: skip


def by_seed(rows: Rows, name: str) -> pd.DataFrame:
    """A quantity: a row a training seed, a column a side that has it."""
    measured = {side: pd.Series(QUANTITIES[name].values(rows, side)) for side in rows.sides}
    return pd.DataFrame({side: values for side, values in measured.items() if len(values)})


def contrasts(rows: Rows, side: str, others: tuple[str, ...], tested: bool) -> str:
    """A table of ``side`` minus each of ``others``; if ``tested``, p after Holm's correction over the quantities."""
    head = "|quantity (claimed sign)|" + "|".join(f"minus {name_of(other)}" for other in others) + "|"
    columns = []
    for other in others:
        differences = []
        for name in NAMES:
            table = by_seed(rows, name)
            differences.append((table[side] - table[other]).dropna().to_numpy())
        adjusted = holm([p_value(of) for of in differences]) if tested else [None] * len(NAMES)
        column = []
        for of, p, sign in zip(differences, adjusted, NAMES.values(), strict=True):
            same = (sign * of > 0).sum()
            low, high = interval(of)
            end = f"{same} of {len(of)}" if p is None else "p < 0.001" if p < 0.001 else f"p = {p:.3f}"
            column.append(f"{of.mean():+.3g} ({low:+.3g} to {high:+.3g}), {end}")
        columns.append(column)
    lines = [
        f"|{QUANTITIES[name].name} ({'+' if sign > 0 else '-'})|" + "|".join(column[row] for column in columns) + "|"
        for row, (name, sign) in enumerate(NAMES.items())
    ]
    return "\n".join([head, "|---" * (len(others) + 1) + "|", *lines])


def levels(rows: Rows, learned: pd.DataFrame | None = None) -> str:
    """A table of the means over seeds, or over those that are true in ``learned`` (a column a side); a row a side."""
    tables = {name: by_seed(rows, name) for name in LEVELS}
    if learned is not None:
        tables = {name: table.where(learned) for name, table in tables.items()}
    tables = {name: table for name, table in tables.items() if len(table)}  # a large model has no Hessian
    lines = [
        "|model|" + "|".join(LEVELS[name] for name in tables) + "|",
        "|---" * (len(tables) + 1) + "|",
    ]
    for side in rows.sides:
        runs = "" if learned is None else f", {learned[side].sum()} runs"
        cells = (f"{table[side].mean():.3g}" if side in table else "" for table in tables.values())
        lines.append(f"|{name_of(side)}{runs}|" + "|".join(cells) + "|")
    return "\n".join(lines)


if __name__ == "__main__":
    measured = read_rows(Path(sys.argv[1]) if sys.argv[1:] else RECORD)
    rows, demo = measured.only(setting="p8_n2"), measured.only(setting="demo")
    negative = by_seed(rows, "anatomy_negative_mass")["v2"]
    print(f"V2's negative attention is {negative.min():.3f} to {negative.max():.3f} of all, by seed.\n")
    print(contrasts(rows, "v2", ("softmax", "v2_added"), tested=True))
    learned = by_seed(read_rows(GATE).only(setting="p8_n2"), "recall") >= GOAL
    print(f"\nRuns that end at {GOAL} or more (exploratory):\n", levels(rows, learned), sep="\n")
    if demo.sides:
        print(
            "\nThe demo, with the number of seeds that have the sign:\n",
            contrasts(demo, "v2", ("softmax", "softmax_norm"), tested=False),
            "",
            levels(demo),
            sep="\n",
        )
    for when in ("before", "after"):
        of = measured.only(setting=f"smollm2_{when}")
        print(f"\nSmolLM2-135M-Instruct's models {when} training:\n", levels(of), sep="\n")
