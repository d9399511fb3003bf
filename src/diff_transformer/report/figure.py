"""A figure of the page: title, reading instructions, findings, charts, and the numbers behind them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from diff_transformer.lab.stats import SEEDS_FOR_AN_INTERVAL, over_seeds
from diff_transformer.report.markup import Html, join, mean, number, plural, tag

LABELS = {
    "diff": "DIFF ahead",
    "softmax": "Transformer ahead",
    "level": "No clear difference",
    "note": "Note",
    "alarm": "Alarm",
}


@dataclass(frozen=True)
class Finding:
    """One finding. ``outcome`` is a key of LABELS: which model is ahead, neither, or a remark without a ranking.

    ``weak``: it is from so few seeds that another seed could change it."""

    outcome: str
    text: str
    weak: bool = False


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
        """The section with figure number ``place``; ``claims`` are links to the verdicts that it supports."""
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
    """Text in which numbers keep their unit on the same line."""
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


def versus(
    what: str, diff: dict[int, float], soft: dict[int, float], better: str, digits: int | None = 3, unit: str = ""
) -> Finding | None:
    """Compare one number of the two models: means, difference, and the certainty of its sign (see ``lead``).

    ``better`` is "lower" or "higher". None when a side is missing.
    """
    a, b = mean(diff), mean(soft)
    if a is None or b is None:
        return None
    gap = a - b
    values = f"{what}: DIFF {number(a, digits)}{unit}, Transformer {number(b, digits)}{unit}"
    if number(a, digits) == number(b, digits):
        return Finding("level", f"{values}; equal at this precision.")
    gaps = [diff[seed] - soft[seed] for seed in sorted(diff.keys() & soft.keys())]
    outcome, weak, seeds = lead(gaps, better, digits, unit)
    said = f"{values}; DIFF {'higher' if gap > 0 else 'lower'} by {number(abs(gap), digits)}{unit} ({seeds})."
    return Finding(outcome, said, weak)


def lead(gaps: Sequence[float], better: str, digits: int | None = 3, unit: str = "") -> tuple[str, bool, str]:
    """(which model is ahead, whether that is weak, the reason as text) from differences DIFF - Transformer by seed.

    With three seeds or more, a side is ahead if the 95 % interval over seeds excludes zero. With two seeds, it is
    weakly ahead if both agree; with one, always weakly.
    """
    centre = mean(gaps) or 0.0
    ahead = "diff" if (centre < 0) == (better == "lower") else "softmax"
    if len(gaps) < SEEDS_FOR_AN_INTERVAL:
        agree = sum(gap * centre > 0 for gap in gaps)
        seeds = f"the same sign in {agree} of {plural(len(gaps), 'seed')}" if len(gaps) > 1 else "one seed: no interval"
        return (ahead, True, seeds) if gaps and agree == len(gaps) else ("level", False, seeds)
    _, low, high, _ = over_seeds(gaps)
    seeds = f"95 % interval {number(low, digits, sign=True)} to {number(high, digits, sign=True)}{unit}"
    seeds += f" over {plural(len(gaps), 'seed')}"
    decided = low is not None and high is not None and (low > 0 or high < 0)
    return ahead if decided else "level", False, seeds
