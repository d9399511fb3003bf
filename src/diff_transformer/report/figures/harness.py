"""lm-evaluation-harness: accuracy by task, zero- and few-shot."""

import re

from diff_transformer.lab.paper import SAID
from diff_transformer.report.charts import category_chart
from diff_transformer.report.figure import Figure, Finding, panels
from diff_transformer.report.markup import Html, mean, number, plural, table
from diff_transformer.report.models import Results, Series, compared, legend_of, models_in, names_of
from diff_transformer.report.render import Chart, panel

EVAL = "harness"
CELL = re.compile(r"(.+)_(\d+)shot")
SHORT = {
    "arc_challenge": "ARC-C", "arc_easy": "ARC-E", "boolq": "BoolQ", "hellaswag": "HellaSwag", "openbookqa": "OBQA",
    "piqa": "PIQA", "winogrande": "WinoGrande",
}  # fmt: skip


def build(results: Results) -> Figure | None:
    """For each number of shots a panel of bars by task, and the table with standard errors."""
    models = models_in(results, EVAL)
    cells = [m.groups() for one in models for name in one.names() if (m := CELL.fullmatch(name))]
    tasks = [task for task in dict.fromkeys(task for task, _ in cells) if task != "mean"]
    shots = sorted({int(count) for _, count in cells})
    if not tasks:
        return None
    shown = [panel(f"Accuracy, {plural(count, 'shot')}", _chart(models, tasks, count)) for count in shots]
    return Figure(
        id="harness",
        title="Multiple-choice benchmarks",
        source=("Table 1", "Table 8"),
        read="The model chooses the likeliest answer; accuracy is the share of right choices (HellaSwag: likeliest "
        "per character). Shots are solved examples before the question. Guessing one of k choices gives 1/k.",
        body=panels(*shown, columns=1) + legend_of(models),
        findings=[f for count in shots for f in _findings(models, tasks, count)],
        paper=SAID["harness"],
        data=_data(models, tasks, shots),
    )


def _chart(models: list[Series], tasks: list[str], shots: int) -> Chart:
    return category_chart(
        f"Accuracy by task, {plural(shots, 'shot')}",
        [SHORT.get(task, task.replace("_", " ")) for task in tasks],
        {one.side: [one.seeds(f"{task}_{shots}shot") for task in tasks] for one in models},
        x_label="task", bars=True, y_range=(0.0, 1.05), names=names_of(models),
    )  # fmt: skip


def _findings(models: list[Series], tasks: list[str], shots: int) -> list[Finding | None]:
    said = [
        compared(
            f"Mean over {plural(len(tasks), 'task')}, {plural(shots, 'shot')}", models, f"mean_{shots}shot", "higher"
        )
    ]
    for one in models:
        cut = mean([v for task in tasks if (v := one.mean(f"{task}_{shots}shot_truncated")) is not None])
        if cut:
            words = "of the prompts exceeded the model's maximum length and lost their beginning"
            said.append(Finding("note", f"{one.label}, {plural(shots, 'shot')}: {number(100 * cut, 0)} % {words}."))
    return said


def _data(models: list[Series], tasks: list[str], shots: list[int]) -> Html:
    runs = [(one, seed) for one in models for seed in one.metrics]
    rows: list[list[object]] = []
    for count in shots:
        for task in [*tasks, "mean"]:
            name = f"{task}_{count}shot"
            cells = [_with_error(one.metrics[seed], name) for one, seed in runs]
            rows.append([f"{SHORT.get(task, task.replace('_', ' '))}, {plural(count, 'shot')}", *cells])
    return table(
        ["accuracy ± standard error", *(f"{one.label}, seed {seed}" for one, seed in runs)], rows, "Accuracy by task"
    )


def _with_error(metrics: dict[str, float], name: str) -> str:
    error = metrics.get(f"{name}_stderr")
    return number(metrics.get(name), 3) + (f" ± {number(error, 3)}" if error is not None else "")
