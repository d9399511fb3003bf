"""One sentence on what was found, as plain when DIFF loses as when it wins."""

from dataclasses import dataclass

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
    """``outcome`` is a key of LABELS: who is ahead, nobody, or a remark that ranks neither. ``weak``: from one seed."""

    outcome: str
    text: str
    weak: bool = False


def versus(
    what: str, diff: dict[int, float], soft: dict[int, float], better: str, digits: int | None = 3, unit: str = ""
) -> Finding | None:
    """Compare one number of the two models: means, difference, and in how many seeds its sign is the same.

    ``better`` is "lower" or "higher". A side is called ahead only when every seed that both models have agrees.
    None when a side is missing.
    """
    a, b = mean(diff), mean(soft)
    if a is None or b is None:
        return None
    gap = a - b
    shared = sorted(diff.keys() & soft.keys())
    agree = sum((diff[s] - soft[s]) * gap > 0 for s in shared)
    values = f"{what}: DIFF {number(a, digits)}{unit}, Transformer {number(b, digits)}{unit}"
    if number(a, digits) == number(b, digits):
        return Finding("level", f"{values}; equal at this precision.")
    way = "higher" if gap > 0 else "lower"
    said = f"{values}; DIFF {way} by {number(abs(gap), digits)}{unit}"
    said += f" ({way} in {agree} of {plural(len(shared), 'seed')})." if len(shared) > 1 else " (one seed: no interval)."
    if shared and agree < len(shared):
        return Finding("level", said)
    return Finding("diff" if way == better else "softmax", said, weak=len(shared) < 2)
