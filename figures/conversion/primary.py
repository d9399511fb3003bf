"""The outcomes that preregistration.md names, from the record beside this file, as tables in Markdown.

python figures/conversion/primary.py
"""

import sys
from pathlib import Path

import pandas as pd

sys.path.append(str(Path(__file__).resolve().parents[1]))
from gate_norm_subtraction.primary import interval, p_value

from diff_transformer.lab.quantities import registered
from diff_transformer.lab.rows import Rows, read_rows
from diff_transformer.lab.sides import name_of
from diff_transformer.lab.stats import holm

OUTCOMES = {  # quantity: name, margin of "level", sign of an improvement, decimals
    "ruler_niah_multiquery_1024": ("numbers found of four", 0.05, 1, 3),
    "loss": ("loss on held-out books, nats", 0.01, -1, 4),
}
TESTED, AGAINST = ("diff_v2", "diff_v3", "dex", "lora"), "attention"
EXPLORATORY, SOURCE = "wider", "source"


def by_seed(rows: Rows, name: str) -> pd.DataFrame:
    """An outcome: a row a training seed, a column a side. A run that diverged has the source's value."""
    (quantity,) = (each for each in registered(rows) if each.id == name)
    table = pd.DataFrame({side: pd.Series(quantity.values(rows, side)) for side in rows.sides})
    lost = rows["about"][lambda frame: frame["key"] == "diverged"]
    for side, seed in zip(lost["side"], lost["seed"], strict=True):
        table.loc[int(seed), side] = table[SOURCE].iloc[0]
    return table


def verdict(differences: pd.Series, adjusted: float, margin: float, sign: int) -> str:
    if adjusted <= 0.05:
        return "better" if sign * differences.mean() > 0 else "worse"
    low, high = interval(differences.to_numpy(), 0.9)
    return "level" if max(-low, high) < margin else "inconclusive"


def contrasts(table: pd.DataFrame, margin: float, sign: int, decimals: int) -> str:
    """Each side minus the Transformer's attention, tested; minus the wider Transformer, exploratory."""
    names = ["model", "value", "minus the Transformer (95 % CI)", "p, Holm", "verdict"]
    names += ["minus wider"] * (EXPLORATORY in table)
    lines = ["|".join(("", *names, "")), "|---" * len(names) + "|"]
    paired = {side: (table[side] - table[AGAINST]).dropna() for side in TESTED}
    adjusted = dict(zip(paired, holm([p_value(of.to_numpy()) for of in paired.values()]), strict=True))
    for side in (side for side in (SOURCE, AGAINST, EXPLORATORY, *TESTED) if side in table):
        cells = [name_of(side), f"{table[side].mean():.{decimals}f}", *[""] * (len(names) - 2)]
        if side in paired:
            low, high = interval(paired[side].to_numpy())
            cells[2] = f"{paired[side].mean():+.{decimals}f} ({low:+.{decimals}f} to {high:+.{decimals}f})"
            cells[3] = f"{adjusted[side]:.3f}"
            cells[4] = verdict(paired[side], adjusted[side], margin, sign)
            if EXPLORATORY in table:
                cells[5] = f"{(table[side] - table[EXPLORATORY]).mean():+.{decimals}f}"
        lines.append("|".join(("", *cells, "")))
    return "\n".join(lines)


if __name__ == "__main__":
    measured = read_rows(Path(__file__).with_name("measured.jsonl.gz")).only(setting="books")
    for outcome, (words, *how) in OUTCOMES.items():
        table = by_seed(measured, outcome)
        whole = table.loc[table[[AGAINST, *TESTED]].notna().all(axis=1)]
        table = table.loc[sorted({*whole.index, 0})]  # the source has seed 0 alone
        print(f"**{words}**, {len(whole)} seeds\n\n{contrasts(table, *how)}\n")
