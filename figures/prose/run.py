"""Record the prose study, and make its tables from the record. Usage: figures/study.py."""

import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np

from diff_transformer.lab.measures import Measure, Row, late_loss, metric, paired_rows, tokens_to_equal_loss, trained
from diff_transformer.lab.record import Cells, Record
from diff_transformer.lab.stats import over_seeds_and_examples

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from plots import NAMES  # noqa: E402  (beside this folder)
from prose.plan import MIXED, MIXED_RATES, MIXED_SIDES, RAISED, SEEDS, SIDES, SIZES, rates_of, stages  # noqa: E402
from rates import at_others, averaged, by_rate  # noqa: E402
from study import counted, study_command  # noqa: E402
from tables import corrected, exploratory, in_numbers, interval, summary  # noqa: E402

LOSS = metric("associative_recall", "validation", "lower", "held-out loss")
HALVES = [Measure(name, lambda record, name=name: late_loss(record, name), "lower") for name in ("text", "needles")]
OBJECTIVE = Measure("objective", lambda record: fmean(half.read(record) for half in HALVES), "lower")
BASELINES = ("softmax", "softmax_norm")
STRETCH = 16  # rows of held-out text whose mean loss is kept; 512 rows of 30 books make 32 stretches
AGAIN = "small, each side at its best rate of the wider sweep (exploratory)"


def tables(cells: Cells) -> str:
    """What stands between the README's markers."""
    found = primary(cells)
    parts = [progress(cells), *([found] if found else []), *(by_side(cells, size) for size in SIZES if size in cells)]
    if finished(cells, "small_higher", RAISED):
        parts.append(by_side({AGAIN: cells["small"] | cells["small_higher"]}, AGAIN))
    parts.append(together(cells))
    return "\n\n".join([*filter(None, parts), sweep(cells)])


def primary(cells: Cells) -> str:
    """The tests of the sizes that are finished, corrected for those of all sizes."""
    tests = [
        replace(row, measure=f"{NAMES['diff']} minus {NAMES[baseline]}, {size}")
        for size in SIZES
        if finished(cells, size)
        for baseline in BASELINES
        for row in paired_rows(cells, size, "diff", [LOSS], baseline)
    ]
    if not tests:
        return ""
    count = len(SIZES) * len(BASELINES)
    shown = summary(corrected(tests, count), count)
    return f"**Primary outcome**, nats a token\n\n{shown}"


def finished(cells: Cells, setting: str, sides: Iterable[str] = SIDES) -> bool:
    return all(set(SEEDS) <= cells.get(setting, {}).get(side, {}).keys() for side in sides)


def progress(cells: Cells) -> str:
    small_sweep, small, medium_sweep, medium, higher, raised, *together = stages("none")
    parts = {
        "the sweep of the small size": [small_sweep],
        "the small size": [small],
        "the sweep of the medium size": [medium_sweep],
        "the medium size": [medium],
        "higher rates": [higher],
        "two sides at 0.016": [raised],
        "prose and needles together": together,
    }
    undecided = "" if all(finished(cells, size) for size in SIZES) else " A size that is not finished decides nothing."
    return f"Finished: {counted(cells, parts)}.{undecided}"


