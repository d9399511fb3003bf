"""Loss curves of seeds that differ in length or in their steps."""

import re

import pytest

from diff_transformer.lab.record import Record
from diff_transformer.report.figures import losses
from diff_transformer.report.models import Results

FOUR = ("diff", "softmax", "diff_v2", "grouped_diff")


def drawn(sides, steps) -> str:
    """The figure of runs whose loss is 10 - step / 1000; ``steps`` has those of each seed."""
    records = [
        Record("s", side, seed, curves={"training": {"step": list(of), "loss": [10 - i / 1000 for i in of]}})
        for side in sides
        for seed, of in enumerate(steps)
    ]
    figure = losses.build(Results(records, {"x": 1}))
    assert figure is not None
    return figure.html(1, "")


@pytest.mark.parametrize("sides", [FOUR[:2], FOUR])
def test_the_mean_line_is_as_long_as_the_shortest_seed_and_right(sides):
    tips = re.findall(r"step ([\d,]+)\nDIFF, mean of 2 seeds: ([\d.]+)", drawn(sides, [range(1, 6001), range(1, 62)]))
    assert tips[-1][0] == "61"
    assert all(float(loss) == pytest.approx(10 - int(step) / 1000, abs=1.1e-3) for step, loss in tips)


@pytest.mark.parametrize("sides", [FOUR[:2], FOUR])
def test_seeds_without_a_common_step_keep_their_own_lines(sides):
    assert drawn(sides, [range(1, 100, 2), range(2, 101, 2)]).count('class="mark-line"') >= 2 * len(sides)
