"""The page of training runs, finished or not: their curves on shared axes, and the settings that differ."""

from pathlib import Path

from diff_transformer.checks import differences
from diff_transformer.report.load import RunLog, load_runs
from diff_transformer.report.markup import Html, join, number, plural, short, table, tag
from diff_transformer.report.models import as_dict
from diff_transformer.report.page import contents, fill_page, save_page
from diff_transformer.report.run_figures import figures_of


def write_runs_report(paths: list[Path | str], path: Path | str, *, overwrite: bool = False) -> Path:
    """Write the page that compares runs and return its path.

    Args:
        paths: folders of ``diff-transformer train``, finished or not; members of a comparison; ``metrics.jsonl`` files.

    Raises:
        FileExistsError: if ``path`` exists and ``overwrite`` is False.
        ResultsError: if one of ``paths`` is not a run.
    """
    return save_page(lambda: render_runs_page(load_runs(paths)), path, overwrite=overwrite)


def render_runs_page(runs: list[RunLog]) -> str:
    """The whole page as a string."""
    figures = figures_of(runs)
    sentence = f"{plural(len(runs), 'run')}: {', '.join(run.label for run in runs)}."
    shown = [figure.html(place, Html("")) for place, figure in enumerate(figures, 1)]
    return fill_page(
        title="Training runs",
        description=sentence,
        first_screen=_first_screen(runs),
        contents=contents([(figure.id, figure.title) for figure in figures] + [("settings", "Settings that differ")]),
        figures=join(shown),
        method=_settings(runs),
    )


def _first_screen(runs: list[RunLog]) -> Html:
    unfinished = sum(not run.finished for run in runs)
    words = "Training curves on shared axes."
    if unfinished:
        words += f" {unfinished} of {plural(len(runs), 'run')} {'is' if unfinished == 1 else 'are'} not finished."
    head: list[object] = [
        "run", "state", "step", "last loss", "last validation", "best validation (step)", "tokens/s", "MFU", "memory",
    ]  # fmt: skip
    body = table(head, [_summary(run) for run in runs], "Runs")
    damage = [sentence for run in runs for sentence in run.damage]
    said = tag("ul", *(tag("li", f"{sentence}.") for sentence in damage), class_="findings") if damage else None
    return join([tag("h1", "Training runs"), tag("p", words, class_="lead"), said, body])


def _summary(run: RunLog) -> list[object]:
    steps = as_dict(run.config.get("train")).get("steps")
    checked = run.points("validation_loss")
    best = min(((value, step) for step, value in checked), default=None)
    speeds = sorted(value for _, value in run.points("tokens_per_second"))
    used = sorted(value for _, value in run.points("mfu"))
    memory = [value for name in ("memory_bytes", "peak_memory_bytes") for _, value in run.points(name)]
    losses = run.points("loss")
    swatch = tag("i", class_=f"swatch {run.side}", aria_hidden="true")
    return [
        tag("span", swatch, run.label, class_="key"),
        "finished" if run.finished else "not finished",
        f"{run.step:,}" + (f" of {steps:,}" if isinstance(steps, int) else ""),
        number(losses[-1][1] if losses else None, 4),
        number(checked[-1][1] if checked else None, 4),
        f"{number(best[0], 4)} ({best[1]:,.0f})" if best else number(None),
        short(speeds[len(speeds) // 2]) if speeds else number(None),
        f"{100 * used[len(used) // 2]:.1f} %" if used else number(None),
        f"{short(max(memory))}B" if memory else number(None),
    ]


def _settings(runs: list[RunLog]) -> Html:
    """A table of the settings that differ between runs."""
    known = [run for run in runs if run.config]
    paths: dict[str, None] = {}
    for run in known[1:]:
        paths |= dict.fromkeys(line.split(": ")[0] for line in differences(known[0].config, run.config))
    rows: list[list[object]] = [[path, *(_value(run.config, path) for run in runs)] for path in sorted(paths)]
    head: list[object] = ["setting", *(run.label for run in runs)]
    said = f"{plural(len(rows), 'setting')} of the configuration {'differs' if len(rows) == 1 else 'differ'}."
    if len(known) < 2:
        said = "There are no two configurations to compare."
    return tag(
        "section",
        tag("h2", "Settings that differ", id="settings-title"),
        tag("p", said),
        table(head, rows, "Settings that differ", numeric=False) if rows else None,
        id="settings",
        aria_labelledby="settings-title",
    )


def _value(config: dict, path: str) -> str:
    value: object = config
    for key in path.split("."):
        if not isinstance(value, dict) or key not in value:
            return number(None)
        value = value[key]
    return str(value)
