"""Record the recall study, and make its tables and plot from the record. Usage: figures/study.py."""

import math
import sys
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean

from diff_transformer.lab.measures import Measure, Row, compared, metric, paired_rows, steps_to, trained
from diff_transformer.lab.recipes.recall import MATCHED, OWN_SCALE
from diff_transformer.lab.record import Cells, Record

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from plots import NAMES, matched_names, recall_charts  # noqa: E402  (beside this folder)
from rates import at_others, by_rate, difference  # noqa: E402
from recall.plan import (  # noqa: E402
    AS_IN_DEMO,
    CENTRE,
    CORE,
    EVERY_RATE,
    FURTHER_RATES,
    GRID,
    LEARNING_RATES,
    OTHERS,
    PAIR,
    RETRIED,
    SEEDS,
    SIDES,
    UNLEARNED,
    shortfall,
    stages,
)
from study import counted, study_command  # noqa: E402
from tables import corrected, exploratory, in_numbers, learning_rates, summary  # noqa: E402

SHOWN = NAMES | matched_names(MATCHED, OWN_SCALE)
SHOWN |= {side: f"{SHOWN[side.removesuffix('_7e-4')]}, at 7e-4" for side in RETRIED}
SIDE, BASELINES = "diff_norm1", ("softmax", "softmax_norm1")
GOAL = 0.9  # accuracy whose first step is an outcome
NEAR_CHANCE, NEAR_ONE = 0.05, 0.95  # accuracy above chance, and accuracy, that leave nothing to compare
ACCURACY = metric("recall", "accuracy", "higher", "accuracy at the end")


def steps_to_goal(record: Record) -> float:
    """The step at which the accuracy on held-out rows reaches ``GOAL``; the steps of the run if it never does."""
    return steps_to(record, "recall", GOAL)


STEPS = Measure("steps to 0.9, log2", lambda record: math.log2(steps_to_goal(record)), "lower")
# Its answer does not stand among earlier questions, as that of a key asked for again does.
FIRST = metric("recall", "first_question", "higher", "accuracy on the first question")
SECONDARY = (
    metric("recall", "accuracy_2x", "higher", "accuracy at twice the length"),
    metric("recall", "accuracy_4x", "higher", "accuracy at four times the length"),
    metric("recall", "answer", "higher", "attention on the answer, by head"),
    metric("recall", "noise", "lower", "attention on the noise, by head"),
    metric("recall", "answer_mean_map", "higher", "attention on the answer, mean map"),
    metric("recall", "noise_mean_map", "lower", "attention on the noise, mean map"),
)


def informative(cells: Cells, where: str, side: str, baseline: str, measure: Measure) -> bool:
    """The rule of the preregistration: whether ``where`` can tell the two sides apart."""
    both = [list(trained(cells[where].get(name, {})).values()) for name in (side, baseline)]
    if not all(both):
        return False
    if measure is STEPS:
        return any(steps_to_goal(record) < record.steps for records in both for record in records)
    chance = 1 / GRID[where][0]
    means = [fmean(record.metrics["recall"]["accuracy"] for record in records) for records in both]
    return not (max(means) <= chance + NEAR_CHANCE or min(means) >= NEAR_ONE)


def differences(cells: Cells, side: str, baseline: str, measure: Measure, places) -> dict[int, dict[str, float]]:
    """By seed and setting: ``measure`` of ``side`` less that of ``baseline``, in runs that did not diverge."""
    found: dict[int, dict[str, float]] = {}
    for where in places:
        ours, theirs = (trained(cells[where].get(name, {})) for name in (side, baseline))
        for seed in ours.keys() & theirs.keys():
            found.setdefault(seed, {})[where] = measure.read(ours[seed]) - measure.read(theirs[seed])
    return found


