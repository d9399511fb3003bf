"""The figures of the page of runs: loss, gradients, learning rate, lambda and head norm by layer, speed, memory."""

from collections.abc import Callable

from diff_transformer.report.charts import Line, Point, line_chart
from diff_transformer.report.figure import Figure, Finding, key, panels
from diff_transformer.report.load import RunLog
from diff_transformer.report.markup import Html, join, mean, number, table, tag
from diff_transformer.report.render import panel

LAYERS = 8  # panels of single layers
SPIKE = 10.0  # times the median gradient norm
_POINTS, _TOTAL = 48, 320  # most points of a line, and of all lines of a chart, so that many runs fit on one page
_SMALL, _LARGE = 165, 210


def figures_of(runs: list[RunLog]) -> list[Figure]:
    """The figures for which at least one run has numbers."""
    made = [_loss(runs), _sources(runs), _gradients(runs), _rate(runs)]
    made += [_by_layer(runs, *what) for what in _LAYERED]
    made += [_speed(runs), _memory(runs)]
    return [figure for figure in made if figure is not None]


def _loss(runs: list[RunLog]) -> Figure | None:
    shown = [
        _panel(runs, "loss", "Training loss, nats per token", frame=_after_the_start),
        _panel(runs, "validation_loss", "Validation loss, nats per token", marks=True, frame=_after_the_start),
    ]
    if not any(shown):
        return None
    ends = [(run.label, points[-1]) for run in runs if (points := run.points("validation_loss"))]
    last = sorted((value, label, step) for label, (step, value) in ends)
    said = ", ".join(f"{label} {number(value, 4)} (step {step:,.0f})" for value, label, step in last)
    notes = [
        Finding("alarm", f"{run.label}, step {line['step']:,}: {line['note']}.")
        for run in runs
        for line in run.lines
        if line.get("note")
    ]
    return Figure(
        id="loss",
        title="Loss over training",
        source=(),
        read="Lower is better. A training point averages neighbouring log steps; the first steps may lie above the "
        "frame.",
        body=panels(*shown, columns=2) + _legend(runs),
        findings=[Finding("note", f"Last validation loss, the lowest first: {said}.") if last else None, *notes],
        data=_tables(runs, [("loss", None, "Training loss"), ("validation_loss", None, "Validation loss")]),
    )


def _sources(runs: list[RunLog]) -> Figure | None:
    names = list(dict.fromkeys(key for run in runs for key in run.keys("loss_by_source")))
    return _multiples(
        runs, "sources", "Loss of each source of the mixture",
        "The mean over the labelled tokens of a source in a batch, nats per token.",
        [("loss_by_source", name, name) for name in names], frame=_after_the_start,
    )  # fmt: skip


def _gradients(runs: list[RunLog]) -> Figure | None:
    parts = list(dict.fromkeys(key for run in runs for key in run.keys("grad_norm_by_part")))
    shown = [_panel(runs, "grad_norm", "All parameters", log_y=True)]
    shown += [
        _panel(runs, "grad_norm_by_part", part.replace("_", " ").capitalize(), part, log_y=True, height=_SMALL)
        for part in parts
    ]
    if not any(shown):
        return None
    return Figure(
        id="gradients",
        title="Gradient norm, in all and by part",
        source=(),
        read="L2 norm before clipping, on a logarithmic scale. The squared norms of the parts add up to that of all "
        "parameters.",
        body=panels(*shown) + _legend(runs),
        findings=[_spike(run) for run in runs],
        data=_tables(
            runs, [("grad_norm", None, "All parameters"), *(("grad_norm_by_part", part, part) for part in parts)]
        ),
    )


