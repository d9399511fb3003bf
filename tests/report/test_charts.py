"""Scales, readings and lines of the drawings, on cases worked by hand."""

import re

import pytest

from diff_transformer.report.category_chart import category_chart
from diff_transformer.report.heat_map import heat_map
from diff_transformer.report.line_chart import Line, averaged, bucketed, inside, line_chart
from diff_transformer.report.numbers import duration, number, short
from diff_transformer.report.scales import Scale, padded


def test_scale_maps_its_ends_and_middle():
    assert [Scale(0, 10, 100, 200)(v) for v in (0, 5, 10)] == [100, 150, 200]
    assert [Scale(1, 100, 0, 10, log=True)(v) for v in (1, 10, 100)] == [0, 5, 10]
    assert Scale(2, 2, 0, 10)(2) == 5


@pytest.mark.parametrize(
    ("scale", "ticks"),
    [
        (Scale(0, 1, 0, 1), [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (Scale(3.87, 4.6, 0, 1), [4.0, 4.2, 4.4, 4.6]),
        (Scale(-0.065, 0.065, 0, 1), [-0.05, 0, 0.05]),
        (Scale(0.6, 40, 0, 1, log=True), [1, 2, 5, 10, 20]),
        (Scale(0.5, 5000, 0, 1, log=True), [1, 10, 100, 1000]),
    ],
)
def test_ticks_are_round_and_inside(scale, ticks):
    assert scale.ticks() == pytest.approx(ticks)


def test_padded_keeps_zero_and_never_collapses():
    assert padded([1.0, 3.0], 0.1, zero=True) == (0.0, 3.3)
    low, high = padded([2.0, 2.0])
    assert low < 2.0 < high


def test_lines_leave_the_frame_exactly_at_its_edge():
    frame = Scale(0, 10, 100, 0)  # positions run downward: 0 is the top
    assert inside([(0, -50), (10, 50), (20, 60)], frame) == [[(5, 0), (10, 50), (20, 60)]]
    assert inside([(0, 50), (10, 150), (20, 50)], frame) == [[(0, 50), (5, 100)], [(15, 100), (20, 50)]]


def test_buckets_and_means():
    assert bucketed([(1, 1.0), (2, 3.0), (3, 5.0)], 2) == [(2, 2.0), (3, 5.0)]
    assert averaged([[(1, 2.0), (2, 4.0)], [(1, 4.0)]]) == [(1, 3.0)]
    assert averaged([]) == []


def test_line_chart_reads_every_step_and_names_its_ends():
    drawn = line_chart(
        "curves", [Line("DIFF", [(1, 2.0), (5, 1.0)], "diff", read=True, end_label="end")], x_label="step"
    )
    assert re.findall(r'data-tip="([^"]*)"', drawn) == ["step 1\nDIFF: 2.000", "step 5\nDIFF: 1.000"]
    assert 'aria-label="curves"' in drawn
    assert ">end</text>" in drawn


def test_lines_that_end_at_the_same_height_keep_their_names_apart():
    lines = [Line(n, [(0, 1.0), (1, 2.0)], end_label=n) for n in ("a", "b")]
    heights = [float(y) for y in re.findall(r'y="([\d.]+)" class="end', line_chart("x", lines, x_label="step"))]
    assert abs(heights[0] - heights[1]) >= 14


def test_category_chart_reads_means_and_seeds():
    drawn = category_chart(
        "c", ["one"], {"diff": [{0: 1.0, 1: 3.0}], "softmax": [{0: 5.0}]}, x_label="x", bars=True, digits=1
    )
    assert re.findall(r'data-tip="([^"]*)"', drawn) == ["one\nDIFF: 2.0 (1.0 · 3.0)\nTransformer: 5.0"]


def test_bars_start_at_zero_and_are_proportional():
    drawn = category_chart(
        "c", ["one"], {"diff": [{0: 1.0}], "softmax": [{0: 2.0}]}, x_label="x", bars=True, y_range=(0.0, 4.0)
    )
    bars = [float(h) for h in re.findall(r'height="([\d.]+)" class="bar', drawn)]
    assert bars[1] == pytest.approx(2 * bars[0])


def test_heat_map_leaves_missing_cells_empty():
    drawn = heat_map(
        "h", ["r"], ["a", "b"], lambda r, c: 0.25 if c == 0 else None, lambda r, c: "t", x_label="", y_label=""
    )
    assert re.findall(r"--at:(\d+)%", drawn) == ["25"]
    assert drawn.count('class="hit"') == 1


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (1234567, "1,234,567"),
        (-0.0471, "−0.047"),
        (0.00012, "0.00012"),
        (None, "–"),
        (float("nan"), "–"),
        (True, "–"),
    ],
)
def test_number(value, text):
    assert number(value) == text


def test_number_signs_and_units():
    assert (number(0.5, 2, sign=True), number(-0.0001, 2, sign=True)) == ("+0.50", "0.00")
    assert (short(741_216), short(1e12), short(None)) == ("741 K", "1 T", "–")
    assert (duration(40), duration(2710), duration(12_000)) == ("40 s", "45 min", "3 h 20 min")
