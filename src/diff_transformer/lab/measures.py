"""Compare records: measures, paired differences over seeds, tokens to an equal loss."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, stdev
from typing import Any

from diff_transformer.lab.quantities import Quantity, quantities
from diff_transformer.lab.quantities import final_loss as final_loss
from diff_transformer.lab.quantities import metric as metric
from diff_transformer.lab.record import Cells, Record
from diff_transformer.lab.sides import BASELINE
from diff_transformer.lab.stats import (
    MOST_SEEDS,
    Interval,
    holm,
    over_seeds,
    paired_p_value,
    seeds_to_decide,
    verdict,
)

Measure = Quantity  # what a table of a study shows of each model


@dataclass(frozen=True)
class Row:
    """A measure in one setting: the mean over seeds of both sides, and their paired difference (side - baseline).

    ``verdict`` is "" where the paper says nothing, or where most baselines cannot test the claim. ``p_value`` is that
    of the paired t-test. ``differences`` are those of the seeds.
    """

    measure: str
    baseline: float
    side: float
    difference: Interval
    verdict: str
    seeds: int
    p_value: float
    differences: tuple[float, ...] = ()

    def power(self, tests: int = 1) -> str:
        """How many seeds would decide an undecided row in half of all cases; "" where that is not known.

        Args:
            tests: of a table with Holm's correction.
        """
        if self.verdict != "undecided" or len(set(self.differences)) < 2:
            return ""
        return str(seeds_to_decide(self.differences, tests=tests) or f"more than {MOST_SEEDS}")


def decided(row: Row) -> str:
    """The verdict; beside an undecided one, how many seeds would decide it without a correction."""
    return f"{row.verdict}; {row.power()} seeds would decide it" if row.power() else row.verdict


def compared(name: str, baseline: float, side: float, differences: Sequence[float], better: str) -> Row:
    """The row of paired differences, one a seed."""
    interval = over_seeds(differences)
    said = verdict(interval, better) if better else ""
    p_value = paired_p_value(differences)
    return Row(name, baseline, side, interval, said, len(differences), p_value, tuple(differences))


def trained(seeds: dict[int, Record]) -> dict[int, Record]:
    """The runs of one side whose training did not diverge."""
    return {seed: record for seed, record in seeds.items() if not record.diverged}


def paired_rows(
    cells: Cells, setting: str, side: str, measures: Iterable[Measure], baseline: str = BASELINE
) -> list[Row]:
    """A row for each measure that both sides of ``setting`` have, over the seeds with which both were trained."""
    given = [cells[setting].get(name, {}) for name in (side, baseline)]
    first, second = map(trained, given)
    lost = any(len(kept) < len(seeds) for kept, seeds in zip((first, second), given, strict=True))
    rows = []
    for measure in measures:
        pairs = [
            (ours, theirs)
            for seed in sorted(first.keys() & second.keys())
            for ours, theirs in [(measure.read(first[seed]), measure.read(second[seed]))]
            if ours is not None and theirs is not None
        ]
        if pairs:
            differences = [ours - theirs for ours, theirs in pairs]
            means = fmean(theirs for _, theirs in pairs), fmean(ours for ours, _ in pairs)
            # A table tests the difference itself, not "no worse than", which a Transformer that fails cannot test.
            untested = not measure.margin and measure.why_untested(
                [second[seed] for seed in second.keys() & first.keys()]
            )
            better = "" if untested else measure.better
            row = compared(measure.name, *means, differences, better)
            # The seeds that remain where some diverged are not a fair sample.
            rows.append(replace(row, verdict="undecided", differences=()) if row.verdict and lost else row)
    return rows


def after_holm(rows: Iterable[Row]) -> str:
    """``holm_sentence`` for below a table, over the rows that have a verdict."""
    tested = [row for row in rows if row.verdict]
    return holm_sentence([(row.measure, row.p_value, row.verdict) for row in tested], "measures")


def holm_sentence(tested: Sequence[tuple[str, float, str]], plural: str) -> str:
    """How many of what was tested is significant, without and with Holm's correction; "" where nothing is.

    Args:
        tested: for each its name, p-value and verdict.
        plural: what they are.
    """
    adjusted = holm([p for _, p, _ in tested])
    significant = [(name, p) for (name, _, said), p in zip(tested, adjusted, strict=True) if said != "undecided"]
    if not significant:
        return ""
    kept = [name for name, p in significant if p <= 0.05]
    verb = "is" if len(significant) == 1 else "are"
    return (
        f"Without a correction {len(significant)} of {len(tested)} tested {plural} {verb} significant; with Holm's "
        f"correction {len(kept) or 'none'} {'is' if len(kept) == 1 else 'are'}"
        f"{': ' if kept else ''}{', '.join(kept)}."
    )


def borrow_baselines(cells: Cells, baseline: str = BASELINE) -> Cells:
    """``cells`` with a baseline in every setting where one can be found.

    A setting without the side ``baseline`` gets that of the first setting with the same model size, number of heads,
    learning rate, steps, tokens per step and data. The first side of the setting is compared.
    """
    made = {}
    for setting, sides in cells.items():
        known = next(iter(next(iter(sides.values())).values()))
        found = sides.get(baseline) or next(
            (
                other[baseline]
                for name, other in cells.items()
                if "/" not in name and baseline in other and _alike(next(iter(other[baseline].values())), known)
            ),
            None,
        )
        made[setting] = {baseline: found, **sides} if found else sides
    return made


def _alike(first: Record, second: Record) -> bool:
    fields = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    return (
        all(getattr(first, name) == getattr(second, name) for name in ("steps", "tokens_per_step", "lr"))
        and all(first.config["model"][name] == second.config["model"][name] for name in fields)
        and _agree(first.config["data"], second.config["data"])
    )


def _agree(first: Any, second: Any) -> bool:
    """True if settings are equal where both have them: an earlier version may lack some."""
    if isinstance(first, dict) and isinstance(second, dict):
        return all(_agree(first[name], second[name]) for name in first.keys() & second.keys())
    return first == second


def spread(values: list[float]) -> tuple[float, float]:
    """Mean and standard deviation over seeds; the deviation of a single value is 0."""
    return fmean(values), stdev(values) if len(values) > 1 else 0.0


def tokens_to_equal_loss(side: Record, baseline: Record, source: str | None = None) -> float | None:
    """Tokens after which ``side`` has the baseline's final validation loss, as a share of the baseline's tokens.

    The loss is interpolated linearly between two validations. None if ``side`` never reaches that loss. Both runs end
    their learning-rate schedule at the same step, so the share is at most 1. Figure 3b of the paper, which also reads
    the share off one run, has 0.637.

    Args:
        source: use the loss of this source of the mixture, such as "needles", instead of the validation loss.
    """
    theirs, ours = _curve(baseline, source), _curve(side, source)
    if not theirs or not ours:
        return None
    end, goal = theirs[-1]
    for i, (step, loss) in enumerate(ours):
        if loss <= goal:
            if i == 0:
                return 0.0
            before, high = ours[i - 1]
            reached = before + (high - goal) / (high - loss) * (step - before)
            return reached * side.tokens_per_step / (end * baseline.tokens_per_step)
    return None


def steps_to(record: Record, curve: str, goal: float) -> float:
    """The step at which the accuracy of ``record.curves[curve]`` first reaches ``goal``.

    Between two validations it lies on a straight line. It is the number of steps of the run if that never happens.
    """
    found = record.curves[curve]
    for (before, low), (step, high) in pairwise(zip(found["step"], found["accuracy"], strict=True)):
        if high >= goal:
            return before + (step - before) * (goal - low) / (high - low)
    return float(record.steps)


def _curve(record: Record, source: str | None) -> list[tuple[int, float]]:
    steps = record.curves["validation"]["step"]
    losses = record.curves["validation"]["loss"] if source is None else record.curves.get("sources", {}).get(source, [])
    return [(step, loss) for step, loss in zip(steps, losses, strict=False) if loss is not None]


def late_loss(record: Record, source: str) -> float:
    """The training loss of a source of the mixture, averaged over its last 8 points; nats a token.

    Where a study validates every 50 steps, these are the last 400 steps.
    """
    return fmean(record.curves["sources"][source][-8:])


MEASURES = list(
    quantities(
        "validation_loss", "ar_hit", "others", "needle_n1_r1", "needle_n2_r1", "needle_n4_r1", "needle_n4_r2",
        "nll128", "nll512", "answer", "noise", "logits", "logits_in_medians", "hidden", "hidden_in_medians",
        "four_bits", "many_shot", "order_random", "gradient_median", "gradient_largest", "gradient_spikes",
    )
)  # fmt: skip
