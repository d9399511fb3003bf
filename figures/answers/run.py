"""Record the answer study, and make its tables from the record. Usage: figures/study.py."""

import sys
from pathlib import Path
from statistics import fmean

from diff_transformer.lab.measures import Measure, Row, compared, metric, trained
from diff_transformer.lab.recipes.recall import MATCHED, OWN_SCALE
from diff_transformer.lab.record import Cells, Record

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from answers.plan import GROUNDED, LONGER, SHOTS, SIDES, TIMES, longer, stages  # noqa: E402  (beside this file)
from plots import NAMES, matched_names  # noqa: E402
from rates import at_others, by_rate, difference  # noqa: E402
from recall.plan import LEARNING_RATES, shortfall  # noqa: E402
from study import counted, study_command  # noqa: E402
from tables import corrected, exploratory, learning_rates, summary  # noqa: E402

SHOWN = NAMES | matched_names(MATCHED, OWN_SCALE)
SIDE, BASELINES = "diff_matched", ("softmax", "softmax_norm_own_scale")
NEAR_CHANCE, NEAR_ONE = 0.05, 0.95  # above chance, and in all, what leaves nothing to compare
RETRIEVES = 0.9  # of the values that are there


def of_recall(name: str):
    """Reads a metric of a record's recall."""
    return lambda record: record.metrics["recall"][name]


def grounded_accuracy(record: Record) -> float:
    """Mean of the accuracy where there is an answer and of the share of "none" where there is none."""
    return (of_recall("answerable")(record) + 1 - of_recall("hallucinated")(record)) / 2


GROUNDED_ACCURACY = Measure("grounded accuracy", grounded_accuracy, "higher")
ON_SHOTS = metric("recall", "accuracy", "higher", "accuracy on shots")
TASKS = {"grounded": (GROUNDED, GROUNDED_ACCURACY), "shots": (SHOTS, ON_SHOTS)}
TESTS = len(TASKS) * len(BASELINES)  # of the primary outcome


def informative(cells: Cells, where: str, baseline: str, measure: Measure) -> bool:
    """The rule of the preregistration: whether ``where`` can tell ``SIDE`` and ``baseline`` apart."""
    both = [list(trained(cells.get(where, {}).get(name, {})).values()) for name in (SIDE, baseline)]
    if not all(both):
        return False
    chance = 0.5 if measure is GROUNDED_ACCURACY else of_recall("chance")(both[0][0])
    means = [fmean(map(measure.read, records)) for records in both]
    return not (max(means) <= chance + NEAR_CHANCE or min(means) >= NEAR_ONE)


def tested(cells: Cells, task: str, baseline: str) -> tuple[Row | None, list[str]]:
    """``SIDE`` less ``baseline``, averaged over the informative settings of a task by seed, and those left out."""
    settings, measure = TASKS[task]
    places = [where for where in settings if informative(cells, where, baseline, measure)]
    lost = [where for where in settings if where in cells and where not in places]
    runs = [[trained(cells[where][name]) for where in places] for name in (SIDE, baseline)]
    seeds = sorted(set.intersection(*(set(of) for side in runs for of in side))) if places else []
    if not seeds:
        return None, lost
    ours, theirs = ([fmean(measure.read(of[seed]) for of in side) for seed in seeds] for side in runs)
    name = f"{SHOWN[SIDE]} minus {SHOWN[baseline]}: {measure.name}, {len(places)} settings"
    by_seed = [a - b for a, b in zip(ours, theirs, strict=True)]
    return compared(name, fmean(theirs), fmean(ours), by_seed, measure.better), lost


def primary(cells: Cells) -> str:
    """The primary outcome; "" before there is anything to compare."""
    found = {(task, baseline): tested(cells, task, baseline) for task in TASKS for baseline in BASELINES}
    rows = [row for row, _ in found.values() if row]
    if not rows:
        return ""
    lost = [f"{', '.join(lost)} (against the {SHOWN[b]})" for (_, b), (_, lost) in found.items() if lost]
    out = f"Settings left out by the rule of the plan: {'; '.join(lost) or 'none'}."
    return "\n\n".join(["**Primary outcome**", summary(corrected(rows, TESTS), TESTS), out])


