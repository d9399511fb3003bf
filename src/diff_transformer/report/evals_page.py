"""Results of experiments on any number of models -> one page: for each experiment its figure, numbers and examples."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from diff_transformer.report.examples import examples_table
from diff_transformer.report.figure import Figure
from diff_transformer.report.figures import IN_ORDER
from diff_transformer.report.load_evals import load_evals
from diff_transformer.report.markup import Html, join, table, tag
from diff_transformer.report.numbers import number, plural
from diff_transformer.report.pair import as_dict, dicts
from diff_transformer.report.series import Series, finite_metrics, legend_of, models_in
from diff_transformer.report.write import contents, fill_page, save_page

WITHOUT_MODEL = ("scaling", "ablation")  # experiments on tables of runs, and on models that they train themselves
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


def render_evals_page(evals: list[dict]) -> str:
    """The whole page as a string."""
    evals = sorted(evals, key=lambda entry: entry["eval"] in WITHOUT_MODEL)  # their tables take the last colours
    results = {"schema": 1, "evals": evals}
    figures = _figures(results)
    models = [one for one in models_in(results) if one.entries[0]["eval"] not in WITHOUT_MODEL]
    names = ", ".join(dict.fromkeys(one.label for one in models))
    experiments = list(dict.fromkeys(str(entry["eval"]) for entry in evals))
    sentence = f"{plural(len(experiments), 'experiment')}{f' on {names}' if names else ''}."
    shown = [figure.html(place, Html("")) for place, figure in enumerate(figures, 1)]
    return fill_page(
        title=f"Experiments: {names}" if names else "Experiments",
        description=sentence,
        first_screen=_first_screen(sentence, models, evals),
        contents=contents([(figure.id, figure.title) for figure in figures]),
        figures=join(shown),
    )


def _figures(results: dict) -> list[Figure]:
    """The figures in the page's order, each with the numbers, examples and settings of its experiment; experiments
    without one at the end, as tables alone."""
    names = list(dict.fromkeys(str(entry["eval"]) for entry in results["evals"]))
    figures: list[Figure] = []
    told: set[str] = set()
    for module in IN_ORDER:
        figure = module.build(results)
        if figure is None:
            continue
        mine = [name for name in names if module.build(_only(results, name)) is not None and name not in told]
        told.update(mine)
        figures.append(replace(figure, more=join([figure.more, *(_tables(results, name) for name in mine)])))
    return figures + [_plain(results, name) for name in names if name not in told]


def _only(results: dict, name: str) -> dict:
    return {**results, "evals": [entry for entry in results["evals"] if entry["eval"] == name]}


def _plain(results: dict, name: str) -> Figure:
    """An experiment that has no drawing."""
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


def _tables(results: dict, name: str, *, metrics: bool = True) -> Html:
    """What is behind an experiment, each part folded away."""
    models = models_in(results, name)
    parts = [_more("Every number", _metrics(models))] if metrics and models else []
    examples = examples_table(models)
    if examples is not None:
        drawn, words = examples
        parts.append(_more(f"Examples ({words})", drawn))
    parts.append(_more("Settings and machine", _provenance(_only(results, name)["evals"])))
    return join(parts)


def _more(title: str, content: Html) -> Html:
    return tag("details", tag("summary", title), content, class_="more")


def _metrics(models: list[Series]) -> Html:
    """Every metric of an experiment, a column for each model and seed."""
    runs = [(one, seed) for one in models for seed in one.metrics]
    several = any(len(one.metrics) > 1 for one in models)
    head: list[object] = ["", *(f"{one.label}, seed {seed}" if several else one.label for one, seed in runs)]
    keys = dict.fromkeys(key for one in models for key in one.names())
    rows: list[list[object]] = [[key, *(number(one.metrics[seed].get(key)) for one, seed in runs)] for key in keys]
    return table(head, rows, "Metrics")


def _provenance(entries: list[dict]) -> Html:
    said = [as_dict(entry.get("provenance")) for entry in entries]
    keys = dict.fromkeys(str(key) for one in said for key in one)
    head: list[object] = ["", *(entry["model"] for entry in entries)]
    rows: list[list[object]] = [[key.replace("_", " "), *(_setting(one.get(key)) for one in said)] for key in keys]
    return table(head, rows, "Settings and machine", numeric=False)


def _setting(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return "" if value is None else str(value)


def _first_screen(sentence: str, models: list[Series], evals: list[dict]) -> Html:
    said = [as_dict(entry.get("provenance")) for entry in evals]
    facts = {
        "Models": ", ".join(dict.fromkeys(one.label for one in models)),
        "Results": f"{len(evals)}, with {sum(len(dicts(entry.get('rows'))) for entry in evals):,} rows",
        "Machine": _listed(one.get("cpu") if one.get("device") == "cpu" else one.get("device") for one in said),
        "Commit": _listed(one.get("commit") for one in said),
        "Measured": _span(str(one["date"])[:16].replace("T", " ") for one in said if one.get("date")),
    }
    shown = [tag("div", tag("dt", name), tag("dd", value)) for name, value in facts.items() if value]
    empty = sum(not finite_metrics(entry) for entry in evals)
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
