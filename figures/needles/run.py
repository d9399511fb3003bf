"""Record the needle study, and make its tables and plot from the record. Usage: figures/study.py."""

import math
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from diff_transformer.lab.measures import Measure, Row, metric, paired_rows, steps_to, trained
from diff_transformer.lab.record import Cells, Record

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from needles.plan import (  # noqa: E402  (beside this file)
    CELLS,
    LEARNING_RATES,
    LENGTHS,
    MATCHED,
    SEEDS,
    SETTING,
    SIDES,
    STAGES,
    shortfall,
    stages,
)
from plots import NAMES, matched_names, needle_charts  # noqa: E402
from recall.plan import CORE  # noqa: E402
from study import counted, study_command  # noqa: E402
from tables import corrected, exploratory, in_numbers, learning_rates, summary  # noqa: E402

SHOWN = NAMES | matched_names(MATCHED)
SIDE, BASELINES = "diff_norm1", ("softmax", "softmax_norm1")
TESTS = 2 * len(BASELINES)  # of the primary outcome
GOAL = 0.9  # accuracy whose first step is an outcome
LEARNED = 0.1  # nats a token; naming one of a row's numbers at random costs 1.2
SEVERAL = ((4, 2), (6, 2), (8, 1))  # cells of the primary outcome


def several(record: Record) -> float:
    """The mean accuracy over the cells with several needles, at the length of training."""
    return fmean(record.metrics["needle"][f"n{n}_r{r}_len{LENGTHS[0]}"] for n, r in SEVERAL)


def steps(record: Record) -> float:
    """The step at which the accuracy on held-out needle rows reaches ``GOAL``; those of the run if it never does."""
    return steps_to(record, "needles", GOAL)


ACCURACY = Measure("accuracy, several needles", several, "higher")
STEPS = Measure("steps to 0.9, log2", lambda record: math.log2(steps(record)), "lower")
ATTENTION = (
    metric("allocation", "answer", "higher", "attention on the answer, by head"),
    metric("allocation", "noise", "lower", "attention on the noise, by head"),
    metric("allocation", "answer_mean_map", "higher", "attention on the answer, mean map"),
    metric("allocation", "noise_mean_map", "lower", "attention on the noise, mean map"),
)


def cell(needles: int, asked: int, length: int) -> Measure:
    return metric("needle", f"n{needles}_r{asked}_len{length}", "higher", f"({needles}, {asked})")


def primary(cells: Cells) -> str:
    """The primary outcome; "" before there is anything to compare."""
    found = [compared(cells, SIDE, baseline) for baseline in BASELINES]
    rows, untested = ([each for pair in found for each in pair[i]] for i in range(2))
    if not rows:
        return ""
    undecided = "" if core_runs(cells) == len(SEEDS) * len(CORE) else ". The core is not finished: nothing is decided"
    return "\n\n".join([f"**Primary outcome**{undecided}", summary(corrected(rows, TESTS), TESTS), *untested])


def compared(cells: Cells, side: str, baseline: str) -> tuple[list[Row], list[str]]:
    """Both outcomes of a side less a baseline's, and what has no test."""
    name = f"{SHOWN[side]} minus {SHOWN[baseline]}"
    steps_decide = reached(cells, side) + reached(cells, baseline)
    rows = paired_rows(cells, SETTING, side, [ACCURACY, STEPS] if steps_decide else [ACCURACY], baseline)
    untested = [] if steps_decide else [f"{name}: no run of either side reached {GOAL}, so the steps have no test."]
    return [replace(row, measure=f"{name}: {row.measure}") for row in rows], untested


# (side, what it is compared with), by the part of the later sides: see the preregistration and README
LATER = {
    "Other starts of the head norm": [
        ("diff", "softmax"),
        ("diff_matched", "softmax"),
        ("diff_matched", "softmax_norm_matched"),
    ],
    "The other sides": [
        ("diff_norm1", "diff_lambda0"),
        ("diff_norm1", "softmax_wide_norm1"),
        ("diff", "softmax_norm"),
        ("diff_v2", "softmax"),
    ],
}


def later(cells: Cells) -> str:
    """Both outcomes of the later sides that have run."""
    parts: list[str] = []
    for name, pairs in LATER.items():
        found = [compared(cells, *pair) for pair in pairs if all(side in cells.get(SETTING, {}) for side in pair)]
        rows, untested = ([each for pair in found for each in pair[i]] for i in range(2))
        parts += [f"**{name}** (exploratory)", exploratory(rows), *untested] if rows else []
    return "\n\n".join(parts)


def reached(cells: Cells, side: str) -> int:
    """Runs of a side that reached ``GOAL``."""
    runs = trained(cells.get(SETTING, {}).get(side, {})).values()
    return sum(steps(record) < record.steps for record in runs)