def table(title: str, cells: Cells, settings, columns: dict) -> str:
    """A line a setting and side; ``columns``: what each shows of the runs, by name."""
    lines = [f"| setting | side | {' | '.join(columns)} |", "|---" * (len(columns) + 2) + "|"]
    for where in settings:
        for side in SIDES:
            runs = list(trained(cells.get(where, {}).get(side, {})).values())
            if runs:
                lines.append(f"| {where} | {SHOWN[side]} | {' | '.join(show(runs) for show in columns.values())} |")
    return f"{title}\n\n" + "\n".join(lines) if len(lines) > 2 else ""


def mean(name: str):
    """Shows the mean of a metric over the runs that have it."""

    def show(runs: list[Record]) -> str:
        values = [run.metrics["recall"][name] for run in runs if name in run.metrics["recall"]]
        return f"{fmean(values):.2f}" if values else ""

    return show


def retrieving(runs: list[Record]) -> list[Record]:
    """The runs that find what is there."""
    return [run for run in runs if of_recall("answerable")(run) >= RETRIEVES]


def and_longer(name: str):
    """Shows a metric, and in parentheses the same at twice the length of training."""
    return lambda runs: f"{mean(name)(runs)} ({mean(f'{name}_2x')(runs)})" if runs else ""


def solving(runs: list[Record]) -> list[Record]:
    return [run for run in runs if of_recall("accuracy")(run) >= RETRIEVES]


def solved(runs: list[Record]) -> str:
    """How many runs end with nine tenths of the questions right."""
    return f"{len(solving(runs))} of {len(runs)}"


def grounded_table(cells: Cells) -> str:
    return table(
        "**Questions without an answer** (means over seeds, exploratory)",
        cells,
        GROUNDED,
        {
            "grounded accuracy": lambda runs: f"{fmean(map(grounded_accuracy, runs)):.2f}",
            "right where there is an answer (twice the length)": and_longer("answerable"),
            "hallucinated (twice the length)": and_longer("hallucinated"),
            f"runs that find {RETRIEVES}": lambda runs: f"{len(retrieving(runs))} of {len(runs)}",
            "of them: right": lambda runs: and_longer("answerable")(retrieving(runs)),
            "of them: hallucinated": lambda runs: and_longer("hallucinated")(retrieving(runs)),
        },
    )


def shots_table(cells: Cells) -> str:
    return table(
        "**Labelled examples** (means over seeds, exploratory)",
        cells,
        SHOTS,
        {
            "accuracy": mean("accuracy"),
            "chance": mean("chance"),
            f"runs that reach {RETRIEVES}": solved,
            **{f"{n} of a class": mean(f"shots{n}") for n in (1, 2, 4)},
            "new form": mean("new_form"),
            "changes with the order": mean("order_flips"),
        },
    )


def every_rate(cells: Cells) -> str:
    """Every rate with every seed, also with more steps, and the differences at the rates that other seeds choose."""
    parts = []
    for task, (settings, measure) in TASKS.items():
        more = [longer(where) for where in LONGER if where in settings]
        rates = [f"{rate:g}" for rate in LEARNING_RATES]
        heads = ("setting", "side", *rates, "at the rates of other seeds")
        if task == "grounded":
            heads += ("there: right where there is an answer", "hallucinated")
        lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
        for where in (*settings, *more):
            for side in SIDES:
                if runs := by_rate(cells, where, side):
                    own = at_others(runs)
                    shown = [_in_short(measure, list(of.values())) for of in runs.values()]
                    shown += [_in_short(measure, own)]
                    shown += [mean(name)(own) for name in ("answerable", "hallucinated") if task == "grounded"]
                    lines.append(f"| {' | '.join([where, SHOWN[side], *shown])} |")
        if len(lines) > 2:
            parts += [f"{measure.name.capitalize()} (runs that reach {RETRIEVES})", "\n".join(lines)]
    if not parts:
        return ""
    head = f"**Every rate, five seeds** (exploratory); in settings that end in x{TIMES}, {TIMES} times the steps"
    rows = [row for task in TASKS for baseline in BASELINES if (row := own_rates(cells, task, baseline))]
    if rows:
        parts += ["Differences at the rates of other seeds:", exploratory(rows)]
    return "\n\n".join([head, *parts])


