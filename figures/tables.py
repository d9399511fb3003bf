"""Tables of paired differences, in Markdown."""

from collections.abc import Callable
from dataclasses import replace
from statistics import stdev

from diff_transformer.lab.measures import Row, after_holm, decided
from diff_transformer.lab.record import Cells, Record
from diff_transformer.lab.stats import Interval, holm

MARKS = {"held": "✓ ", "did not hold": "✗ "}
WORDS = {"held": "better in DIFF", "did not hold": "worse in DIFF", "undecided": "undecided"}


def table(title: str, rows: list[Row]) -> str:
    lines = [
        f"**{title}** ({rows[0].seeds} pair{'s' * (rows[0].seeds > 1)})",
        "",
        "| | Transformer | DIFF | difference | claim |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(f"| {row.measure} | {row.baseline:.3f} | {row.side:.3f} | {interval(row)} | {decided(row)} |")
    said = after_holm(rows)
    return "\n".join([*lines, "", said] if said else lines)


def side_by_side(found: dict[str, list[Row]]) -> str:
    """``found``: by the name of a column, the rows of one model against the same Transformer."""
    heads = ["", "Transformer"]
    for name in found:
        heads += [name, "difference from the Transformer"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for rows in zip(*found.values(), strict=True):
        shown = [rows[0].measure, f"{rows[0].baseline:.3f}"]
        for row in rows:
            shown += [f"{row.side:.3f}", f"{MARKS.get(row.verdict, '')}{interval(row)}"]
        lines.append(f"| {' | '.join(shown)} |")
    return "\n".join(lines)


def interval(row: Row) -> str:
    return in_numbers(row.difference)


def in_numbers(found: Interval) -> str:
    mean, low, high, _ = found
    return f"{mean:+.3f}" if low is None else f"{mean:+.3f} ({low:+.3f} to {high:+.3f})"


def in_short(rows: list[Row]) -> str:
    """Which of the claims held, in a line; empty where no row has a claim."""
    said: dict[str, list[str]] = {}
    for row in rows:
        same = row.difference.low == row.difference.high == 0
        if row.verdict:
            said.setdefault("the same in every pair" if same else WORDS[row.verdict], []).append(row.measure)
    order = [*WORDS.values(), "the same in every pair"]
    return "; ".join(f"{words}: {', '.join(said[words])}" for words in order if words in said)


def corrected(rows: list[Row], tests: int | None = None) -> list[Row]:
    """The rows with p-values after Holm's correction; a verdict needs one of at most 0.05.

    ``tests``: how many the correction is over, by default the rows; those that have not run count with p = 1.
    """
    p_values = [row.p_value for row in rows]
    adjusted = holm(p_values + [1.0] * ((tests or len(rows)) - len(rows)))
    return [
        replace(row, p_value=p, verdict=row.verdict if p <= 0.05 else "undecided")
        for row, p in zip(rows, adjusted[: len(rows)], strict=True)
    ]


def summary(rows: list[Row], tests: int) -> str:
    """A line a row of ``corrected``: its difference, effect size d (the difference over its standard deviation between
    seeds, Cohen's d of paired samples), p-value, verdict, and how many seeds would decide it in half of all cases.

    The side and the number of seeds stand in the head if all rows have the same.
    """
    return _summary(rows, "p after Holm", "verdict", {}, tests)


def exploratory(rows: list[Row]) -> str:
    """The same without a correction, and so without a verdict: on which side of 0 the interval lies."""
    return _summary(rows, "p, not corrected", "interval", {"held": "on DIFF's side", "did not hold": "against DIFF"}, 1)


def _summary(rows: list[Row], p: str, head: str, words: dict[str, str], tests: int) -> str:
    sides, seeds = {row.measure.partition(" minus ")[0] for row in rows}, {row.seeds for row in rows}
    side = sides.pop() if len(sides) == 1 else ""
    said = f", {seeds.pop()} seeds" if len(seeds) == 1 else ""
    lines = [f"| {side} | difference (95 % CI{said}) | d | {p} | {head} |", "|---" * 5 + "|"]
    for row in rows:
        p_value = f"{row.p_value:.3f}" if row.p_value >= 0.0005 else "< 0.001"
        difference = interval(row) if said else f"{interval(row)}, {row.seeds} seeds"
        verdict, power = words.get(row.verdict, row.verdict), row.power(tests)
        verdict += f"; needs {power} seeds" if power else ""
        spread = stdev(row.differences) if len(row.differences) > 1 else 0.0
        d = f"{row.difference.mean / spread:+z.1f}" if spread else ""
        lines.append(f"| {row.measure.removeprefix(side).strip()} | {difference} | {d} | {p_value} | {verdict} |")
    return "\n".join(lines)


def learning_rates(
    title: str,
    cells: Cells,
    names: dict[str, str],
    curve: str,
    score: Callable[[Record], float],
    planned: Callable[[str], int],
) -> str:
    """The final accuracy of each side at each learning rate of a sweep (``sweep/lrRATE``, one seed).

    Args:
        names: of the sides, in the order of the lines.
        curve: of a record, with its accuracies.
        score: what the sweep minimises.
        planned: the number of rates of a side. That the best lies at the edge is said once all have run.
    """
    found = {name.removeprefix("sweep/lr"): sides for name, sides in cells.items() if name.startswith("sweep/")}
    rates = sorted(found, key=float)
    lines = [title, "", f"| | {' | '.join(rates)} |", "|---" * (len(rates) + 1) + "|"]
    for side, name in names.items():
        runs = [found[rate].get(side, {}) for rate in rates]
        if any(runs):
            shown = [next((_final(record, curve) for record in by.values()), "") for by in runs]
            known = {i: score(record) for i, by in enumerate(runs) for record in by.values() if not record.diverged}
            best = min(known, key=known.__getitem__, default=None)
            if len(known) == planned(side) and best in (min(known), max(known)):
                shown[best] += " (best, at the edge)"
            lines.append(f"| {name} | {' | '.join(shown)} |")
    return "\n".join(lines) if rates else ""


def _final(record: Record, curve: str) -> str:
    return "diverged" if record.diverged else f"{record.curves[curve]['accuracy'][-1]:.2f}"
