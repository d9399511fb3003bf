"""Contextual hallucination: the share of outputs that their source supports, by data set."""

from diff_transformer.lab.paper import SAID
from diff_transformer.report.charts import category_chart
from diff_transformer.report.figure import Figure, Finding, panels
from diff_transformer.report.markup import Html, mean, number, table
from diff_transformer.report.models import Results, Series, compared, legend_of, models_in, names_of
from diff_transformer.report.render import panel

EVAL = "hallucination"
DETAILS = ("stderr", "undecided", "empty", "truncated")
EXAMPLES = 4  # of each model


def build(results: Results) -> Figure | None:
    """Accuracy by data set with one bar per model, undecided verdicts, and examples."""
    models = models_in(results, EVAL)
    sets = set_names(models)
    if not sets:
        return None
    values = {one.side: [one.seeds(name) for name in sets] for one in models}
    chart = category_chart(
        "Share of outputs free of hallucination", [name.replace("_", " ") for name in sets], values,
        x_label="data set", bars=True, y_range=(0.0, 1.05), names=names_of(models),
    )  # fmt: skip
    return Figure(
        id="hallucination",
        title="Hallucination in context",
        source=("Table 4",),
        read="Each model summarises texts or answers questions about them. A judge decides whether the output is "
        "supported by the text. Accuracy is the share that is; higher is better. "
        f"Judge here: {', '.join(judges(models)) or 'not stated'}.",
        body=panels(panel("Accuracy", chart), columns=1) + legend_of(models),
        findings=[*(compared(name, models, name, "higher") for name in sets), *_unsure(models, sets)],
        paper=SAID["hallucination"],
        data=_data(models, sets),
    )


def set_names(models: list[Series]) -> list[str]:
    """The data sets of all models, in order of appearance."""
    names = [name for one in models for name in one.names()]
    return list(dict.fromkeys(name.removesuffix("_undecided") for name in names if name.endswith("_undecided")))


def judges(models: list[Series]) -> list[str]:
    """The judges that the results name."""
    named = [part.provenance.get("judge") for one in models for part in one.parts]
    return list(dict.fromkeys(str(name) for name in named if name))


def _unsure(models: list[Series], sets: list[str]) -> list[Finding]:
    """Notes on outputs that the numbers leave out or count as wrong."""
    said = []
    for one in models:
        for detail, words in (
            ("undecided", "of the outputs have no verdict and are left out"),
            ("empty", "of the outputs are empty and count as wrong"),
            ("truncated", "of the texts were truncated to the model's maximum length"),
        ):
            share = mean([v for name in sets if (v := one.mean(f"{name}_{detail}")) is not None])
            if share:
                said.append(Finding("note", f"{one.label}: {number(100 * share, 0)} % {words}."))
    return said


def _data(models: list[Series], sets: list[str]) -> Html:
    runs = [(one, seed) for one in models for seed in one.metrics]
    keys = [name for each in sets for name in (each, *(f"{each}_{detail}" for detail in DETAILS))]
    head: list[object] = ["share of outputs", *(f"{one.label}, seed {seed}" for one, seed in runs)]
    rows: list[list[object]] = [
        [key.replace("_", " "), *(number(one.metrics[seed].get(key), 3) for one, seed in runs)]
        for key in [*keys, "mean"]
    ]
    examples = [_example(one.label, row) for one in models for row in one.rows()[:EXAMPLES]]
    shown = table(["model", "set", "output", "expected", "verdict", "why"], examples, "Outputs", numeric=False)
    return Html(table(head, rows, "Hallucination") + (shown if examples else ""))


def _example(model: str, row: dict) -> list[object]:
    cells = [str(row.get(name, "")) for name in ("set", "got", "expected", "verdict", "why")]
    return [model, *(cell[:160] for cell in cells)]
