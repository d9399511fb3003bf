"""The table of claims, for the page and for a terminal: what the paper says, what was measured here, the verdict."""

import math
import re

from rich.table import Table
from rich.text import Text

from diff_transformer.lab.measures import holm_sentence
from diff_transformer.lab.sides import CONTROL, name_of
from diff_transformer.report.charts import NAMES, padded
from diff_transformer.report.figure import amounts, interval, key, legend, one_run, seeds_of
from diff_transformer.report.markup import DASH, MINUS, Html, escape, is_number, join, mean, number, table, tag
from diff_transformer.report.models import as_dict, dicts

TWO = re.compile(r"([\d.,+−-]+) / ([\d.,+−-]+)(.*)", re.DOTALL)
ICONS = {"held": "M3 8.5l3.2 3.2L13 4.5", "did not hold": "M4 4l8 8M12 4l-8 8", "undecided": "M3.5 8h9"}


# What one run says of a claim. It has no verdict: another seed may say something else.
ONE_RUN = {"held": "in favour", "did not hold": "against", "undecided": "undecided"}


OURS = "Not a claim of the paper"  # heading of ours


def is_ours(claim: dict) -> bool:
    """True if the paper does not make the claim. Earlier records do not say; there it is recall from noise alone."""
    return bool(claim.get("ours", claim.get("id") == "recall"))


def of_paper(results: dict) -> list[dict]:
    """The claims that the paper makes: those that are counted."""
    return [claim for claim in dicts(results.get("claims")) if not is_ours(claim)]


def badge(claim: dict) -> Html:
    """The verdict as an icon and words; of one run, words alone."""
    known = known_verdict(claim)
    if one_run(claim):
        return tag("span", f"one run: {ONE_RUN[known]}", class_="verdict one-run")
    icon = f'<svg viewBox="0 0 16 16" aria-hidden="true"><path d="{ICONS[known]}"/></svg>'
    return tag("span", Html(icon), known, class_=f"verdict {known.replace(' ', '-')}")


def verdict_words(claim: dict) -> str:
    """The verdict, or what one run says."""
    return f"one run, {ONE_RUN[known_verdict(claim)]}" if one_run(claim) else known_verdict(claim)


def control_of(claims: list[dict]) -> str | None:
    """The name of the control beside the claims; None without one."""
    beside = next((control for claim in claims if (control := as_dict(claim.get("control")))), None)
    return None if beside is None else name_of(str(beside.get("side") or CONTROL))  # old files have another label


def control_words(claim: dict) -> str:
    """The same of DIFF and the control."""
    known = known_verdict(as_dict(claim.get("control")))
    return ONE_RUN[known] if one_run(claim) else known


def known_verdict(judged: dict) -> str:
    """The verdict of a claim or of its control; an unknown one counts as undecided."""
    return str(judged["verdict"]) if judged.get("verdict") in ICONS else "undecided"


def claims_section(results: dict, figure_of) -> Html | None:
    """The table; ``figure_of(claim)`` gives the id of the figure that shows a claim's numbers, or None."""
    claims = dicts(results.get("claims"))
    if not claims:
        return None
    order = tag("span", " Transformer / DIFF") if any(TWO.match(str(claim.get("here"))) for claim in claims) else None
    control = control_of(claims)
    names = ["Claim", join(["Paper", order]), join(["Here", order]), *([control] if control else []), "Verdict"]
    head = tag("tr", *(tag("th", words, scope="col") for words in names))
    rows = [(claim, _row(place, claim, figure_of(claim), bool(control))) for place, claim in enumerate(claims)]
    ours = [row for claim, row in rows if is_ours(claim)]
    apart = tag("tr", tag("th", OURS, scope="rowgroup", colspan=str(len(names)))) if ours else None
    corrected = after_correction(of_paper(results))
    return tag(
        "section",
        tag("h2", "The claims", id="claims-title"),
        tag(
            "table",
            tag("thead", head),
            tag("tbody", *(row for claim, row in rows if not is_ours(claim))),
            tag("tbody", apart, *ours, class_="ours") if ours else None,
            class_="claims controlled" if control else "claims",
        ),
        _key(any(_strip(claim) for claim in claims), bool(control)),
        tag("p", corrected, class_="small") if corrected else None,
        id="claims",
        aria_labelledby="claims-title",
    )


