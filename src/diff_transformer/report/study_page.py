"""The page of a study: for each setting the loss of every model over its seeds, and the paired differences."""

from collections.abc import Iterable
from pathlib import Path

from diff_transformer.checks import read_json
from diff_transformer.lab.measures import (
    MEASURES,
    Row,
    after_holm,
    borrow_baselines,
    decided,
    final_loss,
    paired_rows,
    trained,
)
from diff_transformer.lab.record import FILE, Cells, Record, RecordError, grouped, load_all
from diff_transformer.lab.sides import BASELINE, name_of
from diff_transformer.report.charts import Line, Point, averaged, line_chart, row_chart
from diff_transformer.report.charts import Row as Drawn
from diff_transformer.report.figure import Figure, key, panels
from diff_transformer.report.load import ResultsError
from diff_transformer.report.markup import Html, join, mean, number, plural, table, tag
from diff_transformer.report.models import sides_of
from diff_transformer.report.page import contents, fill_page, save_page
from diff_transformer.report.render import panel

_CAVEATS = (
    "Differences are paired by seed. Intervals are Student's, 95 % over seeds, without a correction for the number of "
    "measures: of measures without any effect, one in twenty excludes zero. Below each table of measures it says how "
    "many stay significant after Holm's correction. Results on small models hold for models of that size."
)


def is_study(path: Path | str) -> bool:
    """True if ``path`` is a folder that ``diff-transformer study`` wrote, or a record of one."""
    path = Path(path)
    if path.is_dir():
        runs = (path.glob(f"{setting}/*/{FILE}") for setting in ("*", "sweep/*"))
        return not (path / "compare.json").exists() and any(map(any, runs))
    try:
        value = read_json(path)
    except (OSError, ValueError):
        return False
    return isinstance(value, dict) and isinstance(value.get("records"), list)


def write_study_report(source: Path | str, path: Path | str, *, overwrite: bool = False) -> Path:
    """Write the page of a study, finished or not, and return its path.

    Args:
        source: the study's folder, or a JSON record of its cells.

    Raises:
        FileExistsError: if ``path`` exists and ``overwrite`` is False.
        ResultsError: if no cell of ``source`` is finished.
    """
    return save_page(lambda: render_study_page(load_cells(source)), path, overwrite=overwrite)


def load_cells(source: Path | str) -> Cells:
    """The records of a study's finished runs, by setting, side and seed."""
    try:
        cells = grouped(record for record in load_all(source) if record.setting)
    except RecordError:
        cells = {}
    if not cells:
        raise ResultsError(f"{source} holds no finished run of a study; continue it with `diff-transformer study`")
    return cells


def render_study_page(cells: Cells) -> str:
    """The whole page as a string, of the models that have a curve of validation loss.

    Raises:
        ResultsError: if none has.
    """
    cells = {name: kept for name, sides in cells.items() if (kept := _with_curves(sides))}
    if not cells:
        raise ResultsError("no run of this study keeps its validation loss, which this page is of; see its README")
    settings = {name: sides for name, sides in borrow_baselines(cells, BASELINE).items() if "/" not in name}
    sweep = {name: sides for name, sides in cells.items() if "/" in name}
    names = list(dict.fromkeys(side for sides in cells.values() for side in sides))
    marks = dict(
        zip(names, sides_of(["softmax" if name == BASELINE else "diff" for name in names], names), strict=True)
    )
    figures = [_setting(name, kept, marks) for name, sides in settings.items() if (kept := _trained(sides))]
    for size in dict.fromkeys(map(_swept, sweep)):
        figures.append(_sweep(size, {name: sides for name, sides in sweep.items() if _swept(name) == size}, marks))
    runs = sum(len(seeds) for sides in cells.values() for seeds in sides.values())
    said = f"{plural(runs, 'run')} in {plural(len(cells), 'setting')}"
    return fill_page(
        title="A study of matched pairs",
        description=f"{said}.",
        first_screen=_first_screen(settings, said),
        contents=contents([(figure.id, figure.title) for figure in figures]),
        figures=join(figure.html(place, Html("")) for place, figure in enumerate(figures, 1)),
        caveats=tag("section", tag("h2", "Caveats", id="caveats-title"), tag("p", _CAVEATS), id="caveats"),
    )


def _with_curves(sides: dict[str, dict[int, Record]]) -> dict[str, dict[int, Record]]:
    """Without models that have no such curve, as the source of a conversion, which is not trained."""
    of = {
        side: {seed: one for seed, one in seeds.items() if "validation" in one.curves or one.diverged}
        for side, seeds in sides.items()
    }
    return {side: seeds for side, seeds in of.items() if seeds}


def _trained(sides: dict[str, dict[int, Record]]) -> dict[str, dict[int, Record]]:
    """The seeds of each side whose training did not diverge; sides without such a seed are left out."""
    return {side: kept for side, seeds in sides.items() if (kept := trained(seeds))}


def _first_screen(settings: Cells, said: str) -> Html:
    head: list[object] = [
        "setting: model",
        "seeds",
        "validation loss",
        f"difference from the {name_of(BASELINE)}",
        "95 % CI",
        "lower?",
    ]
    rows: list[list[object]] = []
    for name, sides in settings.items():
        for side, seeds in sides.items():
            kept = trained(seeds)
            paired = _rows(sides, side, [final_loss()])
            more = _cells(paired[0]) if paired else ["", "", ""]
            counted = str(len(seeds)) if len(kept) == len(seeds) else f"{len(seeds)}, {len(seeds) - len(kept)} diverged"
            setting = next(iter(seeds.values())).setting
            of = "" if setting == name else f", of {setting}"  # a baseline that is borrowed
            rows.append([f"{name}: {name_of(side)}{of}", counted, number(mean(map(_last, kept.values())), 3), *more])
    lead = tag(
        "p",
        f"{said}. Each model is compared with the Transformer of the same seed, "
        "where a setting has none with that of one alike.",
        class_="lead",
    )
    return join([tag("h1", "A study of matched pairs"), lead, table(head, rows, "Final validation loss")])


