"""Record the confirmation of the recall study, and make its tables from the record. Usage: figures/study.py."""

import math
import sys
from pathlib import Path
from statistics import fmean

import numpy as np
from scipy.stats import binomtest, bootstrap, permutation_test

from diff_transformer.lab.recipes.recall import MATCHED, OWN_SCALE
from diff_transformer.lab.record import Cells, Record
from diff_transformer.lab.stats import holm, over_seeds

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from plots import NAMES, matched_names  # noqa: E402  (beside this folder)
from recall.plan import GRID  # noqa: E402
from recall_confirmation.plan import CONFIRMED, FRESH_SEEDS, INFORMATIVE, stages  # noqa: E402
from study import counted, study_command  # noqa: E402
from tables import in_numbers  # noqa: E402

from diff_transformer.lab.measures import steps_to  # noqa: E402

SHOWN = NAMES | matched_names(MATCHED, OWN_SCALE)
PAIRS = (("diff_norm1", "softmax"), ("diff_matched", "softmax"), ("diff_matched", "softmax_norm_own_scale"))
GOAL = 0.9  # accuracy that a run reaches or does not
DRAWS, RESAMPLES = 99_999, 9_999  # of the permutation test and the bootstrap, as planned


def whole_seeds(cells: Cells) -> list[int]:
    """The seeds with all their runs, which alone count."""
    return [
        seed
        for seed in FRESH_SEEDS
        if all(seed in cells.get(where, {}).get(side, {}) for where in INFORMATIVE for side in CONFIRMED)
    ]


def accuracy(record: Record) -> float:
    """Accuracy at the end; chance for a run that diverged, where it was not measured or is no number."""
    found = record.metrics.get("recall", {}).get("accuracy", math.nan)
    return found if math.isfinite(found) else 1 / GRID[record.setting][0]


def reached(record: Record) -> bool:
    """True if the accuracy on held-out rows reached ``GOAL``."""
    return steps_to(record, "recall", GOAL) < record.steps


def differences(cells: Cells, side: str, baseline: str, seeds: list[int]) -> list[float]:
    """By seed: accuracy of ``side`` less that of ``baseline``, mean over the settings."""
    return [
        fmean(accuracy(cells[where][side][seed]) - accuracy(cells[where][baseline][seed]) for where in INFORMATIVE)
        for seed in seeds
    ]


def p_value(found: list[float]) -> float:
    """Of the paired permutation test: signs are flipped, two-sided."""
    options = {"permutation_type": "samples", "vectorized": True, "n_resamples": DRAWS}
    return float(permutation_test((found,), np.mean, **options, rng=np.random.default_rng(0)).pvalue)


def bootstrapped(found: list[float]) -> tuple[float, float]:
    """The 95 % CI of the mean over seeds (BCa)."""
    if len(set(found)) == 1:
        return found[0], found[0]
    made = bootstrap((found,), np.mean, n_resamples=RESAMPLES, method="BCa", rng=np.random.default_rng(0))
    return float(made.confidence_interval.low), float(made.confidence_interval.high)


def verdict(low: float, high: float, p: float, finished: bool) -> str:
    """As planned; nothing is decided before all seeds are there."""
    if not finished:
        return "not finished"
    if p > 0.05 or low <= 0 <= high:
        return "undecided"
    return "held" if low > 0 else "did not hold"


def primary(cells: Cells) -> str:
    """The three differences; "" before three whole seeds."""
    seeds = whole_seeds(cells)
    if len(seeds) < 3:
        return ""
    found = [differences(cells, *pair, seeds) for pair in PAIRS]
    adjusted, finished = holm([p_value(each) for each in found]), len(seeds) == len(FRESH_SEEDS)
    head = f"| | difference (bootstrap, {len(seeds)} seeds) | Student's interval | p after Holm | verdict |"
    lines = ["**Primary outcome**: accuracy at the end, mean over three settings", "", head, "|---" * 5 + "|"]
    for (side, baseline), each, p in zip(PAIRS, found, adjusted, strict=True):
        low, high = bootstrapped(each)
        shown = f"{p:.3f}" if p >= 0.0005 else "< 0.001"
        lines.append(
            f"| {SHOWN[side]} minus {SHOWN[baseline]} | {fmean(each):+.3f} ({low:+.3f} to {high:+.3f}) | "
            f"{in_numbers(over_seeds(each))} | {shown} | {verdict(low, high, p, finished)} |"
        )
    return "\n".join(lines)


def shares(cells: Cells) -> str:
    """For each setting and side, how many of the runs reached ``GOAL``, with the exact interval."""
    seeds = whole_seeds(cells)
    if not seeds:
        return ""
    lines = [f"**Runs that reached {GOAL}**, of {len(seeds)} (share, exact 95 % CI)", ""]
    lines += [f"| | {' | '.join(INFORMATIVE)} |", "|---" * (len(INFORMATIVE) + 1) + "|"]
    for side in CONFIRMED:
        counts = [sum(reached(cells[where][side][seed]) for seed in seeds) for where in INFORMATIVE]
        lines.append(f"| {' | '.join([SHOWN[side], *(_share(count, len(seeds)) for count in counts)])} |")
    return "\n".join(lines)


def _share(count: int, of: int) -> str:
    low, high = binomtest(count, of).proportion_ci(method="exact")
    return f"{count} ({count / of:.2f}, {low:.2f} to {high:.2f})"


def one_only(cells: Cells) -> str:
    """For each pair and setting, the seeds in which one side alone reached ``GOAL``, with the exact sign test."""
    seeds = whole_seeds(cells)
    if not seeds:
        return ""
    head = (
        f"| reached {GOAL}: the first alone / the second alone (p, exact, not corrected) | {' | '.join(INFORMATIVE)} |"
    )
    lines = [head, "|---" * (len(INFORMATIVE) + 1) + "|"]
    for side, baseline in PAIRS:
        shown = []
        for where in INFORMATIVE:
            both = [[reached(cells[where][name][seed]) for name in (side, baseline)] for seed in seeds]
            first, second = both.count([True, False]), both.count([False, True])
            p = binomtest(first, first + second).pvalue if first + second else 1.0
            shown.append(f"{first} / {second} ({p:.3f})" if p >= 0.0005 else f"{first} / {second} (< 0.001)")
        lines.append(f"| {' | '.join([f'{SHOWN[side]}; {SHOWN[baseline]}', *shown])} |")
    return "\n".join(lines)


def tables(cells: Cells) -> str:
    """What stands between the README's markers."""
    progress = f"Finished: {counted(cells, {'the plan': stages('none')})}"
    said = "" if len(whole_seeds(cells)) == len(FRESH_SEEDS) else "; nothing is decided"
    return "\n\n".join(part for part in (f"{progress}{said}.", primary(cells), shares(cells), one_only(cells)) if part)


if __name__ == "__main__":
    findings = HERE.parents[1] / "docs" / "findings.md"
    pages = {HERE / "README.md": ("measured", tables), findings: ("recall_confirmation", primary)}
    sys.exit(study_command(sys.argv[1:], HERE, pages, lambda cells: {}, curves=("recall",)))
