"""Lambda of every layer over training."""

from diff_transformer.lab.paper import SAID
from diff_transformer.report.charts import Line, Point, averaged, bucketed, category_chart, line_chart
from diff_transformer.report.figure import Figure, Finding, panels
from diff_transformer.report.markup import Html, is_number, number, plural, table
from diff_transformer.report.models import Results
from diff_transformer.report.render import Chart, panel

Layers = list[list[Point]]  # for each layer, its points (step, lambda)


def build(results: Results) -> Figure | None:
    """Lambda by layer over training, and its final value beside lambda_init."""
    styles = results.styles()
    curves = {
        record.seed: record.curves["lambda"]
        for record in results.records
        if record.curves.get("lambda") and styles[record.side] == "diff"
    }
    seeds = {seed: _layers(curve) for seed, curve in curves.items()}
    seeds = {seed: layers for seed, layers in seeds.items() if layers and all(layers)}
    if not seeds:
        return None
    count = min(len(layers) for layers in seeds.values())
    initial = next((curve["init"] for curve in curves.values() if curve.get("init")), None)
    start = [v if is_number(v) else None for v in initial or []][:count]
    start += [None] * (count - len(start))
    return Figure(
        id="lambda",
        title="Lambda, layer by layer",
        source=("Section 2.1",),
        read="Lambda is the weight of the second map, which is subtracted. Darker lines are deeper layers. Below "
        "0, the second map would be added; above 1, more than the whole second map is subtracted.",
        body=panels(
            panel("Lambda during training", _over_training(seeds, count)),
            panel("Last lambda and where it started", _final(seeds, start)),
        )
        + _legend(len(seeds)),
        findings=[_range(seeds), _movement(seeds, start)],
        paper=SAID["lambda"],
        data=_data(seeds, start),
        folded=True,
    )


def _layers(curve: dict) -> Layers:
    rows = curve.get("layers") or []
    count = min((len(row) for row in rows if isinstance(row, list)), default=0)
    pairs = [
        (s, r) for s, r in zip(curve.get("step") or [], rows, strict=False) if is_number(s) and isinstance(r, list)
    ]
    return [[(float(s), float(row[i])) for s, row in pairs if is_number(row[i])] for i in range(count)]


def shade(layer: int, count: int) -> str:
    """The colour of a layer: a shade of DIFF's colour, darker for deeper layers."""
    share = 45 + 55 * layer / max(count - 1, 1)
    return f"color-mix(in oklab, var(--diff) {share:.0f}%, var(--pale))"


def _over_training(seeds: dict[int, Layers], count: int) -> Chart:
    lines = []
    every = max(1, -(-count // 10))
    for layer in range(count):
        runs = [layers[layer] for layers in seeds.values()]
        colour = shade(layer, count)
        if len(runs) > 1:
            lines += [Line("", bucketed(run, 40), thin=True, colour=colour) for run in runs]
        named = f"layer {layer + 1}" if layer % every == 0 or layer == count - 1 else ""
        middle = bucketed(averaged(runs), 40)
        lines.append(Line(f"layer {layer + 1}", middle, colour=colour, read=True, end_label=named))
    values = [v for line in lines for _, v in line.points]
    limits = (min(0.0, *values) - 0.03, max(1.0, *values) + 0.06)
    guides = [(1.0, "1: alarm above"), (0.0, "0: alarm below")]
    return line_chart(
        "Lambda of each layer over training steps",
        lines,
        x_label="training step",
        y_range=limits,
        guides=guides,
        height=240,
    )


def _final(seeds: dict[int, Layers], start: list[float | None]) -> Chart:
    last = [{seed: layers[i][-1][1] for seed, layers in seeds.items()} for i in range(len(start))]
    initial: list[dict[int, float]] = [{} if v is None else {0: v} for v in start]
    values = [v for by_seed in [*last, *initial] for v in by_seed.values()]
    step = max(1, -(-len(start) // 12))
    return category_chart(
        "Last lambda of each layer, beside lambda_init",
        [str(i + 1) if i % step == 0 else "" for i in range(len(start))],
        {"init": initial, "diff": last},
        x_label="layer",
        y_range=(min(0.0, *values) - 0.03, max(1.0, *values) + 0.06),
        height=240,
        names={"init": "lambda_init", "diff": "last lambda"},
    )


def _legend(seeds: int) -> Html:
    words = "disc: last value" + (f" (mean of {plural(seeds, 'seed')}, small discs single seeds)" if seeds > 1 else "")
    return Html(f'<p class="legend"><span class="key"><i class="swatch diff"></i>{words}</span>'
                '<span class="key"><i class="swatch init"></i>diamond: lambda_init</span></p>')  # fmt: skip


def _range(seeds: dict[int, Layers]) -> Finding:
    points = [(v, s, layer + 1, seed) for seed, ls in seeds.items() for layer, run in enumerate(ls) for s, v in run]
    low, high = min(points), max(points)
    outside = [p for p in (low, high) if not 0 <= p[0] <= 1]
    if outside:
        said = "; ".join(f"{number(v)} in layer {la} at step {s:,.0f}, seed {seed}" for v, s, la, seed in outside)
        return Finding("alarm", f"Lambda left the range 0 to 1: {said}.")
    return Finding("note", f"Lambda stayed between {number(low[0])} and {number(high[0])} in every layer and seed.")


def _movement(seeds: dict[int, Layers], start: list[float | None]) -> Finding | None:
    moves = [
        (abs(gap), gap, i + 1)
        for i, initial in enumerate(start)
        if initial is not None
        for gap in [sum(ls[i][-1][1] for ls in seeds.values()) / len(seeds) - initial]
    ]
    if not moves:
        return None
    _, gap, layer = max(moves)
    return Finding("note", f"The largest move from lambda_init is {number(gap, 3, sign=True)}, in layer {layer}.")


def _data(seeds: dict[int, Layers], start: list[float | None]) -> Html:
    head: list[object] = [
        "",
        "lambda_init",
        *(f"first logged, seed {s}" for s in seeds),
        *(f"last, seed {s}" for s in seeds),
    ]
    rows: list[list[object]] = [
        [
            f"layer {i + 1}",
            number(initial, 4),
            *(number(layers[i][0][1], 4) for layers in seeds.values()),
            *(number(layers[i][-1][1], 4) for layers in seeds.values()),
        ]
        for i, initial in enumerate(start)
    ]
    return table(head, rows, "Lambda by layer")
