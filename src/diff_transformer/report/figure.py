"""A figure of the page: title, how to read it, what was found, the drawing, and the numbers behind it."""

import re
from dataclasses import dataclass, field

from diff_transformer.report.findings import LABELS, Finding
from diff_transformer.report.markup import Html, join, tag


@dataclass(frozen=True)
class Figure:
    """``source`` names the paper's tables and figures ("Table 2", "Fig. 5"); claims with one of them link here.
    ``data`` are the numbers behind the drawing, folded away; ``more`` stands below them."""

    id: str
    title: str
    source: tuple[str, ...]
    read: str
    body: Html
    findings: list[Finding | None] = field(default_factory=list)
    paper: str = ""
    data: Html | None = None
    more: Html | None = None

    def html(self, place: int, claims: Html) -> Html:
        """The section, as figure number ``place``; ``claims`` are the links to the verdicts it bears on."""
        origin = f"the paper's {' and '.join(self.source)}" if self.source else "not in the paper"
        found = [f for f in self.findings if f is not None]
        return tag(
            "section",
            tag("p", f"Figure {place}", tag("span", origin, class_="origin"), class_="eyebrow"),
            tag("h2", self.title, id=f"{self.id}-title"),
            tag("p", self.read, class_="read") if self.read else None,
            tag("ul", *(_finding(f) for f in found), class_="findings") if found else None,
            claims,
            tag("div", self.body, class_="body"),
            tag("p", tag("strong", "In the paper,"), " ", _together(self.paper), class_="paper-note")
            if self.paper
            else None,
            tag("details", tag("summary", "Data"), self.data, class_="more data-of") if self.data else None,
            self.more,
            id=self.id,
            class_="figure",
            aria_labelledby=f"{self.id}-title",
        )


def _together(words: str) -> str:
    """Numbers keep their unit on the same line."""
    return re.sub(r"(\d) (?=[BKT%†])", "\\1\u00a0", words)


def _finding(finding: Finding) -> Html:
    words = f"{LABELS[finding.outcome]}{' in this run' if finding.weak else ''}"
    label = tag("span", words, class_=f"who {finding.outcome}{' weak' if finding.weak else ''}")
    return tag("li", label, tag("span", finding.text, class_="said"))


def panels(*shown: Html | None, columns: int = 2) -> Html:
    """Charts side by side where there is room, one below the other on a phone."""
    return tag("div", *(s for s in shown if s is not None), class_=f"panels of-{columns}")


def legend(*extra: Html) -> Html:
    """The two models' colours and marks, the same on the whole page."""
    keys = [
        tag("span", tag("i", class_=f"swatch {side}", aria_hidden="true"), name, class_="key")
        for side, name in (("diff", "DIFF"), ("softmax", "Transformer"))
    ]
    return tag("p", join([*keys, *extra]), class_="legend")


def key(style: str, text: str) -> Html:
    """One more entry of the legend, drawn by the CSS class ``style``."""
    return tag("span", tag("i", class_=f"swatch {style}", aria_hidden="true"), text, class_="key")
