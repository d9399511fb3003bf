"""Numbers as text, and the few statistics that the page needs."""

import math
from collections.abc import Iterable, Mapping

DASH = "–"
MINUS = "−"


def is_number(value: object) -> bool:
    """True for a finite int or float: what can be drawn."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def mean(values: Iterable[float] | Mapping[int, float]) -> float | None:
    """The mean of the values (of a mapping: of its values), or None when there is none."""
    kept = list(values.values() if isinstance(values, Mapping) else values)
    return sum(kept) / len(kept) if kept else None


def number(value: object, digits: int | None = None, sign: bool = False) -> str:
    """A number for the eye: ``digits`` after the point, or about four figures; a dash when there is none."""
    if not isinstance(value, int | float) or not is_number(value):
        return DASH
    if digits is None:
        size = abs(value)
        digits = 0 if size >= 1000 or value == int(value) else 1 if size >= 10 else 3
        if 0 < size < 0.01:
            return f"{value:{'+' if sign else ''}.2g}".replace("-", MINUS)
    text = f"{value:{'+' if sign else ''},.{digits}f}"
    if float(text.replace(",", "")) == 0:
        text = text.lstrip("+-")
    return text.replace("-", MINUS)


def short(value: object) -> str:
    """A large count with its unit: 1.23 M, 45.6 K."""
    if not isinstance(value, int | float) or not is_number(value):
        return DASH
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g}"


def duration(seconds: object) -> str:
    """Seconds as 40 s, 12 min or 3 h 20 min."""
    if not isinstance(seconds, int | float) or not is_number(seconds):
        return DASH
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def plural(count: int, noun: str) -> str:
    """3 seeds, 1 seed."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
