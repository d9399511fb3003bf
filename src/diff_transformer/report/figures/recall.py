"""Key-value recall in noise: accuracy during training, and in rows with more noise."""

import re

from diff_transformer.lab.quantities import QUANTITIES
from diff_transformer.report.charts import Line, Point, averaged, category_chart, line_chart
from diff_transformer.report.figure import Figure, Finding, key, panels
from diff_transformer.report.figures.losses import Curves, finite_points
from diff_transformer.report.markup import mean, number, table
from diff_transformer.report.models import STYLES, Results, Series, compared, legend_of, models_in, names_of
from diff_transformer.report.render import Chart, panel

EVAL = "recall"
LONGER = re.compile(r"accuracy_(\d+)x")
MEASURES = {
    "answer": "attention on the answer, mean of heads",
    "noise": "attention on the noise, mean of heads",
    "answer_mean_map": "attention on the answer, of the heads' mean map",
    "noise_mean_map": "attention on the noise, of the heads' mean map",
}


def build(results: Results) -> Figure | None:
    """Curves of accuracy over training, and bars of accuracy by length."""
    models = [one for one in models_in(results, EVAL) if one.seeds("accuracy")]
    if not models:
        return None
    longer = sorted({int(found[1]) for one in models for found in map(LONGER.fullmatch, one.names()) if found})
    names = {"accuracy": "as in training", **{f"accuracy_{times}x": f"{times} times as long" for times in longer}}
    chance = mean([v for one in models for v in one.seeds("chance").values()])
    curves = {one.side: lines for one in models if (lines := _curves(one))}
    return Figure(
        id="recall",
        title="Recall from noise",
        source=("Section 3.4",),
        read="Small models, trained on nothing else, in that setting of this project's recall study in which the two "
        "differ soonest. A row has pairs of a key and a value among noise, then keys whose values the model must name. "
        "In longer rows there is more noise. A guess among the values of the row is right at the dashed line.",
        body=panels(
            panel("Accuracy over training", _over_training(models, curves, chance)) if curves else None,
            panel("Accuracy at the end, by length of the row", _by_length(models, names, chance)),
        )
        + (legend_of(models) if chance is None else legend_of(models, key("dashed", f"a guess, {number(chance)}"))),
        findings=[
            compared("Accuracy at the end", models, "accuracy", "higher", of=(results, QUANTITIES[EVAL])),
            _guesses(models, chance),
        ],
        data=table(
            ["", *(one.label for one in models)],
            [[words, *(number(one.mean(name)) for one in models)] for name, words in (names | MEASURES).items()],
            "Recall from noise",
        ),
    )


def _curves(model: Series) -> dict[int, list[Point]]:
    """Accuracy over training by seed."""
    found = {part.record.seed: finite_points(part.record.curves.get(EVAL, {}), "accuracy") for part in model.parts}
    return {seed: points for seed, points in found.items() if points}


def _guesses(models: list[Series], chance: float | None) -> Finding | None:
    """Says so where no model is better than a guess."""
    if chance is None or any((one.mean("accuracy") or 0) > 1.5 * chance for one in models):
        return None
    return Finding("note", "No model does better than a guess: this run does not tell the two apart.")


def _over_training(models: list[Series], curves: Curves, chance: float | None) -> Chart:
    lines: list[Line] = []
    for one in models:
        seeds = curves.get(one.side, {})
        if len(seeds) > 1 and len(models) <= STYLES:  # a line a seed of more models cannot be told apart
            lines += [Line(f"{one.label} seed {s}", p, one.side, thin=True) for s, p in seeds.items()]
        if seeds:
            lines.append(Line(one.label, averaged(list(seeds.values())), one.side, read=True))
    return line_chart(
        "Accuracy of recall over training", lines, x_label="training step", y_range=(0.0, 1.05),
        guides=[] if chance is None else [(chance, "")],
    )  # fmt: skip


def _by_length(models: list[Series], names: dict[str, str], chance: float | None) -> Chart:
    return category_chart(
        "Accuracy of recall by length", list(names.values()),
        {one.side: [one.seeds(name) for name in names] for one in models}, x_label="length of the row", bars=True,
        y_range=(0.0, 1.05), guides=[] if chance is None else [(chance, "")], names=names_of(models),
    )  # fmt: skip