def _rows(sides: dict[str, dict[int, Record]], side: str, measures: Iterable) -> list[Row]:
    return [] if side == BASELINE else paired_rows({"": sides}, "", side, measures, BASELINE)


def _cells(row: Row) -> list[object]:
    difference, low, high, _ = row.difference
    interval = "" if low is None else f"{number(low, 3, sign=True)} to {number(high, 3, sign=True)}"
    return [number(difference, 3, sign=True), interval, decided(row)]


def _setting(name: str, sides: dict[str, dict[int, Record]], marks: dict[str, str]) -> Figure:
    lines = []
    for side, seeds in sides.items():
        curves = [_curve(record) for record in seeds.values()]
        lines += [Line(name_of(side), curve, marks[side], thin=True) for curve in curves if len(curves) > 1]
        lines.append(Line(name_of(side), averaged(curves), marks[side], read=True))
    ends = [value for line in lines for _, value in line.points[len(line.points) // 5 :]]
    room = 0.06 * (max(ends) - min(ends)) or 0.1
    drawn = line_chart(
        f"{name}: validation loss", lines, x_label="training step", y_range=(min(ends) - room, max(ends) + room)
    )
    differences = [
        Drawn(name_of(side), marks[side], {seed: _last(seeds[seed]) - _last(sides[BASELINE][seed]) for seed in shared})
        for side, seeds in sides.items()
        if side != BASELINE and (shared := sorted(seeds.keys() & sides.get(BASELINE, {}).keys()))
    ]
    shown = [panel("Validation loss, nats per token", drawn)]
    if differences:
        rows = row_chart(
            f"{name}: differences",
            differences,
            x_label=f"final validation loss, difference from the {name_of(BASELINE)}",
            guide=0,
        )
        shown.append(panel("Difference of each pair", rows))
    return Figure(
        id=f"setting-{name}",
        title=_title(name, sides),
        source=(),
        read="Thin lines and small marks are seeds, thick lines and large marks their means. The first fifth of "
        "training may lie above the frame.",
        body=panels(*shown) + _legend(sides, marks),
        data=join(_measures(sides, side) for side in sides if side != BASELINE),
    )


def _title(name: str, sides: dict[str, dict[int, Record]]) -> str:
    record = next(iter(next(iter(sides.values())).values()))
    model = record.config["model"]
    sizes = f"{model['num_hidden_layers']} layers of width {model['hidden_size']}"
    return f"{name}: {sizes}, {model['num_attention_heads']} maps, {record.steps:,} steps"


def _measures(sides: dict[str, dict[int, Record]], side: str) -> Html | None:
    rows = _rows(sides, side, MEASURES)
    if not rows:
        return None
    named = [plural(rows[0].seeds, "pair"), name_of(BASELINE), name_of(side)]
    head: list[object] = [*named, "difference", "95 % CI", "as the paper says"]
    cells = [[row.measure, number(row.baseline, 3), number(row.side, 3), *_cells(row)] for row in rows]
    said = after_holm(rows)
    return join([table(head, cells, side), tag("p", said) if said else None])


def _swept(setting: str) -> str:
    """The subject of the sweep of this setting, "sweep/small_lr0.001" or "sweep/lr0.001": "small" or ""."""
    return setting.partition("/")[2].rpartition("lr")[0].rstrip("_")


def _sweep(size: str, sweep: Cells, marks: dict[str, str]) -> Figure:
    """Losses by learning rate; ``size`` tells several sweeps of a study apart."""
    points: dict[str, list[Point]] = {}
    said: dict[float, dict[str, str]] = {}
    for sides in sweep.values():
        for side, seeds in sides.items():
            for record in seeds.values():
                lost = record.diverged
                said.setdefault(record.lr, {})[side] = "diverged" if lost else number(_last(record), 3)
                points.setdefault(side, []).extend([] if lost else [(record.lr, _last(record))])
    lines = [Line(name_of(side), sorted(found), marks[side], marks=True) for side, found in points.items() if found]
    drawn = line_chart(f"sweep {size}".strip(), lines, x_label="learning rate", log_x=True) if lines else None
    shown = [panel("Validation loss, nats per token", drawn)] if drawn is not None else []
    rows: list[list[object]] = [
        [f"{rate:g}", *(said[rate].get(side, number(None)) for side in points)] for rate in sorted(said)
    ]
    return Figure(
        f"sweep-{size}" if size else "sweep", f"Learning rates: {size}" if size else "Learning rates", (),
        "Final validation loss by learning rate. A run that diverged has no mark.",
        panels(*shown, columns=1) + _legend(points, marks),
        data=table(["learning rate", *map(name_of, points)], rows, "Learning rates"),
    )  # fmt: skip


def _legend(sides: Iterable[str], marks: dict[str, str]) -> Html:
    return tag("p", join([key(marks[side], name_of(side)) for side in sides]), class_="legend")


def _curve(record: Record) -> list[Point]:
    curve = record.curves["validation"]
    points = list(zip(curve["step"], curve["loss"], strict=True))
    return points[1:] if len(points) > 2 else points


def _last(record: Record) -> float:
    return record.final_loss
