"""A figure of the page: title, reading instructions, findings, charts, and the numbers behind them."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from diff_transformer.lab.stats import SEEDS_FOR_AN_INTERVAL, over_seeds
from diff_transformer.report.markup import Html, is_number, join, mean, number, plural, tag

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

    ``weak``: it is from so few seeds that another seed could change it. ``gap``: the difference of two models and its
    interval, a part of ``text``."""

    outcome: str
    text: str
    weak: bool = False
    gap: str = ""


@dataclass(frozen=True)
class Figure:
    """``source`` names the paper's tables and figures ("Table 2", "Fig. 5"); claims with one of them link here.
    ``data`` are the numbers behind the drawing, folded away like ``read`` and ``paper``; ``more`` stands below them.
    ``folded``: only title and findings are open, for charts that say no more than those."""

    id: str
    title: str
    source: tuple[str, ...]
    read: str
    body: Html
    findings: list[Finding | None] = field(default_factory=list)
    paper: str = ""
    data: Html | None = None
    more: Html | None = None
    folded: bool = False

    def html(self, place: int, claims: Html) -> Html:
        """The section with figure number ``place``; ``claims`` are links to the verdicts that it supports."""
        origin = f"the paper's {' and '.join(self.source)}" if self.source else "not in the paper"
        found = [f for f in self.findings if f is not None]
        body = tag("div", self.body, class_="body")
        folds = [
            folded("Charts", body) if self.folded else None,
            folded("How to read it", tag("p", self.read, class_="read")) if self.read else None,
            folded("In the paper", tag("p", _together(self.paper), class_="paper-note")) if self.paper else None,
            tag("details", tag("summary", "Data"), self.data, class_="more data-of") if self.data else None,
        ]
        return tag(
            "section",
            tag("p", f"Figure {place}", tag("span", origin, class_="origin"), class_="eyebrow"),
            tag("h2", self.title, id=f"{self.id}-title"),
            claims,
            tag("ul", *(_finding(f) for f in found), class_="findings") if found else None,
            None if self.folded else body,
            tag("div", *(fold for fold in folds if fold is not None), class_="folds"),
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


def folded(title: str, *shown: object) -> Html:
    """Content that opens at a click."""
    return tag("details", tag("summary", title), *shown, class_="more")


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
    values = f"{what}: DIFF {number(a, digits)}{unit}, Transformer {number(b, digits)}{unit}"
    if number(a, digits) == number(b, digits):
        return Finding("level", f"{values}; equal at this precision.", gap="equal at this precision")
    shared = sorted(diff.keys() & soft.keys())
    gaps = [diff[seed] - soft[seed] for seed in shared]
    outcome, weak, seeds = lead(gaps, better, digits, unit)
    paired = [sum(side[seed] for seed in shared) / len(shared) for side in (diff, soft)] if shared else [a, b]
    gap = paired[0] - paired[1]
    said = f"DIFF {'higher' if gap > 0 else 'lower'} by {number(abs(gap), digits)}{unit} ({seeds})"
    return Finding(outcome, f"{values}; {said}.", weak, said)


def found_of(what: str, claim: dict, better: str, digits: int | None = 3, unit: str = "") -> Finding | None:
    """The same from a claim: values, difference and interval as the table of claims has them.

    ``claim``: with the values by seed, ``diff`` and ``softmax``, and the ``difference``. None without a number.
    """
    a, b = (mean(seeds_of(claim, side)) for side in ("diff", "softmax"))
    middle, low, high = (claim["difference"].get(end) for end in ("mean", "low", "high"))
    if a is None or b is None or not is_number(middle):
        return None
    values = f"{what}: DIFF {number(a, digits)}{unit}, Transformer {number(b, digits)}{unit}"
    ahead = "diff" if (middle < 0) == (better == "lower") else "softmax"
    known = is_number(low) and is_number(high)
    decided = low > 0 or high < 0 if known else middle != 0 and one_run(claim)
    weak = max(len(seeds_of(claim, side)) for side in ("diff", "softmax")) < SEEDS_FOR_AN_INTERVAL
    said = interval(claim)
    return Finding(ahead if decided else "level", f"{values}; {said}.", weak and decided, said)


def one_run(claim: dict) -> bool:
    """True if the verdict rests on one run of each model."""
    return max(len(seeds_of(claim, side)) for side in ("diff", "softmax")) == 1


def seeds_of(claim: dict, side: str) -> list[float]:
    """The values of a side by seed."""
    values = claim.get(side)
    return [float(v) for v in values if is_number(v)] if isinstance(values, list) else []


def interval(claim: dict) -> str:
    """The difference of the two models, and its interval over seeds or examples if there is one."""
    difference = claim.get("difference")
    difference = difference if isinstance(difference, dict) else {}
    seeds = max(len(seeds_of(claim, "diff")), len(seeds_of(claim, "softmax")))
    low, middle, high = amounts([difference.get(k) for k in ("low", "mean", "high")], bool(difference.get("relative")))
    said = [f"difference {middle}"] if middle else []
    if low and high and difference["low"] < difference["high"]:
        if difference.get("over") == "examples":
            said.append(
                f"interval over examples {low} to {high} ({'one seed' if seeds == 1 else plural(seeds, 'seed')})"
            )
        else:
            examples = " and their examples" if difference.get("over") == "seeds and examples" else ""
            said.append(f"interval over {plural(seeds, 'seed')}{examples} {low} to {high}")
    elif seeds and "no interval" not in str(claim.get("here")):
        said.append("one seed: no interval" if seeds == 1 else "no interval")
    return ", ".join(said)


def amounts(values: list, relative: bool) -> list[str]:
    """Signed numbers, in per cent when relative, with enough decimals that only 0 is written as 0."""
    scale, unit = (100, " %") if relative else (1, "")
    sizes = [abs(scale * v) for v in values if is_number(v) and v != 0]
    wanted = [next((d for d, least in ((0, 100), (1, 10), (2, 1)) if max(sizes) >= least), 3)] if sizes else [0]
    wanted += [min(5, -math.floor(math.log10(min(sizes))))] if sizes else []
    return [f"{number(scale * v, max(wanted), sign=True)}{unit}" if is_number(v) else "" for v in values]


def lead(gaps: Sequence[float], better: str, digits: int | None = 3, unit: str = "") -> tuple[str, bool, str]:
    """(which model is ahead, whether that is weak, the reason as text) from differences DIFF - Transformer by seed.

    With three seeds or more, a side is ahead if the 95 % CI over seeds excludes zero. With two seeds, it is
    weakly ahead if both agree; with one, always weakly.
    """
    centre = mean(gaps) or 0.0
    ahead = "diff" if (centre < 0) == (better == "lower") else "softmax"
    if len(gaps) < SEEDS_FOR_AN_INTERVAL:
        agree = sum(gap * centre > 0 for gap in gaps)
        seeds = f"the same sign in {agree} of {plural(len(gaps), 'seed')}" if len(gaps) > 1 else "one seed: no interval"
        return (ahead, True, seeds) if gaps and agree == len(gaps) else ("level", False, seeds)
    _, low, high, _ = over_seeds(gaps)
    seeds = f"95 % CI {number(low, digits, sign=True)} to {number(high, digits, sign=True)}{unit}"
    seeds += f" over {plural(len(gaps), 'seed')}"
    decided = low is not None and high is not None and (low > 0 or high < 0)
    return ahead if decided else "level", False, seeds
