"""Charts on cases worked by hand: what a specification holds, and the SVG that is drawn of it."""

import json
import re

import pytest

from diff_transformer.report.charts import (
    Line,
    Row,
    averaged,
    bucketed,
    category_chart,
    grid,
    heat_map,
    line_chart,
    padded,
    row_chart,
)
from diff_transformer.report.markup import duration, number, short
from diff_transformer.report.render import inline, is_current, save


def tips(chart) -> list[str]:
    return re.findall(r'data-tip="([^"]*)"', inline(chart))


def one_of_each() -> dict:
    lines = [
        Line("DIFF", [(1, 2.0), (5, 1.0)], "diff", read=True, marks=True, end_label="end", band=((1, 1.5, 2.5),)),
        Line("", [(1, 2.1), (5, 1.1)], "softmax", thin=True),
    ]
    return {
        "line": line_chart(
            "curves <b>", lines, x_label="step", guides=[(1.5, "chance")], x_ticks=[(1, "one"), (5, "V")]
        ),
        "category": category_chart("c", ["one", "two"], {"diff": [{0: 1.0, 1: 3.0}, {}]}, x_label="x", bars=True),
        "row": row_chart(
            "r", [Row("a", "s5", {0: 1.0}, 0.5, 1.5), Row("b", "s6", {0: 1.0, 1: 2.0})], x_label="x", guide=0
        ),
        "heat": heat_map("h", ["r"], ["a"], lambda r, c: 0.5, lambda r, c: "t", x_label="x", y_label="y"),
    }


@pytest.mark.parametrize("kind", ["line", "category", "row", "heat", "grid"])
def test_specifications_are_valid_vega_lite(kind):
    altair = pytest.importorskip("altair", reason="altair, which has Vega-Lite's schema, is not installed")
    made = one_of_each()
    chart = grid([(name, of) for name, of in made.items()], {"diff": "DIFF"}) if kind == "grid" else made[kind]
    altair.Chart.from_dict(chart, validate=True)


def test_a_page_s_chart_has_a_name_and_the_colours_of_the_page():
    drawn = inline(one_of_each()["line"])
    assert 'role="img" tabindex="0" aria-label="curves &lt;b&gt;"' in drawn
    assert "var(--diff)" in drawn
    assert not re.search(r'(?:fill|stroke)="(?:#|rgb|black|white)', drawn)
    assert ">end</text>" in drawn
    assert ">chance</text>" in drawn
    assert ">one</text>" in drawn


def test_two_charts_of_a_page_share_no_clip_path():
    charts = [
        inline(line_chart(name, [Line("m", [(1, 1.0), (2, y)])], x_label="x")) for name, y in (("a", 2), ("b", 3))
    ]
    ids = [set(re.findall(r'id="([^"]+)"', drawn)) for drawn in charts]
    assert all(ids)
    assert not ids[0] & ids[1]


def test_a_file_names_its_specification_and_has_colours_of_its_own(tmp_path):
    chart, path = grid([("one", one_of_each()["category"])], {"diff": "DIFF"}), tmp_path / "plot.svg"
    assert not is_current(chart, path)
    save(chart, path)
    assert is_current(chart, path)
    written = path.read_text()
    assert "var(" not in written
    assert ">DIFF</text>" in written
    assert not is_current(grid([("other", one_of_each()["category"])], {"diff": "DIFF"}), path)
    save(chart, path)
    assert path.read_text() == written


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [(0.6, 40, [1, 2, 5, 10, 20]), (0.5, 5000, [1, 10, 100, 1000]), (1, 100, [1, 2, 5, 10, 20, 50, 100])],
)
def test_ticks_of_a_logarithmic_axis_are_round_and_inside(low, high, ticks):
    chart = line_chart("l", [Line("m", [(1, low), (2, high)])], x_label="x", log_y=True, y_range=(low, high))
    assert chart["layer"][0]["encoding"]["y"]["axis"]["values"] == pytest.approx(ticks)


def test_a_short_logarithmic_axis_has_labels_all_the_same():
    drawn = inline(line_chart("l", [Line("m", [(1, 2.9), (2, 3.4)])], x_label="", log_y=True))
    assert len(re.findall(r">3(?:\.\d)?</text>", drawn)) >= 1


def test_padded_keeps_zero_and_never_collapses():
    assert padded([1.0, 3.0], 0.1, zero=True) == (0.0, 3.3)
    low, high = padded([2.0, 2.0])
    assert low < 2.0 < high
    assert padded([1.0, 100.0], 0.5, log=True) == pytest.approx((0.1, 1000.0))


