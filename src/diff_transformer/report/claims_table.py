"""The table of claims for a terminal."""

from rich.table import Table
from rich.text import Text

from diff_transformer.report.claims import TWO, interval, untested
from diff_transformer.report.pair import dicts

MARKS = {"held": ("✓", "green"), "did not hold": ("✗", "red"), "undecided": ("?", "yellow")}


def render_claims(results: dict) -> Table:
    """A rich table: claim, what the paper has, what was measured here, verdict. Text is literal, never markup."""
    shown = Table(title=Text(str(results.get("title") or "Claims")), title_justify="left", show_lines=True)
    shown.add_column("claim", ratio=3)
    order = " (Transformer / DIFF)" if any(TWO.match(str(c.get("here"))) for c in dicts(results.get("claims"))) else ""
    shown.add_column(f"paper{order}", ratio=2)
    shown.add_column(f"here{order}", ratio=3)
    shown.add_column("verdict", min_width=14)
    for claim in dicts(results.get("claims")):
        verdict = str(claim.get("verdict", "undecided"))
        mark, colour = MARKS.get(verdict, MARKS["undecided"])
        source = f"\n{claim['source']}" if claim.get("source") else ""
        shown.add_row(
            Text(str(claim.get("claim", ""))),
            Text(f"{claim.get('paper', '')}{source}"),
            Text("\n".join(part for part in (str(claim.get("here", "")), interval(claim), untested(claim)) if part)),
            Text(f"{mark} {verdict}", style=f"bold {colour}"),
        )
    if any("†" in str(c.get("paper")) for c in dicts(results.get("claims"))):
        shown.caption = Text("† from a third party's transcription of the paper", justify="left")
    return shown
