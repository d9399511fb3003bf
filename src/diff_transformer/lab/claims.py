"""The verdicts on the claims of ``quantities``, from the records of the pair and of the control.

The interval of a claim is that of its quantity (``quantities.difference``). With three seeds or more a claim has the
p-value of its test, from which the page says what Holm's correction keeps; if they leave it undecided, it has the
number of seeds that would decide it.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from diff_transformer.lab.quantities import Quantity, difference
from diff_transformer.lab.quantities import paper_claims as paper_claims
from diff_transformer.lab.record import Record
from diff_transformer.lab.sides import CONTROLS, PAIR, name_of
from diff_transformer.lab.stats import (
    MOST_SEEDS,
    Interval,
    OverExamples,
    paired_p_value,
    seeds_to_decide,
    verdict,
)


def judge(claims: Sequence[Quantity], records: Sequence[Record]) -> list[dict]:
    """Judge each claim whose examples the records of the pair have, over the seeds that both sides have.

    Where ``records`` has a control with the same seeds, its number and DIFF's difference from it stand beside.

    Returns:
        One dictionary per claim, as the report shows it.
    """
    judged, third = [], next((side for side in CONTROLS if any(record.side == side for record in records)), CONTROLS[0])
    for claim in claims:
        ours, theirs, control = (
            {r.seed: r for r in records if r.side == side and r.rows.get(claim.experiment)} for side in (*PAIR, third)
        )
        seeds = sorted(ours.keys() & theirs.keys())
        if not seeds:
            continue
        pair = [ours[seed] for seed in seeds], [theirs[seed] for seed in seeds]
        values = np.array([[claim.value(record) for record in side] for side in pair])
        # not known if a slice holds no token, for example
        known = np.array([np.isfinite(of_seed).all() for of_seed in values.T])
        if not known.any():
            continue
        judged.append(_judge_one(claim, pair, values, known, sorted(ours.keys() ^ theirs.keys())))
        if control.keys() >= set(seeds):
            beside = _beside(claim, (pair[0], [control[seed] for seed in seeds]), third)
            judged[-1] |= {"control": beside} if beside else {}
    return judged


def _beside(claim: Quantity, sides: tuple[list[Record], list[Record]], third: str) -> dict[str, Any] | None:
    """DIFF against the control, over all seeds; None if a number is missing."""
    ours, control = ([claim.value(record) for record in side] for side in sides)
    if not np.isfinite([*ours, *control]).all():
        return None
    interval, _ = difference(claim, *sides)
    judged = "undecided" if claim.why_untested(sides[1]) else verdict(interval, claim.better, claim.margin)
    return {
        "side": third, "label": name_of(third), "here": _number(float(np.mean(control))), "values": control,
        "verdict": judged, "difference": _interval(interval, claim.relative),
    }  # fmt: skip


def _interval(interval: Interval, relative: bool) -> dict:
    return {**interval._asdict(), "relative": relative}


def _judge_one(
    claim: Quantity, pair: tuple[list[Record], list[Record]], values: np.ndarray, known: np.ndarray, lost: list[int]
) -> dict:
    relative = claim.relative
    ours, theirs = values[:, known].tolist()
    kept = [[record for record, finite in zip(side, known, strict=True) if finite] for side in pair]
    interval, of_examples = difference(claim, *kept)
    a, b = float(np.mean(ours)), float(np.mean(theirs))
    judged = verdict(interval, claim.better, claim.margin)
    untested = claim.why_untested(kept[1])
    if lost:  # the remaining seeds are not a fair sample
        untested = f"one side lacks seed{'s' * (len(lost) > 1)} {', '.join(map(str, lost))}"
    if not known.all():
        missing = len(known) - len(ours)
        untested = f"{missing} of {len(known)} seeds {'has' if missing == 1 else 'have'} no example of it"
    power, tested = "", {}
    if not untested and interval.over != "examples":
        differences = [a / b - 1 if relative else a - b for a, b in zip(ours, theirs, strict=True)]
        threshold = -claim.margin if claim.better == "higher" else claim.margin
        power = _power(differences, threshold, of_examples) if judged == "undecided" else ""
        tested = {"p_value": paired_p_value(differences, threshold, of_examples)}
    return {
        "id": claim.id, "claim": claim.claim, "paper": claim.paper, "source": claim.source, "unit": claim.unit,
        "here": f"{_number(b)} / {_number(a)}", "detail": _detail(interval, len(ours), relative),
        "verdict": "undecided" if untested else judged, "untested": untested, "power": power, "diff": ours,
        "softmax": theirs, "better": claim.better, "difference": _interval(interval, relative),
        **tested, **({"ours": True} if claim.ours else {}),
    }  # fmt: skip


def _detail(interval: Interval, seeds: int, relative: bool) -> str:
    scale, unit = (100, " %") if relative else (1, "")
    text = f"difference {_number(interval.mean * scale, sign=True)}{unit}"
    if interval.low is not None and interval.high is not None:
        text += f" [{_number(interval.low * scale, sign=True)}, {_number(interval.high * scale, sign=True)}]"
    runs = "one run" if seeds == 1 else f"{seeds} seeds"
    if interval.low is None:
        return f"{text}, no interval ({runs})"
    over = {"seeds": runs, "examples": f"examples ({runs})", "seeds and examples": f"{runs} and their examples"}
    return f"{text}, 95 % over {over[interval.over]}"


def _power(differences: Sequence[float], threshold: float, of_examples: OverExamples) -> str:
    """How many seeds would decide a claim; "" if the difference is the same with every seed."""
    if max(differences) == min(differences):
        return ""
    needed = seeds_to_decide(differences, threshold, examples=of_examples)
    if needed is None and of_examples.variance and seeds_to_decide(differences, threshold):
        return (
            "no number of seeds would decide it on these examples, with this mean and spread; more examples are needed"
        )
    seeds = needed or f"more than {MOST_SEEDS}"
    return f"with this mean and spread, {seeds} seeds would decide it in half of all cases"


def _number(value: float, sign: bool = False) -> str:
    size = abs(value)
    digits = 0 if size >= 100 else 1 if size >= 10 else 3
    return f"{value:+,.{digits}f}" if sign else f"{value:,.{digits}f}"
