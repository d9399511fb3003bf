"""Tables of results in Markdown, for README files."""

from collections.abc import Sequence

from diff_transformer.checks import require_known
from diff_transformer.errors import UserError
from diff_transformer.lab.quantities import OF_TABLES, QUANTITIES, Quantity, further, registered
from diff_transformer.lab.rows import Rows
from diff_transformer.lab.sides import BASELINE, name_of
from diff_transformer.lab.stats import Average
from diff_transformer.lab.verdicts import judge
from diff_transformer.report.words import number, p_value


def markdown(rows: Rows, quantities: Sequence[str] | None = None) -> str:
    """For each setting a line for each side and quantity: means over seeds, and differences from the Transformer.

    Where no Transformer is beside the models, a line for each quantity with the number of each model.

    Args:
        quantities: ids of those to show.

    Raises:
        UserError: for an unknown quantity.
    """
    known = {quantity.id: quantity for quantity in registered(rows)} | QUANTITIES
    for name in quantities or ():
        require_known("quantity", name, known)
    chosen = [known[name] for name in quantities] if quantities else None
    parts = []
    for setting in rows.studied:
        of = rows.only(setting=setting)
        several = BASELINE in of.sides and len(of.sides) > 1
        if shown := (several and _differences(of, chosen)) or _values(of, chosen):
            parts.append(f"**{setting}**\n\n{shown}" if setting else shown)
    if not parts:
        raise UserError("these results have none of the quantities of a table; choose others with --quantity")
    return "\n\n".join(parts)


def _differences(rows: Rows, chosen: list[Quantity] | None) -> str:
    lines = [
        "| model | quantity | Transformer | model | difference (95 % CI) | seeds | p, Holm | verdict |",
        "|---" * 8 + "|",
    ]
    cells = [of for of in registered(rows) if of.experiment == "needle" and of.id not in OF_TABLES]
    every = [*(QUANTITIES[id] for id in OF_TABLES), *cells, *further(rows)]
    for side in rows.sides:
        if side == BASELINE:
            continue
        for of in judge(rows, side, [BASELINE], chosen or every).values():
            verdict = of[BASELINE]
            difference, (theirs, ours) = verdict.difference, verdict.here
            ends = (
                ""
                if difference.low is None
                else f" ({number(difference.low, True)} to {number(difference.high, True)})"
            )
            adjusted = "" if verdict.holm is None else p_value(verdict.holm)
            outcome = ("not tested" if verdict.untested else verdict.outcome.value) if verdict.quantity.better else ""
            cells = (
                name_of(side), verdict.quantity.name, number(theirs), number(ours),
                f"{number(difference.mean, True)}{ends}", str(difference.seeds), adjusted, outcome,
            )  # fmt: skip
            lines.append(_line(cells))
    return "\n".join(lines) if len(lines) > 2 else ""


def _line(cells: Sequence[str]) -> str:
    """A line of a table; a bar in a name does not end its cell."""
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _values(rows: Rows, chosen: list[Quantity] | None) -> str:
    """A line a quantity: the number of each model, with its 95 % interval and number of examples."""
    lines = [_line(["quantity", *map(name_of, rows.sides)]), "|---" * (len(rows.sides) + 1) + "|"]
    for quantity in chosen or registered(rows):
        means = [quantity.average(rows, side) for side in rows.sides]
        if any(of.examples for of in means):
            lines.append(_line([quantity.name, *map(_cell, means)]))
    return "\n".join(lines) if len(lines) > 2 else ""


def _cell(of: Average) -> str:
    if not of.examples:
        return ""
    ends = f" ({number(of.low)} to {number(of.high)})" if of.low < of.high else ""
    return f"{number(of.mean)}{ends}, n {of.examples:,}"
