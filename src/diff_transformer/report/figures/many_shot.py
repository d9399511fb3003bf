"""Many-shot classification: accuracy by the length of the prompt, and by the order of its examples."""

import re

from diff_transformer.lab.paper import SAID
from diff_transformer.lab.quantities import QUANTITIES
from diff_transformer.report.charts import Line, averaged, category_chart, line_chart
from diff_transformer.report.figure import Figure, Finding, key, panels
from diff_transformer.report.markup import Html, join, mean, number, short, table
from diff_transformer.report.models import (
    Measurement,
    Results,
    Series,
    compared,
    legend_of,
    models_in,
    names_of,
)
from diff_transformer.report.render import panel

EVAL = "many_shot"
SHOTS = re.compile(r"shots(\d+)")
ORDERS = {"random": "in random order", "alternate": "alternately by class"}


def build(results: Results) -> Figure | None:
    """For each data set: curves over the number of examples, and the spread over their orders."""
    sets = list(dict.fromkeys(map(_data_of, results.measurements(EVAL))))
    by_set = {name: models for name in sets if (models := _models(results, name))}
    if not by_set:
        return None
    shown, findings, tables = [], [], []
    for name, models in by_set.items():
        shown += [_curves(name, models), _orders(name, models)]
        findings += _findings(results, name, models)
        tables.append(_table(name, models))
    everyone = list({model.side: model for models in by_set.values() for model in models}.values())
    return Figure(
        id="many-shot",
        title="Many examples in the prompt, and their order",
        source=("Fig. 6", "Fig. 7", "Fig. 9"),
        read="The prompt holds labelled examples; the model answers with the likeliest label of the set. The "
        "second panel of each data set puts the same examples in several orders, at the longest prompt. The "
        "bar spans the best and the worst order: a short bar means that order matters little.",
        body=panels(*shown) + legend_of(everyone, key("dashed", "chance")),
        findings=findings,
        paper=SAID["many_shot"],
        data=join(tables),
    )


def _data_of(part: Measurement) -> str:
    return part.data or "labelled texts"


def _models(results: Results, name: str) -> list[Series]:
    """The models measured on one data set, with their colours of the whole page."""
    apart = [
        record
        for record in results.records
        if EVAL not in record.metrics or _data_of(Measurement(record, EVAL)) == name
    ]
    return [model for model in models_in(Results(apart, results.about), EVAL) if _counts(model)]


def _counts(model: Series) -> list[int]:
    return sorted({int(found[1]) for found in map(SHOTS.fullmatch, model.names()) if found})


def _last(model: Series, metric: str = "") -> dict[int, float]:
    """By seed: accuracy at the most examples."""
    return model.seeds(metric or f"shots{_counts(model)[-1]}")


def _curves(name: str, models: list[Series]) -> Html | None:
    lines, chance = [], mean([v for model in models for v in model.seeds("chance").values()])
    for model in models:
        places = {k: float(round(mean(model.seeds(f"tokens{k}")) or 0.0)) for k in _counts(model)}
        runs = [
            [(place, values[f"shots{k}"]) for k, place in places.items() if place and f"shots{k}" in values]
            for values in model.metrics.values()
        ]
        if len(runs) > 1:
            lines += [Line("", run, model.side, thin=True) for run in runs]
        lines.append(Line(model.label, averaged(runs), model.side, marks=True, read=True))
    ends = sorted({place for line in lines for place, _ in line.points})
    if not ends:
        return None
    chart = line_chart(
        f"Accuracy on {name} by the length of the prompt",
        lines,
        x_label="tokens of the prompt",
        x_name="tokens:",
        x_ticks=[(end, short(end)) for end in _apart(ends)],
        y_range=(0.0, 1.05),
        guides=[] if chance is None else [(chance, "")],
        log_x=True,
    )
    return panel(f"{name}: accuracy", chart)


def _apart(ends: list[float]) -> list[float]:
    """The x ticks that have room for a label: the last one, and others at least a factor of 1.4 apart."""
    kept: list[float] = []
    for end in reversed(ends):
        if not kept or end * 1.4 <= kept[-1]:
            kept.append(end)
    return kept[::-1]


def _orders(name: str, models: list[Series]) -> Html | None:
    present = [order for order in ORDERS if any(_accuracies(model, order) for model in models)]
    if not present:
        return None
    chart = category_chart(
        f"Accuracy on {name} by the order of the examples",
        [ORDERS[order] for order in present],
        {model.side: [_accuracies(model, order) for order in present] for model in models},
        x_label="order of the examples at the longest prompt",
        y_range=(0.0, 1.05),
        names=names_of(models),
    )
    return panel(f"{name}: accuracy of each order, and their mean", chart)


def _accuracies(model: Series, order: str) -> dict[int, float]:
    """Accuracy of each order, all seeds of the model in one list."""
    pattern = re.compile(rf"{order}_seed(\d+)")
    found = [v for values in model.metrics.values() for k, v in values.items() if pattern.fullmatch(k)]
    return dict(enumerate(found))


def _findings(results: Results, name: str, models: list[Series]) -> list[Finding | None]:
    counts = {_counts(model)[-1] for model in models}
    said = f"{name}, {counts.pop()} examples" if len(counts) == 1 else f"{name}, longest prompt"
    of = {order: (results, QUANTITIES[f"order_{order}"]) for order in ORDERS}
    found = [compared(f"{said}, accuracy", models, [_last(model) for model in models], "higher")]
    for order, words in ORDERS.items():
        margins = [_last(model, f"{order}_margin") for model in models]
        found.append(compared(f"{name}, best − worst order {words}", models, margins, "lower", of=of[order]))
    chance = mean([v for model in models for v in model.seeds("chance").values()])
    best = max(mean(_last(model)) or 0.0 for model in models)
    if chance is not None and best < 1.5 * chance:
        found.append(Finding("note", f"{name}: no model is clear of chance ({number(chance)}), so orders say little."))
    return found


def _table(name: str, models: list[Series]) -> Html:
    runs = [(model, seed) for model in models for seed in model.metrics]
    counts = sorted({k for model in models for k in _counts(model)})
    keys = [(f"{k} examples", f"shots{k}") for k in counts] + [(f"tokens, {k} examples", f"tokens{k}") for k in counts]
    for order, words in ORDERS.items():
        keys += [(f"{part} {words}", f"{order}_{part}") for part in ("mean", "best", "worst", "margin")]
    keys += [("questions with a tie", "ties"), ("chance", "chance")]
    rows: list[list[object]] = [
        [said, *(number(model.metrics[seed].get(metric)) for model, seed in runs)]
        for said, metric in keys
        if any(metric in model.metrics[seed] for model, seed in runs)
    ]
    head: list[object] = [f"accuracy on {name}", *(f"{model.label}, seed {seed}" for model, seed in runs)]
    return table(head, rows, f"Many-shot accuracy on {name}")
