"""Axes: from values to positions, and where to put the ticks."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    """Maps ``low..high`` to the positions ``start..end``, linearly or in the logarithm."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = self.low, self.high, value
        if self.log:
            low, high, at = math.log(low), math.log(high), math.log(max(value, 1e-12))
        share = (at - low) / (high - low) if high != low else 0.5
        return round(self.start + share * (self.end - self.start), 2)

    def ticks(self, count: int = 5) -> list[float]:
        """Round values inside the axis: powers of ten on a log axis (2 and 5 too if few), else 1, 2, 2.5, 5 x 10^k.

        A log axis too short for two of those has the linear ones.
        """
        if self.log:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            steps = (1, 2, 5) if last - first <= 3 else (1,)
            every = [m * 10.0**e for e in range(first, last + 1) for m in steps]
            inside = [t for t in every if self.low <= t * 1.0001 and t <= self.high * 1.0001]
            if len(inside) > 1:
                return inside
        step = tick_step(self.high - self.low, count)
        first = math.ceil(self.low / step - 1e-9)
        return [round(i * step, 10) for i in range(first, math.floor(self.high / step + 1e-9) + 1)]


def tick_step(span: float, count: int) -> float:
    """The smallest round step that gives at most about ``count`` ticks over ``span``."""
    if span <= 0:
        return 1.0
    raw = span / max(count, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    return next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)


def padded(values: list[float], share: float = 0.06, zero: bool = False) -> tuple[float, float]:
    """The range of the values with a little room; with ``zero`` the axis starts (or ends) at 0."""
    low, high = min(values), max(values)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    room = (high - low) * share or abs(high) * 0.1 or 1.0
    return (low if zero and low == 0 else low - room), (high if zero and high == 0 else high + room)


def padded_log(values: list[float], share: float = 0.06) -> tuple[float, float]:
    """The range of positive values with a little room in the logarithm."""
    low, high = padded([math.log(v) for v in values if v > 0] or [0.0], share)
    return math.exp(low), math.exp(high)