def other_claims(results: dict) -> Html:
    """The same claims of other models than DIFF: of DIFF V2, made of a pretrained Transformer."""
    return join([_table_of(name_of(side), dicts(claims)) for side, claims in as_dict(results.get("claims_of")).items()])


def _table_of(name: str, claims: list[dict]) -> Html:
    control = control_of(claims)
    head = ["Claim", f"Transformer / {name}", "difference, 95 %", *([str(control)] if control else []), "Verdict"]
    rows: list[list[object]] = []
    for claim in claims:
        beside = as_dict(claim.get("control"))
        said = [f"{beside.get('here')}; compared with it: {control_words(claim)}" if beside else DASH]
        rows.append(
            [claim.get("claim", ""), claim.get("here", ""), interval(claim), *(said if control else []), badge(claim)]
        )
    corrected = after_correction(claims)
    return tag(
        "section",
        tag("h2", f"The claims, of {name}"),
        table(head, rows, f"The claims, of {name}", numeric=False),
        tag("p", corrected, class_="small") if corrected else None,
    )


def after_correction(claims: list[dict]) -> str:
    """How many claims Holm's correction keeps; "" where none has a p-value, as with one or two seeds."""
    tested = [claim for claim in claims if is_number(claim.get("p_value"))]
    return holm_sentence([(str(c.get("claim", "")), c["p_value"], known_verdict(c)) for c in tested], "claims")


def _row(place: int, claim: dict, figure: str | None, controlled: bool) -> Html:
    name = claim.get("claim", "")
    link = tag("a", "figure", href=f"#{figure}", aria_label=f"figure for: {name}") if figure else None
    origin = [s for s in (claim.get("source"), link) if s]
    detail = str(claim.get("detail") or "")
    here = [
        tag("span", two(claim.get("here") or "not measured"), f" {claim.get('unit') or ''}".rstrip(), class_="value"),
        _strip(claim),
        tag("span", interval(claim), class_="small"),
        tag("span", untested(claim), class_="small") if untested(claim) else None,
        tag("span", claim["power"], class_="small") if claim.get("power") else None,
        tag("span", detail, class_="small") if detail and not detail.startswith("difference") else None,
    ]
    source = tag("span", join(origin, " · "), class_="small") if origin else None
    return tag(
        "tr",
        tag("th", name, scope="row"),
        tag("td", tag("span", two(claim.get("paper", "")), class_="value"), source, data_label="Paper"),
        tag("td", *here, data_label="Here"),
        tag("td", *_control(claim), data_label="Control") if controlled else None,
        tag("td", badge(claim), data_label="Verdict"),
        id=f"claim-{place + 1}",
    )


def _control(claim: dict) -> list[Html]:
    """The control's number, and whether the claim holds for DIFF against it."""
    control = as_dict(claim.get("control"))
    if not control:
        return [tag("span", DASH, class_="small")]
    difference = as_dict(control.get("difference"))
    ends = [difference.get(k) for k in ("low", "mean", "high")]
    low, middle, high = amounts(ends, bool(difference.get("relative")))
    value = f"{control.get('here')} {claim.get('unit') or ''}".rstrip()
    return [
        tag("span", tag("i", class_="swatch s1", aria_hidden="true"), value, class_="value"),
        tag(
            "span",
            f"difference {middle}{f' ({low} to {high})' if low and high else ''}; "
            f"compared with it: {control_words(claim)}",
            class_="small",
        ),
    ]


SHARES = ("accuracy", "share", "best less worst")  # units whose differences are points of 100
REACH, TICKS = 1.0, (0.01, 0.1, 0.5)  # end of the forest plot's axis, and its marks


