"""The page of experiments on any number of models: for each experiment its figure, numbers and examples."""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from diff_transformer.lab.record import Record
from diff_transformer.report.figure import Figure, folded
from diff_transformer.report.figures import IN_ORDER, build
from diff_transformer.report.load import load_evals
from diff_transformer.report.markup import Html, join, number, plural, table, tag
from diff_transformer.report.models import Measurement, Results, Series, legend_of, models_in, noted
from diff_transformer.report.page import contents, fill_page, save_page

WITHOUT_MODEL = {"scaling", "ablation"}  # experiments on tables of runs, and on models that they train themselves
TITLES = {
    "loss": "Loss",
    "associative_recall": "Loss on repeated and on new text",
    "harness": "Downstream tasks",
    "throughput": "Throughput",
}


def write_evals_report(source: Any, path: Path | str, *, overwrite: bool = False) -> Path:
    """Write the page of some results of ``diff-transformer eval`` and return its path.

    Args:
        source: a ``Result`` or its dictionary, a JSON file, a folder of them, or a list of these.

    Raises:
        FileExistsError: when ``path`` exists and ``overwrite`` is False.
        ResultsError: when there is no result in ``source``, or the page would pass 3 MB.
    """
    return save_page(lambda: render_evals_page(load_evals(source)), path, overwrite=overwrite)


def render_evals_page(records: list[Record]) -> str:
    """The whole page as a string."""
    records = sorted(records, key=lambda record: bool(record.metrics.keys() & WITHOUT_MODEL))
    results = Results(records)
    figures = _figures(results)
    models = [one for one in models_in(results) if one.parts[0].eval not in WITHOUT_MODEL]
    names = ", ".join(dict.fromkeys(one.label for one in models))
    experiments = list(dict.fromkeys(part.eval for part in results.measurements()))
    sentence = f"{plural(len(experiments), 'experiment')}{f' on {names}' if names else ''}."
    return fill_page(
        title=f"Experiments: {names}" if names else "Experiments",
        description=sentence,
        first_screen=_first_screen(sentence, models, list(results.measurements())),
        contents=contents([(figure.id, figure.title) for figure in figures]),
        figures=join(figure.html(place, Html("")) for place, figure in enumerate(figures, 1)),
    )


def _figures(results: Results) -> list[Figure]:
    """The figures in the page's order, each with the numbers, examples and settings of its experiment.

    Experiments without a figure come last, as tables."""
    drawn = {getattr(module, "EVAL", ""): module for module in IN_ORDER}
    names = dict.fromkeys(part.eval for part in results.measurements())
    made = {name: build(drawn[name], results) for name in drawn if name in names}
    figures = {
        name: replace(figure, more=join([figure.more, _tables(results, name)]))
        for name, figure in made.items()
        if figure
    }
    figures |= {name: _plain(results, name) for name in names if not made.get(name)}
    return [noted(figure, results, name) for name, figure in figures.items()]


def _plain(results: Results, name: str) -> Figure:
    """An experiment that has no chart."""
    models = models_in(results, name)
    body = _metrics(models) if models else tag("p", "No finite number was measured.")
    return Figure(
        id=f"eval-{_slug(name)}",
        title=TITLES.get(name, name.replace("_", " ").capitalize()),
        source=(),
        read="",
        body=body + (legend_of(models) if len(models) > 1 else ""),
        more=_tables(results, name, metrics=False),
    )


def _slug(name: str) -> str:
    return "".join(c if c.isalnum() and c.isascii() else "-" for c in name)


def _tables(results: Results, name: str, *, metrics: bool = True) -> Html:
    """The details of an experiment, each part folded."""
    models = models_in(results, name)
    parts = [folded("Every number", _metrics(models))] if metrics and models else []
    examples = examples_table(models)
    if examples is not None:
        drawn, words = examples
        parts.append(folded(f"Examples ({words})", drawn))
    parts.append(folded("Settings and machine", _provenance(list(results.measurements(name)))))
    return join(parts)