def over_grid(cells: Cells, side: str, baseline: str, measure: Measure) -> Row | None:
    """A measure over the informative settings of the grid, paired by seed. Only seeds with every one of them count."""
    places = _informative(cells, side, baseline, measure)
    found = differences(cells, side, baseline, measure, places)
    means = [fmean(by.values()) for _, by in sorted(found.items()) if len(by) == len(places)]
    if not means:
        return None
    both = [
        fmean(measure.read(record) for where in places for record in trained(cells[where][name]).values())
        for name in (baseline, side)
    ]
    return compared(f"{_named(side, baseline, measure)}, {len(places)} settings", *both, means, measure.better)


def slope(cells: Cells, side: str, baseline: str, measure: Measure) -> Row | None:
    """How the difference grows from one level of noise to the next, mean over pairs, by seed (least squares)."""
    levels = sorted({noise for _, noise in GRID.values()})
    slopes = []
    for by in differences(cells, side, baseline, measure, [w for w in GRID if w in cells]).values():
        if len(by) < len(GRID):
            continue
        points = [(levels.index(GRID[where][1]), value) for where, value in by.items()]
        centre = fmean(x for x, _ in points)
        slopes.append(sum((x - centre) * y for x, y in points) / sum((x - centre) ** 2 for x, _ in points))
    if not slopes:
        return None
    name = f"{_named(side, baseline, measure)}, change from one level of noise to the next"
    return compared(name, math.nan, math.nan, slopes, measure.better)


def _named(side: str, baseline: str, measure: Measure) -> str:
    return f"{SHOWN[side]} minus {SHOWN[baseline]}: {measure.name}"


def _informative(cells: Cells, side: str, baseline: str, measure: Measure) -> list[str]:
    return [where for where in GRID if where in cells and informative(cells, where, side, baseline, measure)]


def left_out(cells: Cells) -> str:
    """Which settings of the grid each test leaves out; "" before there is anything to compare."""
    if not primary(cells):
        return ""
    said: dict[tuple[str, ...], list[str]] = {}
    for baseline in BASELINES:
        for measure in (ACCURACY, STEPS):
            kept = _informative(cells, SIDE, baseline, measure)
            lost = tuple(where for where in GRID if where in cells and where not in kept)
            said.setdefault(lost, []).append(f"{measure.name} against the {SHOWN[baseline]}")
    lines = [f"{', '.join(lost) or 'none'} ({'; '.join(tests)})" for lost, tests in said.items()]
    return f"Settings left out by the rule of the plan: {'. '.join(lines)}."


def primary(cells: Cells) -> str:
    """The primary outcome; "" before there is anything to compare."""
    rows = [row for b in BASELINES for m in (ACCURACY, STEPS) if (row := over_grid(cells, SIDE, b, m))]
    if not rows:
        return ""
    head = f"**Primary outcome**, over the informative settings of the grid{_undecided(cells)}"
    tests = 2 * len(BASELINES)
    return f"{head}\n\n{summary(corrected(rows, tests), tests)}"


def further(cells: Cells) -> str:
    """The lines on the gain by noise, and on the first question alone."""
    parts = []
    if slopes := [row for b in BASELINES for m in (ACCURACY, STEPS) if (row := slope(cells, SIDE, b, m))]:
        parts += ["**Does the gain grow with noise?** (exploratory)", exploratory(slopes)]
    if first := [row for b in BASELINES if (row := over_grid(cells, SIDE, b, FIRST))]:
        parts += ["**On the first question alone** (exploratory)", exploratory(first)]
    return "\n\n".join(parts)


def tables(cells: Cells) -> str:
    """What stands between the README's markers."""
    parts = [progress(cells), primary(cells), left_out(cells), further(cells)]
    if any(where in cells for where in GRID):
        parts += ["![Accuracy while the models are trained](recall.svg)", by_noise(cells, SIDES)]
        parts += ["![The controls with 8 pairs](controls.svg)", every_rate(cells), around(cells), by_setting(cells)]
    parts.append(sweep(cells))
    return "\n\n".join(part for part in parts if part)