def tables(cells: Cells) -> str:
    """What stands between the README's markers."""
    parts = [progress(cells), primary(cells), later(cells)]
    if SETTING in cells:
        parts += [
            "![Accuracy while training, and by depth](needles.svg)",
            binding(cells),
            by_cell(cells),
            attention(cells),
        ]
    title = "**Learning rates** (accuracy at the end on held-out needle rows, one other seed)"
    parts.append(learning_rates(title, cells, {side: SHOWN[side] for side in SIDES}, "needles", shortfall, _rates))
    return "\n\n".join(part for part in parts if part)


def _rates(side: str) -> int:
    return len(LEARNING_RATES)


def core_runs(cells: Cells) -> int:
    """Finished runs of the core."""
    return sum(seed in cells.get(SETTING, {}).get(side, {}) for seed in SEEDS for side in CORE)


def progress(cells: Cells) -> str:
    names = [name for part in STAGES for name in (f"the sweep of {part}", part)]
    parts = {name: [stage] for name, stage in zip(names, stages("none"), strict=True)}
    return f"Finished: {counted(cells, parts)}."


def binding(cells: Cells) -> str:
    """Which tasks each side learns, and when it tells needles apart."""
    heads = (
        "side",
        "seeds",
        "pairs learned",
        "clauses learned",
        "accuracy on held-out rows",
        "difference from the Transformer",
    )
    heads += (f"reached {GOAL}", f"steps to {GOAL}")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    final = Measure("final", lambda record: record.curves["needles"]["accuracy"][-1], "higher")
    for side, runs in _sides(cells):
        arrived = [steps(record) for record in runs if steps(record) < record.steps]
        rows = paired_rows(cells, SETTING, side, [final]) if side != "softmax" else []
        shown = [
            SHOWN[side],
            str(len(runs)),
            *(f"{sum(learned(record, source) for record in runs)} of {len(runs)}" for source in ("pairs", "clauses")),
            f"{fmean(map(final.read, runs)):.3f}",
            in_numbers(rows[0].difference) if rows else "",
            f"{len(arrived)} of {len(runs)}",
            ", ".join(f"{step:.0f}" for step in arrived),
        ]
        lines.append(f"| {' | '.join(shown)} |")
    return "\n".join(lines)


def learned(record: Record, source: str) -> bool:
    """Whether the loss of a source was below ``LEARNED`` between two validations."""
    return any(loss is not None and loss < LEARNED for loss in record.curves["sources"][source])


def by_cell(cells: Cells) -> str:
    """Table 2 and the cell of Figure 5 at both lengths: means over seeds, and differences from the Transformer."""
    lines = ["| side | tokens | " + " | ".join(f"({n}, {r})" for n, r in CELLS) + " |", "|---" * (len(CELLS) + 2) + "|"]
    for side, runs in _sides(cells):
        for length in LENGTHS:
            measures = [cell(n, r, length) for n, r in CELLS]
            rows = paired_rows(cells, SETTING, side, measures) if side != "softmax" else []
            shown = [f"{fmean(measure.read(record) for record in runs):.2f}" for measure in measures]
            if rows:
                shown = [f"{mean}; {in_numbers(row.difference)}" for mean, row in zip(shown, rows, strict=True)]
            lines.append(f"| {' | '.join([SHOWN[side], str(length), *shown])} |")
    head = "**Table 2 and the cell of Figure 5**: (needles, cities asked for); then the difference from the Transformer"
    return head + "\n\n" + "\n".join(lines)


def attention(cells: Cells) -> str:
    """Table 3 on models that retrieve: shares of the attention in prompts with four needles."""
    lines = [f"| side | {' | '.join(measure.name for measure in ATTENTION)} |", "|---" * (len(ATTENTION) + 1) + "|"]
    for side, runs in _sides(cells):
        rows = paired_rows(cells, SETTING, side, list(ATTENTION)) if side != "softmax" else []
        shown = [f"{fmean(measure.read(record) for record in runs):.3f}" for measure in ATTENTION]
        if rows:
            shown = [f"{mean}; {in_numbers(row.difference)}" for mean, row in zip(shown, rows, strict=True)]
        lines.append(f"| {' | '.join([SHOWN[side], *shown])} |")
    return "**Table 3**, prompts with 4 needles\n\n" + "\n".join(lines)


def _sides(cells: Cells):
    """(side, its runs that did not diverge), in the order of the plan."""
    for side in SIDES:
        if runs := list(trained(cells[SETTING].get(side, {})).values()):
            yield side, runs


PAGES = {HERE / "README.md": ("measured", tables), HERE.parents[1] / "docs" / "findings.md": ("needles", primary)}

if __name__ == "__main__":
    sys.exit(study_command(sys.argv[1:], HERE, PAGES, needle_charts, curves=("needles", "sources", "validation")))