def forest(results: dict) -> Html | None:
    """All claims on one axis: DIFF's difference over its scale, with its interval; further right is as claimed.

    A share is on the scale of 100 points, any other number on that of the Transformer's. The axis follows the square
    root, so that small differences can be seen.
    """
    claims = list(enumerate(dicts(results.get("claims"))))
    rows = [_forest_row(place, claim) for place, claim in claims if not is_ours(claim)]
    ours = [_forest_row(place, claim) for place, claim in claims if is_ours(claim)]
    if not any((*rows, *ours)):
        return None
    shown = [("softmax", "DIFF against the Transformer")]
    if any(claim.get("control") for _, claim in claims):
        shown.append(("s1", f"DIFF against the {control_of([claim for _, claim in claims])}"))
    marks = [tag("span", f"{100 * at:+.0f} %".replace("-", MINUS), style=f"left:{_at(at)}") for tick in TICKS
             for at in (-tick, tick)]  # fmt: skip
    axis = tag("div", tag("span", "against the claim ←"), tag("div", *marks, class_="track"),
               tag("span", "→ as claimed"), class_="row axis", aria_hidden="true")  # fmt: skip
    parts = [*rows, tag("p", OURS, class_="apart") if any(ours) else None, *ours, axis]
    words = "points of 100 for shares, otherwise a share of the other model's number; bars: 95 % CIs"
    return tag(
        "div",
        *(part for part in parts if part is not None),
        tag("p", join([*(key(style, text) for style, text in shown), tag("span", words, class_="key")]),
            class_="legend"),
        class_="forest",
    )  # fmt: skip


def _forest_row(place: int, claim: dict) -> Html | None:
    drawn, said = [], []
    control = as_dict(claim.get("control"))
    for style, of, other in (("softmax", claim, "softmax"), ("s1", control, "values")):
        difference, against = as_dict(of.get("difference")), mean(seeds_of(of, other))
        scale = 1.0 if difference.get("relative") or claim.get("unit") in SHARES else abs(against or 0.0)
        if not scale or not is_number(difference.get("mean")):
            continue
        sign = -1 if claim.get("better") == "lower" else 1
        known = [difference[end] for end in ("mean", "low", "high") if is_number(difference.get(end))]
        middle, *ends = (sign * value / scale for value in known)
        if len(ends) == 2:
            low, high = sorted(map(_place, ends))
            drawn.append(tag("i", class_=f"spread {style}", style=f"left:{low:.1f}%;width:{max(high - low, 0.3):.1f}%"))
        drawn.append(tag("i", class_=f"swatch {style}", style=f"left:{_at(middle)}"))
        said.append(f"{NAMES['diff']} against the {NAMES['softmax'] if style == 'softmax' else control_of([claim])}: "
                    f"{interval({**of, 'diff': claim.get('diff'), 'softmax': claim.get('softmax')})}")  # fmt: skip
    if not drawn:
        return None
    name = str(claim.get("claim", ""))
    track = tag("span", *drawn, class_="track hit", data_tip="\n".join([name, *said]))
    return tag("div", tag("a", name, href=f"#claim-{place + 1}"),
               tag("div", track, class_="chart", role="img", tabindex="0", aria_label=f"{name}. {'. '.join(said)}"),
               badge(claim), class_="row")  # fmt: skip


def _place(value: float) -> float:
    """Where a value stands on the axis, in per cent of its width; values beyond it stand at its end."""
    kept = max(-REACH, min(REACH, value))
    return 50 + 50 * math.copysign(math.sqrt(abs(kept) / REACH), kept)


def _at(value: float) -> str:
    return f"{_place(value):.1f}%"


def two(words: object) -> Html:
    """Two numbers, Transformer / DIFF, each with its model's mark; other text as it is."""
    found = TWO.match(str(words))
    if not found:
        return escape(words)
    marks = [tag("i", class_=f"swatch {side}", aria_hidden="true") for side in ("softmax", "diff")]
    return join([marks[0], found[1], " / ", marks[1], found[2], found[3]])


def untested(claim: dict) -> str:
    """Why these models cannot test the claim, or ""."""
    return f"not tested: {claim['untested']}" if claim.get("untested") else ""


