"""The desk study's training objective and its two halves, prose and needles: the tables of findings and of the study.

Half of every batch is prose, half is needle documents; the objective is the mean of the two losses. For each model this
script takes the training loss of both sources, averaged over the last 400 steps, and subtracts the
Transformer's of the same seed. Rows of needles are new in every batch, and so is the prose of a first epoch.

python figures/desk/objective.py          # write the tables from measured.json
python figures/desk/objective.py --check  # exit 1 if a page differs
"""

import sys
from pathlib import Path

from diff_transformer.lab.measures import late_loss
from diff_transformer.lab.record import Cells, Record, grouped, load_all
from diff_transformer.lab.stats import Interval, over_seeds
from diff_transformer.report.generated import filled, keep

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]

# Setting, side, the setting of its Transformer, what a reader calls it.
ROWS = (
    ("novels", "diff_same_rate", "novels", "DIFF, the Transformer's learning rate"),
    ("novels", "diff", "novels", "DIFF, its own learning rate"),
    ("novels", "diff_norm1", "novels", "DIFF as published (head norm initialised at 1)"),
    ("ablation", "softmax_norm", "novels", "Transformer + head norm"),
    ("ablation", "softmax_wide_norm", "novels", "the same, half as many heads, twice as wide"),
    ("ablation", "diff_no_norm", "novels", "DIFF without head norm"),
    ("wide", "diff", "wide", "DIFF, width 256"),
    ("wide", "softmax_norm", "wide", "Transformer + head norm, width 256"),
    ("long", "diff", "long", "DIFF, 4500 steps"),
    ("long", "softmax_norm", "long", "Transformer + head norm, 4500 steps"),
)
SHORT = (0, 1, 2, 3, 6)  # of these, the rows of docs/findings.md
PAGES = {HERE / "README.md": range(len(ROWS)), ROOT / "docs" / "findings.md": SHORT}


def losses(record: Record) -> tuple[float, float, float]:
    """Training loss on prose, on needles, and their mean, the objective; nats a token, over the last 400 steps."""
    prose, needles = (late_loss(record, name) for name in ("text", "needles"))
    return prose, needles, (prose + needles) / 2


def differences(cells: Cells, setting: str, side: str, home: str) -> tuple[list[Interval], int]:
    """Side less Transformer on prose, needles and objective, paired by seed, with the number of pairs."""
    ours, theirs = cells[setting][side], cells[home]["softmax"]
    seeds = sorted(ours.keys() & theirs.keys())
    pairs = [(losses(ours[seed]), losses(theirs[seed])) for seed in seeds]
    return [over_seeds([first[i] - second[i] for first, second in pairs]) for i in range(3)], len(seeds)


def table(cells: Cells, rows) -> str:
    lines = [
        "| difference from the Transformer, nats a token | prose | needles | objective | seeds |",
        "|---|---|---|---|---|",
    ]
    for setting, side, home, name in (ROWS[i] for i in rows):
        found, seeds = differences(cells, setting, side, home)
        shown = [f"{of.mean:+.3f} ({of.low:.3f} to {of.high:.3f})" for of in found]
        lines.append(f"| {name} | {' | '.join(shown)} | {seeds} |")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    cells = grouped(load_all(HERE / "measured.json"))
    made = {page: filled(page, {"objective": table(cells, rows)}) for page, rows in PAGES.items()}
    return keep(made, check=arguments == ["--check"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