def own_rates(cells: Cells, task: str, baseline: str) -> Row | None:
    """A test of the primary outcome again, at the rates that the other seeds choose."""
    settings, measure = TASKS[task]
    places = [where for where in settings if informative(cells, where, baseline, measure)]
    name = f"{SHOWN[SIDE]} minus {SHOWN[baseline]}: {measure.name}, {len(places)} settings"
    return difference(cells, places, (SIDE, baseline), measure, name)


def _in_short(measure: Measure, runs: list[Record]) -> str:
    reach = (retrieving if measure is GROUNDED_ACCURACY else solving)(runs)
    return f"{fmean(map(measure.read, runs)):.2f} ({len(reach)} of {len(runs)})"


def sweeps(cells: Cells) -> str:
    """The learning rates tried for each task (one seed)."""
    parts = []
    for task, (settings, _) in TASKS.items():
        mine = {k.replace(f"{task}_", ""): of for k, of in cells.items() if k.startswith(f"sweep/{task}_")}
        title = f"**Learning rates** (accuracy at the end in {next(iter(settings))}, one other seed)"
        names = {side: SHOWN[side] for side in SIDES}
        parts.append(learning_rates(title, mine, names, "recall", shortfall, lambda _: len(LEARNING_RATES)))
    return "\n\n".join(part for part in parts if part)


def progress(cells: Cells) -> str:
    first, grounded, second, shots, *rates = stages("none")
    more = set(map(longer, LONGER))
    parts = {
        "the sweep of grounded": [first],
        "grounded": [grounded],
        "the sweep of shots": [second],
        "shots": [shots],
        "every rate": [stage for stage in rates if not more & stage.settings.keys()],
        f"{TIMES} times the steps": [stage for stage in rates if more & stage.settings.keys()],
    }
    return f"Finished: {counted(cells, parts)}."


def tables(cells: Cells) -> str:
    """What stands between the README's markers."""
    parts = [progress(cells), primary(cells), grounded_table(cells), shots_table(cells)]
    parts += [every_rate(cells), sweeps(cells)]
    return "\n\n".join(part for part in parts if part)


def findings(cells: Cells) -> str:
    """What findings has: for each side both settings of each task."""
    heads = ("grounded accuracy", "hallucinated", f"shots, runs that reach {RETRIEVES}", "accuracy on a new form")
    lines = [f"| noise 2 / 4; examples 4 / 8 | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for side in SIDES:
        noisy, few = ([list(trained(cells.get(w, {}).get(side, {})).values()) for w in of] for of in (GROUNDED, SHOTS))
        if all(noisy) and all(few):
            columns = (
                [f"{fmean(map(grounded_accuracy, runs)):.2f}" for runs in noisy],
                [mean("hallucinated")(runs) for runs in noisy],
                [solved(runs) for runs in few],
                [mean("new_form")(runs) for runs in few],
            )
            lines.append(f"| {SHOWN[side]} | {' | '.join(map(' / '.join, columns))} |")
    return "\n".join(lines) if len(lines) > 2 else ""


PAGES = {HERE / "README.md": ("measured", tables), HERE.parents[1] / "docs" / "findings.md": ("answers", findings)}

if __name__ == "__main__":
    sys.exit(study_command(sys.argv[1:], HERE, PAGES, lambda _: {}, curves=("recall",)))