def _spike(run: RunLog) -> Finding | None:
    points = run.points("grad_norm")
    if len(points) < 10:
        return None
    median = sorted(value for _, value in points)[len(points) // 2]
    step, top = max(points[len(points) // 10 :], key=lambda point: point[1])
    if not median or top < SPIKE * median:
        return None
    return Finding(
        "alarm", f"{run.label}: the gradient norm reached {number(top)} at step {step:,.0f}, "
        f"{top / median:.0f} times its median."
    )  # fmt: skip


def _rate(runs: list[RunLog]) -> Figure | None:
    shown = _panel(runs, "lr", "Learning rate", digits=6)
    if shown is None:
        return None
    read = "The optimizer's learning rate at the logged steps."
    data = _tables(runs, [("lr", None, "Learning rate")])
    return Figure("rate", "Learning rate", (), read, panels(shown) + _legend(runs), data=data)


def _lambda_alarms(runs: list[RunLog], name: str, count: int) -> list[Finding | None]:
    found: list[Finding | None] = []
    for run in runs:
        outside = [
            (step, layer, value)
            for layer in range(count)
            for step, value in run.points(name, layer)
            if not 0.0 <= value <= 1.0
        ]
        if outside:
            step, layer, value = min(outside)
            layers = sorted({layer + 1 for _, layer, _ in outside})
            where = f"layer {layers[0]}" if len(layers) == 1 else f"layers {', '.join(map(str, layers))}"
            first = f"first at step {step:,.0f} ({number(value)} in layer {layer + 1})"
            found.append(Finding("alarm", f"{run.label}: lambda left the range 0 to 1 in {where}, {first}."))
    if not found and any(run.layers(name) for run in runs):
        found.append(Finding("note", "Lambda stayed between 0 and 1 in every layer of every run."))
    return found


_LAYERED: tuple[tuple[str, str, str, str, Callable], ...] = (
    ("lambda", "lambda", "Lambda, layer by layer", "The weight of the second map, which is subtracted. Below 0 it "
     "would be added; above 1, more than the whole map is subtracted.", _lambda_alarms),
    ("head_norm_gain", "gain", "Head-norm gain, layer by layer", "Mean magnitude of the head norm's weight, "
     "which scales heads of unit RMS.", lambda runs, name, count: []),
)  # fmt: skip


def _by_layer(runs: list[RunLog], name: str, id: str, title: str, read: str, findings: Callable) -> Figure | None:
    count = max(run.layers(name) for run in runs)
    if not count:
        return None
    chosen = sorted({round(i * (count - 1) / max(1, min(LAYERS, count) - 1)) for i in range(min(LAYERS, count))})
    ends = [_last_by_layer(run, name) for run in runs]
    lines = [Line(run.label, end, run.side, marks=True, read=True) for run, end in zip(runs, ends, strict=True)]
    guides = [(1.0, "1: alarm above"), (0.0, "0: alarm below")] if name == "lambda" else []
    every = -(-count // LAYERS)
    ticks = [(float(layer), str(layer)) for layer in range(1, count + 1, every)]
    chart = line_chart(
        f"{title}: last value", lines, x_label="layer", x_name="layer", x_ticks=ticks, guides=guides, height=_LARGE
    )
    last = panel("Last value of each layer", chart)
    layers = [_panel(runs, name, f"Layer {layer + 1}", layer, height=_SMALL) for layer in chosen]
    words = f" {len(chosen)} of {count} layers are shown over training." if len(chosen) < count else ""
    tables = [dict(end) for end in ends]
    rows: list[list[object]] = [
        [f"layer {layer}", *(number(table.get(layer), 4) for table in tables)] for layer in range(1, count + 1)
    ]
    return Figure(
        id=id,
        title=title,
        source=(),
        read=read + words,
        body=panels(last, *layers) + _legend(runs),
        findings=findings(runs, name, count),
        data=table(["last value", *(run.label for run in runs)], rows, f"{title}: last values"),
    )


def _last_by_layer(run: RunLog, name: str) -> list[Point]:
    ends = [(layer, run.points(name, layer)) for layer in range(run.layers(name))]
    return [(layer + 1.0, points[-1][1]) for layer, points in ends if points]


def _speed(runs: list[RunLog]) -> Figure | None:
    shown = [
        _panel(runs, "tokens_per_second", "Tokens per second", digits=0),
        _panel(runs, "mfu", "Share of the device's peak (MFU)", digits=4),
    ]
    if not any(shown):
        return None
    read = "Measured between log steps; validation and checkpoints between them are included."
    data = _tables(runs, [("tokens_per_second", None, "Tokens per second"), ("mfu", None, "MFU")])
    return Figure("speed", "Speed", (), read, panels(*shown) + _legend(runs), data=data)


def _memory(runs: list[RunLog]) -> Figure | None:
    return _multiples(
        runs, "memory", "Memory", "Memory of the first process in GB: allocated on its GPU, or resident on a CPU.",
        [("memory_bytes", None, "At the log step, GB"), ("peak_memory_bytes", None, "Peak so far, GB")], scale=1e-9,
    )  # fmt: skip


def _multiples(
    runs: list[RunLog], id: str, title: str, read: str, metrics: list[tuple[str, str | None, str]], **options
) -> Figure | None:
    shown = [_panel(runs, name, words, part, **options) for name, part, words in metrics]
    data = _tables(runs, metrics, options.get("scale", 1.0))
    return Figure(id, title, (), read, panels(*shown) + _legend(runs), data=data) if any(shown) else None


def _panel(
    runs: list[RunLog],
    name: str,
    title: str,
    part: str | int | None = None,
    *,
    marks: bool = False,
    frame: Callable[[list[Line]], tuple[float, float]] | None = None,
    scale: float = 1.0,
    digits: int = 3,
    log_y: bool = False,
    height: float = _LARGE,
) -> Html | None:
    """A chart of one metric of every run over the steps; None if no run has it."""
    curves = [(run, [(step, scale * value) for step, value in run.points(name, part)]) for run in runs]
    steps = sorted({step for _, points in curves for step, _ in points})
    if not steps or (log_y and not any(value > 0 for _, points in curves for _, value in points)):
        return None
    thin = [(run, thinned(points, steps, len(runs))) for run, points in curves if points]
    lines = [Line(run.label, points, run.side, marks=marks, read=True) for run, points in thin]
    y_range = frame(lines) if frame else None
    drawn = line_chart(
        title, lines, x_label="training step", y_range=y_range, digits=digits, log_y=log_y, height=height
    )
    return panel(title, drawn)


def thinned(points: list[Point], steps: list[float], runs: int) -> list[Point]:
    """At most a few dozen points, at steps that all lines of a chart share. Each is the mean since the previous one."""
    most = max(12, min(_POINTS, _TOTAL // runs))
    if len(steps) <= most:
        return points
    edges = sorted({steps[round((i + 1) * len(steps) / most) - 1] for i in range(most)})
    kept, rest = [], list(points)
    for edge in edges:
        within = [value for step, value in rest if step <= edge]
        rest = rest[len(within) :]
        if within:
            kept.append((edge, mean(within) or 0.0))
    return kept


def _after_the_start(lines: list[Line]) -> tuple[float, float]:
    """The range from just below the lowest value to the curves' height after a tenth of training."""
    low = min(value for line in lines for _, value in line.points)
    high = max(line.points[max(len(line.points) // 10, len(line.points) > 3)][1] for line in lines)
    room = (high - low) * 0.06 or 0.1
    return low - room, high + room


def _legend(runs: list[RunLog]) -> Html:
    return tag("p", join([key(run.side, run.label) for run in runs]), class_="legend")


def _tables(runs: list[RunLog], metrics: list[tuple[str, str | None, str]], scale: float = 1.0) -> Html | None:
    """A table for each metric (name, part, title) of any run: the value of every run by step."""
    made = [_table(runs, name, part, title, scale) for name, part, title in metrics]
    return join(made) if any(made) else None


def _table(runs: list[RunLog], name: str, part: str | None, label: str, scale: float) -> Html | None:
    columns = [{step: scale * value for step, value in run.points(name, part)} for run in runs]
    steps = sorted({step for column in columns for step in column})
    if not steps:
        return None
    apart = -(-len(steps) // max(8, min(40, _TOTAL // len(runs))))
    steps = steps[::-apart][::-1]  # the last one among them
    rows: list[list[object]] = [[f"step {s:,.0f}", *(_precise(column.get(s)) for column in columns)] for s in steps]
    return table([label, *(run.label for run in runs)], rows, label)


def _precise(value: float | None) -> str:
    return number(value, 4) if value is None or not 0 < abs(value) < 1e-2 else f"{value:.3e}"