def findings(cells: Cells) -> str:
    """What findings has: the primary outcome, and the sides that tell norm and subtraction apart, by noise."""
    return "\n\n".join(part for part in (primary(cells), by_noise(cells, IN_FINDINGS)) if part)


IN_FINDINGS = ("softmax", "diff_norm1", "softmax_norm1", *OTHERS)


VARIED = {
    "distractors": "half of the noise are keys",
    "p8_n16": "16 noise tokens a pair",
    "p32_n2": "32 pairs",
    "noise16": "16 noise symbols",
    "layers4": "4 layers",
    "head8": "maps of width 8",
    "head32": "maps of width 32",
    "width128": "model width 128",
    "width256": "model width 256",
}


def around(cells: Cells) -> str:
    """``CENTRE`` and the settings around it: accuracy of the core sides, and DIFF's difference from the others."""
    names = [SHOWN[side] for side in CORE]
    less = [f"DIFF minus {SHOWN[baseline]}" for baseline in BASELINES]
    heads = (f"{CENTRE}, but", *names, *less, "4 times the length")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for where, words in {CENTRE: "nothing else", **VARIED}.items():
        runs = [list(trained(cells.get(where, {}).get(side, {})).values()) for side in CORE]
        if min(map(len, runs)) < len(SEEDS):
            continue
        rows = [row for b in BASELINES for row in paired_rows(cells, where, SIDE, [ACCURACY], b)]
        longer = " / ".join(f"{fmean(SECONDARY[1].read(record) for record in of):.2f}" for of in runs[:2])
        lines.append(
            f"| {' | '.join([words, *map(_in_short, runs), *(in_numbers(r.difference) for r in rows), longer])} |"
        )
    if len(lines) < 4:
        return ""
    head = f"**One factor at a time** (exploratory): accuracy (runs that reached {GOAL})"
    return f"{head}; the last column has Transformer / DIFF\n\n" + "\n".join(lines)


def by_noise(cells: Cells, sides: Iterable[str]) -> str:
    """``sides`` at the pairs of ``CENTRE``: mean accuracy over seeds, and the runs that reached ``GOAL``."""
    pairs = GRID[CENTRE][0]
    places = {where: noise for where, (count, noise) in GRID.items() if count == pairs and where in cells}
    heads = (f"{pairs} pairs, accuracy (reached {GOAL})", *(f"noise {noise}" for noise in places.values()))
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for side in sides:
        shown = [list(trained(cells[where].get(side, {})).values()) for where in places]
        if all(shown):
            lines.append(f"| {' | '.join([SHOWN[side], *map(_in_short, shown)])} |")
    if not places:
        return ""
    return "**With and without the subtraction, the norm, and both** (exploratory)\n\n" + "\n".join(lines)


def _in_short(runs: list[Record]) -> str:
    return f"{fmean(map(ACCURACY.read, runs)):.2f} ({reached(runs)})"


def reached(runs: list[Record]) -> str:
    """How many of the runs reached ``GOAL``."""
    return f"{sum(steps_to_goal(record) < record.steps for record in runs)} of {len(runs)}"


def own_rates(cells: Cells, places: list[str], side: str, baseline: str, measure: Measure = ACCURACY) -> Row | None:
    """``side`` less ``baseline``, both at the rates that the other seeds choose, over ``places``."""
    where = places[0] if len(places) == 1 else f"{len(places)} settings"
    what = "" if measure is ACCURACY else f"{measure.name}, "
    return difference(cells, places, (side, baseline), measure, f"{SHOWN[side]} minus {SHOWN[baseline]}: {what}{where}")


