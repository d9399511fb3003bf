"""One sentence on what was found, as plain when DIFF loses as when it wins."""

from collections.abc import Sequence
from dataclasses import dataclass

from diff_transformer.lab.stats import SEEDS_FOR_AN_INTERVAL, over_seeds
from diff_transformer.report.numbers import mean, number, plural

LABELS = {
    "diff": "DIFF ahead",
    "softmax": "Transformer ahead",
    "level": "No clear difference",
    "note": "Note",
    "alarm": "Alarm",
}


@dataclass(frozen=True)
class Finding:
    """``outcome`` is a key of LABELS: who is ahead, nobody, or a remark that ranks neither. ``weak``: from so few seeds
    that another could say otherwise."""

    outcome: str
    text: str
    weak: bool = False


def versus(
    what: str, diff: dict[int, float], soft: dict[int, float], better: str, digits: int | None = 3, unit: str = ""
) -> Finding | None:
    """Compare one number of the two models: means, difference, and how sure its sign is (``lead``).

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
    """Who is ahead by differences DIFF less Transformer, one a seed; whether that is weak; and in words, why.

    With three seeds or more a side is ahead when the 95 % interval over seeds excludes zero; with two, weakly, when
    both agree; with one, weakly.
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