def _strip(claim: dict) -> Html | None:
    """Every seed of both models on one small axis whose right end is better.

    None with one seed: the spread between seeds gives the axis its scale.
    """
    by_side = {side: seeds_of(claim, side) for side in ("diff", "softmax")}
    if min(len(values) for values in by_side.values()) < 2:
        return None
    low, high = padded([v for values in by_side.values() for v in values], 0.05)
    ends = (low, high) if claim.get("better") == "higher" else (high, low)

    def at(value: float) -> str:
        return f"left:{100 * (value - ends[0]) / (ends[1] - ends[0]):.1f}%"

    drawn = []
    for side in ("softmax", "diff"):
        values, average = by_side[side], mean(by_side[side]) or 0.0
        marks = [tag("i", class_=f"swatch {side}", style=at(v)) for v in values]
        marks.append(tag("i", class_=f"mean {side}", style=at(average)))
        tip = f"{NAMES[side]} {number(average)}\nseeds: {' · '.join(number(v) for v in values)}"
        drawn.append(tag("span", *marks, class_="hit", data_tip=tip))
    words = f"Seeds of DIFF and Transformer for: {claim.get('claim', '')}; further right is better"
    return tag("span", *drawn, class_="chart strip", role="img", tabindex="0", aria_label=words)


def _key(strips: bool, controlled: bool) -> Html:
    words = ["one mark a seed, a bar at their mean; further right is better"] if strips else []
    last = "difference: DIFF − the Transformer of that column" if controlled else "difference: DIFF − Transformer"
    return legend(*(tag("span", text, class_="key") for text in [*words, last]))


def bears_on(claim: dict, sources: tuple[str, ...]) -> bool:
    """True if the claim's source names one of the tables or figures; "Table 1" does not match "Table 10"."""
    said = re.sub(r"\bfigure\b", "fig.", str(claim.get("source") or "").lower())
    return any(re.search(rf"(?<!\w){re.escape(s.lower())}(?!\d)", said) for s in sources)


def claim_links(results: dict, sources: tuple[str, ...]) -> Html:
    """Links from a figure to the verdicts that its numbers support."""
    links = [
        tag("a", badge(claim), tag("span", claim.get("claim", "")), href=f"#claim-{place + 1}")
        for place, claim in enumerate(dicts(results.get("claims")))
        if bears_on(claim, sources)
    ]
    return tag("p", *links, class_="bears-on") if links else Html("")


MARKS = {"held": ("✓", "green"), "did not hold": ("✗", "red"), "undecided": ("?", "yellow")}


def render_claims(results: dict) -> Table:
    """A rich table: claim, the paper's numbers, the numbers measured here, verdict. Text is literal, never markup."""
    shown = Table(title=Text(str(results.get("title") or "Claims")), title_justify="left", show_lines=True)
    shown.add_column("claim", overflow="fold")
    order = " (Transformer / DIFF)" if any(TWO.match(str(c.get("here"))) for c in dicts(results.get("claims"))) else ""
    shown.add_column(f"paper{order}")
    shown.add_column(f"here{order}")
    control = control_of(dicts(results.get("claims")))
    if control:
        shown.add_column(str(control))
    shown.add_column("verdict")
    claims = dicts(results.get("claims"))
    for claim in [*of_paper(results), *filter(is_ours, claims)]:
        mark, colour = ("", "") if one_run(claim) else MARKS[known_verdict(claim)]
        source = f"\n{claim['source']}" if claim.get("source") else ""
        here = (str(claim.get("here", "")), interval(claim), untested(claim), str(claim.get("power") or ""))
        beside = as_dict(claim.get("control"))
        against = f"{beside.get('here')}\ncompared with it: {control_words(claim)}" if beside else DASH
        shown.add_row(
            Text(f"{claim.get('claim', '')}{f'{chr(10)}({OURS.lower()})' if is_ours(claim) else ''}"),
            Text(f"{claim.get('paper', '')}{source}"),
            Text("\n".join(part for part in here if part)),
            *([Text(against)] if control else []),
            Text(f"{mark} {verdict_words(claim)}".strip(), style=f"bold {colour}".strip()),
        )
    if any("†" in str(c.get("paper")) for c in dicts(results.get("claims"))):
        shown.caption = Text("† from a third party's transcription of the paper", justify="left")
    return shown