def _metrics(models: list[Series]) -> Html:
    """Every metric of an experiment, with a column for each model and seed."""
    runs = [(one, seed) for one in models for seed in one.metrics]
    several = any(len(one.metrics) > 1 for one in models)
    head: list[object] = ["", *(f"{one.label}, seed {seed}" if several else one.label for one, seed in runs)]
    keys = dict.fromkeys(key for one in models for key in one.names())
    rows: list[list[object]] = [[key, *(number(one.metrics[seed].get(key)) for one, seed in runs)] for key in keys]
    return table(head, rows, "Metrics")


def _provenance(parts: list[Measurement]) -> Html:
    keys = dict.fromkeys(str(key) for part in parts for key in part.provenance)
    several = len({part.record.side for part in parts}) < len(parts)
    head: list[object] = [
        "",
        *(f"{part.record.side}, seed {part.record.seed}" if several else part.record.side for part in parts),
    ]
    rows: list[list[object]] = [
        [key.replace("_", " "), *(_setting(part.provenance.get(key)) for part in parts)] for key in keys
    ]
    return table(head, rows, "Settings and machine", numeric=False)


def _setting(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return "" if value is None else str(value)


def _first_screen(sentence: str, models: list[Series], parts: list[Measurement]) -> Html:
    said = [part.provenance for part in parts]
    facts = {
        "Models": ", ".join(dict.fromkeys(one.label for one in models)),
        "Results": f"{len(parts)}, with {sum(len(part.rows) for part in parts):,} rows",
        "Machine": _listed(one.get("cpu") if one.get("device") == "cpu" else one.get("device") for one in said),
        "Commit": _listed(one.get("commit") for one in said),
        "Measured": _span(str(one["date"])[:16].replace("T", " ") for one in said if one.get("date")),
    }
    shown = [tag("div", tag("dt", name), tag("dd", value)) for name, value in facts.items() if value]
    empty = sum(not part.metrics for part in parts)
    note = f"{plural(empty, 'result')} without a finite number {'is' if empty == 1 else 'are'} not drawn."
    return join([
        tag("h1", "Experiments"), tag("p", sentence, class_="lead"), tag("dl", *shown, class_="facts"),
        tag("p", note, class_="small") if empty else None,
    ])  # fmt: skip


def _listed(values: Iterable[object]) -> str:
    return ", ".join(dict.fromkeys(str(value) for value in values if value))


def _span(dates: Iterable[str]) -> str:
    found = sorted(set(dates))
    return " to ".join([found[0], found[-1]][: len(found)]) if found else ""


SHOWN = 120  # rows of an experiment, all models together
COLUMNS = 9
_FIRST = ("prompt", "expected", "got", "score")
_LONG, _SHORT = 320, 160  # characters of a prompt's end, and of any other text's beginning


def examples_table(models: list[Series]) -> tuple[Html, str] | None:
    """The table, and a note on how many of all rows it shows; None if no model has rows.

    The rows shown are evenly spaced among each model's rows, so that they cover every part of the experiment.
    """
    of = [(one, one.rows()) for one in models]
    total = sum(len(rows) for _, rows in of)
    if not total:
        return None
    chosen = [(one, row) for one, rows in of for row in _spread(rows, max(1, SHOWN // len(models)))]
    keys = list(dict.fromkeys(key for _, row in chosen for key in row))
    columns = [k for k in _FIRST if k in keys] + [k for k in keys if k not in _FIRST]
    head: list[object] = ["model", *columns[:COLUMNS]]
    body: list[list[object]] = [
        [one.label, *(_cell(row.get(key), key == "prompt") for key in columns[:COLUMNS])] for one, row in chosen
    ]
    words = f"{len(chosen)} of {total:,}" if len(chosen) < total else f"all {total:,}"
    return table(head, body, "Examples", numeric=False, class_="examples"), words


def _spread(rows: list[dict], count: int) -> list[dict]:
    if len(rows) <= count:
        return rows
    return [rows[len(rows) * i // count] for i in range(count)]


def _cell(value: object, is_prompt: bool) -> str:
    if value is None:
        return ""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return number(value)
    words = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if is_prompt:
        return words if len(words) <= _LONG else f"… {words[-_LONG:]}"
    return words if len(words) <= _SHORT else f"{words[:_SHORT]} …"