def test_lines_end_at_the_frame_and_marks_stay_inside():
    drawn = inline(line_chart("l", [Line("m", [(0, -5.0), (1, 5.0)], marks=True)], x_label="", y_range=(0.0, 10.0)))
    assert "clip-path" in drawn
    assert drawn.count('<g class="mark-symbol"><path') == 1


def test_buckets_and_means():
    assert bucketed([(1, 1.0), (2, 3.0), (3, 5.0)], 2) == [(2, 2.0), (3, 5.0)]
    assert averaged([[(1, 2.0), (2, 4.0)], [(1, 4.0)]]) == [(1, 3.0)]
    assert averaged([]) == []


def test_line_chart_reads_every_step():
    assert tips(one_of_each()["line"]) == ["step 1\nDIFF: 2.000", "step 5\nDIFF: 1.000"]


def test_lines_that_end_at_the_same_height_keep_their_names_apart():
    lines = [Line(n, [(0, 1.0), (1, 2.0)], end_label=n) for n in ("a", "b")]
    drawn = inline(line_chart("x", lines, x_label="step", height=200))
    heights = [float(y) for y in re.findall(r'translate\([\d.]+,([-\d.]+)\)"[^>]*>[ab]<', drawn)]
    assert abs(heights[0] - heights[1]) >= 14


def test_category_chart_reads_means_and_seeds():
    values = {"diff": [{0: 1.0, 1: 3.0}], "softmax": [{0: 5.0}]}
    drawn = category_chart("c", ["one"], values, x_label="x", bars=True, digits=1)
    assert tips(drawn) == ["one\nDIFF: 2.0 (1.0 · 3.0)\nTransformer: 5.0"]


def test_bars_start_at_zero_and_are_proportional():
    values = {"diff": [{0: 1.0}], "softmax": [{0: 2.0}]}
    drawn = inline(category_chart("c", ["one"], values, x_label="x", bars=True, y_range=(0.0, 4.0)))
    bars = re.findall(r'<path d="M[\d.]+,([\d.]+)h[\d.]+v([\d.]+)h', drawn.split('class="mark-rect"', 1)[1])
    (top, tall), (top_2, tall_2) = [(float(a), float(b)) for a, b in bars[:2]]
    assert tall_2 == pytest.approx(2 * tall)
    assert top + tall == pytest.approx(top_2 + tall_2)


def test_row_chart_reads_intervals_and_seeds():
    assert tips(one_of_each()["row"]) == [
        "a\n+1.000\n95 % CI 0.500 to 1.500", "b\n+1.500\nseeds: 1.000 · 2.000",
    ]  # fmt: skip


def test_heat_map_leaves_missing_cells_empty():
    share = lambda r, c: 0.25 if c == 0 else None  # noqa: E731
    chart = heat_map("h", ["r"], ["a", "b"], share, lambda r, c: "t", x_label="", y_label="")
    assert tips(chart) == ["t"]
    assert 'fill-opacity="0.25"' in inline(chart)


def test_text_of_results_cannot_leave_the_drawing():
    attack = '</svg><script>alert(1)</script>"\u2028'
    values = {"diff": [{0: 1.0}]}
    drawn = inline(category_chart(attack, [attack], values, x_label=attack, names={"diff": attack}))
    assert "<script" not in drawn
    assert drawn.count("</svg>") == 1
    assert json.loads(json.dumps(tips(category_chart("c", [attack], values))))


@pytest.mark.parametrize("strange", ["\x1b[0m", "\x01", "\x08", "\x0b", "\x7f", "\ud800", "\uffff"])
def test_characters_that_svg_cannot_hold_are_replaced(strange):
    """Some of them end the interpreter in vl-convert (SIGABRT)."""
    name = f"arc{strange}"
    for chart in (
        line_chart(name, [Line(name, [(1, 1.0), (2, 2.0)], "diff", end_label=name)], x_label=name, x_ticks=[(1, name)]),
        category_chart(name, [name], {"diff": [{0: 1.0}]}, x_label=name, names={"diff": name}),
        row_chart(name, [Row(name, "diff", {0: 1.0})], x_label=name),
        heat_map(name, [name], [name], lambda r, c: 0.5, lambda r, c: name, x_label=name, y_label=name),
    ):
        drawn = inline(chart)
        assert "arc\ufffd" in drawn
        assert strange[0] not in drawn


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
