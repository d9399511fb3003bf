"""The page of results: rows -> verdicts and figures -> one self-contained HTML file.

One page serves a comparison, experiments on any models, and a study, which has several settings.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from markupsafe import Markup

from diff_transformer.durable import write_whole
from diff_transformer.errors import UserError
from diff_transformer.lab.quantities import OF_TABLES, QUANTITIES, numbers_of, registered
from diff_transformer.lab.results import read_results
from diff_transformer.lab.rows import PART_OF, SETTINGS, TABLES, Rows, clean, told
from diff_transformer.lab.sides import BASELINE, CONTROLS, NAMES, PAIR, SOURCE, name_of
from diff_transformer.lab.verdicts import Outcome, Verdict, Verdicts, judge
from diff_transformer.report import words
from diff_transformer.report.explorer import examples

if TYPE_CHECKING:
    from diff_transformer.report.figures import Figure

logger = logging.getLogger("diff_transformer")

COSTS = ("parameters", "flops_per_token", "kv_bytes_per_token", "throughput", "throughput_forward")


def require_installed() -> None:
    """Raise UserError, before anything else is done, if what a page needs is missing."""
    from diff_transformer.checks import require_extra

    require_extra("report", "a report", "scipy", "vl_convert", "jinja2")


def write_report(sources: Sequence[Path | str] | Rows, out: Path | str, *, overwrite: bool = False) -> Path:
    """Write the page of some results and return its path.

    Args:
        sources: files of rows, folders of ``compare``, ``study`` or ``eval``; or their rows.
        out: the HTML file.

    Raises:
        UserError: if ``out`` exists and ``overwrite`` is False, or there is nothing to show.
    """
    out = _new_file(Path(out), overwrite)
    write_whole(out, render(sources if isinstance(sources, Rows) else read_results(*sources)).encode())
    return out


def write_picture(rows: Rows, figure: str, out: Path, *, overwrite: bool = False) -> Path:
    """Draw one figure of the page as an SVG file in light colours and return its path.

    Raises:
        UserError: if ``out`` exists and ``overwrite`` is False, or for an unknown figure or one without rows.
    """
    from diff_transformer.checks import require_known
    from diff_transformer.report.charts import names_of, picture
    from diff_transformer.report.figures import FIGURES, of_own

    known = {each.id: each for each in FIGURES}
    known |= {name: of_own(name) for name in rows.experiments if name not in TABLES}
    require_known("figure", figure, known)
    chosen = known[figure]
    if not len(rows[chosen.table]):
        raise UserError(f"these results have no rows of {chosen.table}, which {figure} is drawn from")
    if len(settings := [setting for setting in rows.settings if setting]) > 1:
        raise UserError(f"these results have the settings {', '.join(settings)}; choose one with --setting")
    sides = names_of([side for side in rows.sides if (rows[chosen.table]["side"] == side).any()])
    _new_file(out, overwrite)
    write_whole(out, picture(chosen.panels(rows, sides), sides))
    return out


def _new_file(out: Path, overwrite: bool) -> Path:
    if out.exists() and not overwrite:
        raise UserError(f"{out} exists; choose another file, or give --overwrite")
    require_installed()
    out.parent.mkdir(parents=True, exist_ok=True)
    return out


def ours_and_others(rows: Rows) -> tuple[str, list[str]]:
    """The side whose claims are judged, and those it is compared with; "" and none without a pair.

    It is one of this package or of a study, as a model from elsewhere is no counterpart of a Transformer.
    """
    ours, baseline = PAIR
    if ours not in rows.sides:
        studied = rows.only(setting=[setting for setting in rows.settings if setting]).sides
        known = [side for side in rows.sides if side in NAMES or side in studied]
        ours = next((side for side in known if side not in (baseline, *CONTROLS, SOURCE)), "")
    others = [side for side in (baseline, *CONTROLS) if side in rows.sides]
    return (ours, others) if ours and baseline in others else ("", [])


def judged(rows: Rows) -> tuple[str, Verdicts]:
    """The side whose claims are judged, and the verdicts; "" and none without a pair."""
    ours, others = ours_and_others(rows)
    return ours, judge(rows, ours, others) if ours else {}


@dataclass
class Drawn:
    """A figure of the page, drawn for wide and for narrow screens."""

    figure: "Figure"
    sides: dict[str, str]
    wide: str = ""
    narrow: str = ""
    table: pd.DataFrame = field(default_factory=pd.DataFrame)
    settings: str = ""
    examples: tuple = ((), ())
    error: str = ""


@dataclass
class Section:
    """The part of the page about one setting."""

    setting: str
    place: str
    rows: Rows
    sides: dict[str, str]
    ours: str
    others: list[str]
    verdicts: Verdicts
    plots: dict[str, Markup]
    variants: Verdicts
    values: list
    figures: list[Drawn]


def render(rows: Rows) -> str:
    """The whole page.

    Raises:
        UserError: if there is nothing to show.
    """
    import jinja2

    from diff_transformer.report.charts import names_of

    if not rows.sides:
        raise UserError("these results have no rows of a model; give results of compare, study or eval")
    sides = names_of(rows.sides)
    named = [setting for setting in rows.studied if setting]
    several = len(named) > 1
    parts = [rows.only(setting=[setting, ""]) for setting in named] if several else [rows.only(setting=[*named, ""])]
    sections = [_section(part, sides, str(place), brief=several) for place, part in enumerate(parts)]
    texts, left_out = examples(rows, sides)
    loader = jinja2.FunctionLoader(lambda name: (files("diff_transformer.report") / "templates" / name).read_text())
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters |= {
        "num": words.number,
        "short": words.short,
        "p_value": words.p_value,
        "plural": lambda n, word: words.plural(n, word),
    }
    first = sections[0]
    return environment.get_template("page.html").render(
        sections=sections, sides=sides, Outcome=Outcome, words=words, several=several, rows=rows, explorer=texts,
        left_out=left_out, facts=words.facts(first.rows), caveats=words.caveats(first.rows, first.verdicts),
        run=rows.about("run"), training=rows.about("training"), comparison=rows.about("comparison"),
        costs=[QUANTITIES[id] for id in COSTS if any(QUANTITIES[id].values(first.rows, side) for side in sides)],
    )  # fmt: skip


def _section(rows: Rows, sides: dict[str, str], prefix: str, brief: bool) -> Section:
    """One setting: verdicts on the pair, every other model against the Transformer, and the figures."""
    from diff_transformer.report.charts import NARROW, forest, svg

    ours, others = ours_and_others(rows)
    quantities = [QUANTITIES[id] for id in OF_TABLES] if brief else None
    verdicts = judge(rows, ours, others, quantities) if ours else {}
    drawn = {id: of for id, of in verdicts.items() if next(iter(of.values())).quantity.claim}
    sizes = {"wide": (700, False), "narrow": (NARROW - 20, True)} if drawn and not brief else {}
    plots = {name: svg(forest(drawn, sides, *size), f"{prefix}forest{name}") for name, size in sizes.items()}
    variants: Verdicts = {}
    for side in rows.sides if ours else []:
        if side not in (BASELINE, ours):
            for id, of in judge(rows, side, [BASELINE], [QUANTITIES["loss"], QUANTITIES["validation_loss"]]).items():
                variants.setdefault(side, {})[id] = of[BASELINE]
    alone = [] if verdicts else [(q, {side: q.average(rows, side) for side in rows.sides}) for q in registered(rows)]
    values = [(q, of) for q, of in alone if any(found.examples for found in of.values())]
    shown = ("losses",) if brief and len(rows["validation"]) else None
    return Section(
        str(next((setting for setting in rows.settings if setting), "")), prefix, rows,
        {side: sides[side] for side in rows.sides}, ours, others, verdicts, plots, variants, values,
        _figures(rows, sides, prefix, shown),
    )  # fmt: skip


def _figures(rows: Rows, sides: dict[str, str], prefix: str, only: Sequence[str] | None) -> list[Drawn]:
    """The registered figures, and one of each experiment that is not one of this package."""
    from diff_transformer.report.figures import FIGURES, of_own

    chosen = [each for each in FIGURES if len(rows[each.table]) and (only is None or each.id in only)]
    if only is None:
        chosen += [of_own(name) for name in rows.experiments if name not in TABLES and numbers_of(name, rows)]
    return [_drawn(rows, sides, each, f"{prefix}{place}") for place, each in enumerate(chosen)]


def _drawn(rows: Rows, sides: dict[str, str], figure: "Figure", prefix: str) -> Drawn:
    """The figure; one that raises is named on the page with its error, and the others are drawn."""
    from diff_transformer.report.charts import NARROW, WIDE, draw, numbers, svg

    table = figure.table
    shown = {side: name for side, name in sides.items() if (rows[table]["side"] == side).any()}
    drawn = partial(Drawn, figure, shown)
    try:
        of = figure.panels(rows, shown)
        across = min(max(len(of), 2), 3)
        wide, narrow = draw(of, sides, WIDE / across - 66, across), draw(of, sides, NARROW - 60, 1)
        return drawn(
            svg(wide, f"{prefix}w"), svg(narrow, f"{prefix}n"), numbers(of, shown), _settings(rows, table, shown),
            words.examples_of(rows, table),
        )  # fmt: skip
    except Exception as error:
        logger.warning("the figure %s cannot be drawn", figure.title, exc_info=True)
        return drawn(error=f"{type(error).__name__}: {clean(str(error))[:300]}")


def _settings(rows: Rows, experiment: str, sides: dict[str, str]) -> str:
    """The settings of an experiment; where models were measured with other ones, whose is which."""
    by_side = {side: rows.about(PART_OF.get(experiment, experiment), side=side) for side in sides}
    keys = [key for key in SETTINGS if any(of.get(key) for of in by_side.values())]
    lines = []
    for key in keys:
        values = {side: told(of.get(key)) for side, of in by_side.items()}
        if len(set(values.values())) == 1:
            lines.append(f"{key} {next(iter(values.values()))}")
        else:
            lines.append(f"{key} differs: {', '.join(f'{sides[side]} {value}' for side, value in values.items())}")
    notes = dict.fromkeys(str(of[key]) for of in by_side.values() for key in ("note", "asked") if of.get(key))
    return "; ".join([*lines, *notes])


def terminal_table(verdicts: Verdicts, ours: str) -> Any:
    """The verdicts as a table for a terminal of 80 columns: a line for each claim, a column for each other model."""
    from rich import box
    from rich.table import Table

    others = list(dict.fromkeys(other for of in verdicts.values() for other in of))
    seeds = max(verdict.difference.seeds for of in verdicts.values() for verdict in of.values())
    table = Table(
        title=f"{name_of(ours)} minus another model, {words.plural(seeds, 'seed')}, 95 % CI", title_justify="left",
        box=box.SIMPLE, pad_edge=False,
    )  # fmt: skip
    table.add_column("claim", max_width=34)
    for other in others:
        table.add_column(name_of(other), max_width=26)
    for of in verdicts.values():
        claim = next(iter(of.values())).quantity
        table.add_row(claim.claim or claim.name, *(_terminal_cell(of.get(other)) for other in others))
    return table


def _terminal_cell(verdict: Verdict | None) -> str:
    if verdict is None:
        return ""
    difference, relative = verdict.difference, verdict.quantity.relative
    scale, unit = (100, " %") if relative else (1, "")
    outcome = "not tested" if verdict.untested else verdict.outcome.value
    text = f"{words.number(scale * difference.mean, True)}{unit} {outcome}"
    if difference.low is None or difference.high is None:
        return text
    low, high = (words.number(scale * end, True) for end in (difference.low, difference.high))
    return f"{text}\n{low} to {high}{unit}"
