"""Training and validation loss over steps."""

from diff_transformer.lab.paper import SAID
from diff_transformer.lab.sides import PAIR, name_of
from diff_transformer.report.charts import Line, Point, averaged, bucketed, line_chart
from diff_transformer.report.figure import Figure, key, panels, versus
from diff_transformer.report.markup import Html, is_number, join, number, table, tag
from diff_transformer.report.models import Results
from diff_transformer.report.render import Chart, panel

Curves = dict[str, dict[int, list[Point]]]  # side -> seed -> points


def read_curves(results: Results, name: str, what: str = "loss") -> Curves:
    """The finite points (step, ``what``) of "training", "validation" or "recall" of every record."""
    found: Curves = {}
    for record in results.records:
        if points := finite_points(record.curves.get(name, {}), what):
            found.setdefault(record.side, {})[record.seed] = points
    return {side: found[side] for side in results.sides() if side in found}


def finite_points(curve: dict, what: str) -> list[Point]:
    """The finite points (step, ``what``) of one curve."""
    pairs = zip(curve.get("step") or [], curve.get(what) or [], strict=False)
    return [(float(s), float(v)) for s, v in pairs if is_number(s) and is_number(v)]


def build(results: Results) -> Figure | None:
    """Loss curves of both models, and their final numbers."""
    training = read_curves(results, "training")
    validation = read_curves(results, "validation")
    if not training and not validation:
        return None
    shown, styles = [], results.styles()
    if training:
        shown.append(panel("Training loss, nats per token", _chart("Training loss", training, styles)))
    if validation:
        shown.append(
            panel("Validation loss, nats per token", _chart("Validation loss", validation, styles, marks=True))
        )
    last = {name: _last(curves) for name, curves in (("validation", validation), ("training", training)) if curves}
    findings = [
        versus(f"Last {name} loss", final.get("diff", {}), final.get("softmax", {}), "lower")
        for name, final in last.items()
    ]
    return Figure(
        id="loss",
        title="Loss over training",
        source=("Fig. 3",),
        read="Lower is better. Thin lines are seeds, thick lines their mean. Each training point averages "
        "neighbouring log steps, and the first steps may lie above the frame. The training loss weights each "
        "source of the mixture by its share. The validation loss is over held-out text; the claims use other "
        "held-out text.",
        body=panels(*shown, columns=len(shown))
        + tag(
            "p",
            join(
                [
                    *(key(styles[side], name_of(side)) for side in {**training, **validation}),
                    key("thin-line", "one seed"),
                ]
            ),
            class_="legend",
        ),
        findings=findings,
        paper=SAID["loss"],
        data=_data(last, validation),
    )


def _last(curves: Curves) -> dict[str, dict[int, float]]:
    """The last value by side and seed; for a long noisy curve, the mean of its last twentieth."""
    return {
        side: {s: sum(v for _, v in p[-(len(p) // 20 or 1) :]) / (len(p) // 20 or 1) for s, p in seeds.items()}
        for side, seeds in curves.items()
    }


def _chart(name: str, curves: Curves, styles: dict[str, str], marks: bool = False) -> Chart:
    lines: list[Line] = []
    for side, by_seed in curves.items():
        several = len(by_seed) > 1
        mean_line = bucketed(averaged(list(by_seed.values())))  # as long as the shortest seed
        if several and (len(curves) <= len(PAIR) + 1 or not mean_line):  # more lines cannot be told apart
            lines += [
                Line(f"{name_of(side)} seed {s}", bucketed(p), styles[side], thin=True) for s, p in by_seed.items()
            ]
        title = f"{name_of(side)}{f', mean of {len(by_seed)} seeds' if several else ''}"
        lines.append(Line(title, mean_line, styles[side], marks=marks, read=True))
    return line_chart(
        f"{name} of the models over training steps", lines, x_label="training step", y_range=_frame(lines)
    )


def _frame(lines: list[Line]) -> tuple[float, float]:
    """The range from just below the lowest value to the curves' height after a tenth of training."""
    values = [v for line in lines for _, v in line.points]
    early = [line.points[max(len(line.points) // 10, len(line.points) > 3)][1] for line in lines if line.points]
    low, high = min(values), max(early)
    room = (high - low) * 0.06 or 0.1
    return low - room, high + room


def _data(last: dict[str, dict[str, dict[int, float]]], validation: Curves) -> Html:
    rows: list[list[object]] = [
        [f"{name_of(side)}, seed {seed}: last {name} loss", number(value, 4)]
        for name, final in last.items()
        for side, by_seed in final.items()
        for seed, value in by_seed.items()
    ]
    head: list[object] = ["", "nats per token"]
    parts = [table(head, rows, "Last losses")]
    runs = {
        f"{name_of(side)}, seed {seed}": dict(points)
        for side, by_seed in validation.items()
        for seed, points in by_seed.items()
    }
    if runs:
        steps = sorted({s for points in runs.values() for s in points})
        steps = steps[:: -(-len(steps) // 40)]
        rows = [[f"step {s:,.0f}", *(number(points.get(s), 4) for points in runs.values())] for s in steps]
        parts.append(table(["validation loss", *runs], rows, "Validation loss by step"))
    return Html("".join(parts))