def every_rate(cells: Cells) -> str:
    """Every rate with every seed, and the differences at the rates that the other seeds choose."""
    rates = [f"{rate:g}" for rate in LEARNING_RATES]
    lines = [f"| | | {' | '.join(rates)} | at the rates of other seeds |", "|---" * (len(rates) + 3) + "|"]
    for where, sides in (*EVERY_RATE, AS_IN_DEMO):
        for side in sides:
            if runs := by_rate(cells, where, side):
                shown = [_in_short(list(of.values())) for of in runs.values()]
                lines.append(f"| {' | '.join([where, SHOWN[side], *shown, _in_short(at_others(runs))])} |")
    kept, reaching = (_informative(cells, SIDE, "softmax", measure) for measure in (ACCURACY, STEPS))
    around = [where for where, sides in EVERY_RATE if sides == PAIR and where not in GRID]
    of_published = [own_rates(cells, kept, *PAIR[::-1]), own_rates(cells, reaching, *PAIR[::-1], STEPS)]
    of_published += [own_rates(cells, [where], *PAIR[::-1]) for where in kept + around]
    best, *others = OTHERS
    harder = [where for where, sides in EVERY_RATE if sides == OTHERS]
    of_best = [own_rates(cells, [where], best, other) for where in harder for other in (*PAIR, *others)]
    if not any(of_published):
        return ""
    head = f"**Every rate, five seeds** (exploratory): accuracy (runs that reached {GOAL})"
    parts = [head, "\n".join(lines), "Differences at the rates of other seeds, in accuracy unless said otherwise:"]
    found = ([row for row in rows if row] for rows in (of_published, of_best))
    return "\n\n".join([*parts, *(exploratory(rows) for rows in found if rows)])


def core_runs(cells: Cells) -> int:
    """Finished runs of the core."""
    return sum(seed in cells.get(w, {}).get(s, {}) for seed in SEEDS for w in GRID for s in CORE)


def _undecided(cells: Cells) -> str:
    finished = core_runs(cells) == len(SEEDS) * len(GRID) * len(CORE)
    return "" if finished else ". The core is not finished, so nothing is decided"


def progress(cells: Cells) -> str:
    first, core, second, column, factors, further, retried, *rates = stages("none")
    parts = {
        "the sweep of the core sides": [first],
        "the core": [core],
        "the sweep of the other sides": [second],
        "the extension": [column, factors],
        "further rates": [further],
        "two controls at 7e-4": [retried],
        "every rate": rates,
    }
    return f"Finished: {counted(cells, parts)}{_undecided(cells)}."


def by_setting(cells: Cells) -> str:
    """A line a setting and side: means over seeds, and differences from the Transformer."""
    heads = (
        "setting",
        "side",
        "seeds",
        "accuracy",
        "difference from the Transformer",
        "reached 0.9",
        "steps to 0.9, ratio",
    )
    heads += tuple(measure.name for measure in SECONDARY)
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for where in [name for name in cells if name in GRID or name in VARIED]:
        for side in [name for name in SIDES if name in cells[where]]:
            runs = list(trained(cells[where][side]).values())
            rows = paired_rows(cells, where, side, [ACCURACY, STEPS]) if side != "softmax" else []
            compared = [in_numbers(rows[0].difference), f"{2 ** rows[1].difference.mean:.2f}"] if rows else ["", ""]
            shown = [f"{fmean(measure.read(record) for record in runs):.2f}" for measure in (ACCURACY, *SECONDARY)]
            line = [where, SHOWN[side], str(len(runs)), shown[0], compared[0], reached(runs), compared[1]]
            lines.append(f"| {' | '.join([*line, *shown[1:]])} |")
    return "\n".join(lines)


def _rates(side: str) -> int:
    return len(LEARNING_RATES) + (len(FURTHER_RATES) if side in UNLEARNED else 0)


def sweep(cells: Cells) -> str:
    """The learning rates tried for each side (one seed)."""
    title = f"**Learning rates** (accuracy at the end in {CENTRE}, one other seed)"
    return learning_rates(title, cells, {side: SHOWN[side] for side in SIDES}, "recall", shortfall, _rates)


PAGES = {HERE / "README.md": ("measured", tables), HERE.parents[1] / "docs" / "findings.md": ("recall", findings)}

if __name__ == "__main__":
    sys.exit(study_command(sys.argv[1:], HERE, PAGES, recall_charts, curves=("recall", "validation")))