def by_side(cells: Cells, size: str) -> str:
    """A line a side: mean loss, and differences from the Transformer."""
    heads = (
        "side",
        "seeds",
        "held-out loss",
        "difference from the Transformer",
        "on books, difference",
        "tokens to its loss",
    )
    lines = [f"**{size}**", "", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    base = trained(cells[size].get("softmax", {}))
    for side in [name for name in SIDES if name in cells[size]]:
        runs = trained(cells[size][side])
        both = sorted(runs.keys() & base.keys())
        compared = ["", "", ""]
        if side != "softmax" and len(both) > 1:
            (row,) = paired_rows(cells, size, side, [LOSS])
            over_books = over_text(*([of[k] for k in both] for of in (runs, base)))
            shares = [tokens_to_equal_loss(runs[k], base[k]) for k in both]
            reached = [share for share in shares if share is not None]
            share = f"{fmean(reached):.2f} ({len(reached)} of {len(shares)})" if reached else "never"
            compared = [in_numbers(row.difference), over_books, share]
        mean = f"{fmean(LOSS.read(record) for record in runs.values()):.3f}"
        lines.append(f"| {' | '.join([NAMES[side], str(len(runs)), mean, *compared])} |")
    return "\n".join(lines)


def repeated(cells: Cells) -> str:
    """The primary outcome on prose and needles together, at the first rate; empty until its runs are there."""
    runs = at_one_rate(cells, MIXED_RATES[0])
    if not runs:
        return ""
    tests = corrected(tested(runs))
    title = f"**Prose and needles together**, nats a token, every side at {MIXED_RATES[0]:g}"
    return f"{title}\n\n{summary(tests, len(tests))}"


def together(cells: Cells) -> str:
    """Prose and needles together at every rate that is finished, and at the rates that the other seeds choose."""
    found = {f"{rate:g}": runs for rate in sorted(MIXED_RATES) if (runs := at_one_rate(cells, rate))}
    parts = [repeated(cells)]
    by_side = {side: by_rate(cells, MIXED, side, MIXED_RATES) for side in MIXED_SIDES}
    if all(by_side.values()):
        own = {side: at_others(runs, OBJECTIVE.read) for side, runs in by_side.items()}
        parts += ["At the rates that the other seeds choose (exploratory):", exploratory(tested(own))]
        found["of other seeds"] = own
    return "\n\n".join([*parts, by_rate_and_side(found)]) if parts[0] else ""


def at_one_rate(cells: Cells, rate: float) -> dict[str, list[Record]]:
    """The runs of each side on prose and needles together, in the order of the seeds; empty if one is missing."""
    sides = {side: by_rate(cells, MIXED, side, [rate]) for side in MIXED_SIDES}
    return {side: [runs[rate][seed] for seed in SEEDS] for side, runs in sides.items()} if all(sides.values()) else {}


def tested(runs: dict[str, list[Record]]) -> list[Row]:
    """The tests of the primary outcome on prose and needles together."""
    return [
        averaged([runs["diff"]], [runs[base]], measure, f"{NAMES['diff']} minus {NAMES[base]}: {measure.name}")
        for measure in (OBJECTIVE, LOSS)
        for base in BASELINES
    ]


def by_rate_and_side(found: dict[str, dict[str, list[Record]]]) -> str:
    """A line a rate and side: differences from the Transformer in losses, and accuracy on needles."""
    heads = ("rate", "side", "objective", "difference from the Transformer: objective", "prose", "needles")
    heads += ("held-out prose, over seeds and text", "512 tokens of each book, over seeds and books")
    heads += ("1 needle", "2", "4")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for rate, runs in found.items():
        for side, ours in runs.items():
            theirs, less = runs["softmax"], [""] * 5
            if side != "softmax":
                tests = [averaged([ours], [theirs], measure, "") for measure in (OBJECTIVE, *HALVES)]
                less = [*map(interval, tests), over_text(ours, theirs, "associative_recall"), over_text(ours, theirs)]
            needles = [f"{fmean(record.metrics['needle'][f'n{n}_r1'] for record in ours):.2f}" for n in (1, 2, 4)]
            objective = f"{fmean(map(OBJECTIVE.read, ours)):.3f}"
            lines.append(f"| {' | '.join([rate, NAMES[side], objective, *less, *needles])} |")
    return "\n".join(lines)


def of_rows(record: Record, experiment: str = "long_nll") -> np.ndarray:
    """The loss on each book, or on each stretch of the held-out text."""
    return np.array([row["loss"] for row in record.rows[experiment]])


def over_text(ours: list[Record], theirs: list[Record], experiment: str = "long_nll") -> str:
    """Our losses less theirs, with the interval over seeds and the text together."""
    both = ([of_rows(record, experiment) for record in of] for of in (ours, theirs))
    return in_numbers(over_seeds_and_examples(*both)[0])


def sweep(cells: Cells) -> str:
    """The learning rates tried for each side (one seed)."""
    lines = []
    for size in SIZES:
        found = {rate: cells.get(f"sweep/{size}_lr{rate:g}", {}) for rate in rates_of(size, BASELINES[0])}
        if not any(found.values()):
            continue
        lines += ["", f"**Learning rates, {size}** (validation loss at the end, one other seed)", ""]
        lines += [f"| | {' | '.join(f'{rate:g}' for rate in found)} |", "|---" * (len(found) + 1) + "|"]
        for side in SIDES:
            runs = [next(iter(found[rate].get(side, {}).values()), None) for rate in found]
            losses = {i: record.final_loss for i, record in enumerate(runs) if record and not record.diverged}
            shown = [f"{losses[i]:.3f}" if i in losses else "diverged" if runs[i] else "" for i in range(len(runs))]
            best = min(losses, key=losses.__getitem__, default=None)
            if len(losses) == len(rates_of(size, side)) and best in (min(losses), max(losses)):
                shown[best] += " (best, at the edge)"
            lines.append(f"| {NAMES[side]} | {' | '.join(shown)} |")
    return "\n".join(lines).strip()


def kept_rows(record: Record) -> dict:
    """What ``measured.json`` keeps of the rows: the loss on each book and, with needles, on each stretch of text.

    A restored record has both already.
    """
    books, held_out = record.rows.get("long_nll", []), record.rows.get("associative_recall", [])
    found = {"long_nll": [row["loss"] if "loss" in row else sum(row["sums"]) / sum(row["counts"]) for row in books]}
    if record.setting.startswith(MIXED):
        losses = [row["loss"] for row in held_out]
        rows = STRETCH if held_out and "row" in held_out[0] else 1
        found["associative_recall"] = [fmean(losses[i : i + rows]) for i in range(0, len(losses), rows)]
    return {name: [{"loss": round(loss, 5)} for loss in losses] for name, losses in found.items() if losses}


def outcomes(cells: Cells) -> str:
    """What findings has."""
    return "\n\n".join(filter(None, [primary(cells), repeated(cells)]))


PAGES = {
    HERE / "README.md": ("measured", tables),
    HERE.parents[1] / "docs" / "findings.md": ("prose", outcomes),
}

if __name__ == "__main__":
    sys.exit(study_command(sys.argv[1:], HERE, PAGES, lambda cells: {}, rows=kept_rows))
