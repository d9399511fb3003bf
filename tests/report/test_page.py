"""The page of results, its tables and pictures."""

import json
import re

import pytest
from made_rows import attention, comparison, model
from rich.console import Console

from diff_transformer.errors import UserError
from diff_transformer.lab.paper import SAID
from diff_transformer.lab.rows import Rows, row
from diff_transformer.report import figures
from diff_transformer.report.charts import draw, names_of
from diff_transformer.report.explorer import examples
from diff_transformer.report.page import judged, render, terminal_table, write_picture, write_report
from diff_transformer.report.tables import markdown


@pytest.fixture(scope="module")
def page():
    return render(Rows(comparison()))


def test_the_first_screen_says_what_held_over_what(page):
    lead = re.search(r'<p class="lead">(.*?)</p>', page, re.DOTALL)[1]
    counts = r"In one run of each model, (\d+) of (\d+) claims of the paper held against the Transformer; (.*?)\. "
    held, judged, others = re.match(counts, lead).groups()
    assert int(held) + sum(map(int, re.findall(r"\d+", others))) == int(judged)
    assert "could not be tested" in others
    assert "another seed may give another result" in lead
    assert "Recall from noise (not a claim of the paper): better than the Transformer" in lead
    assert page.index('class="lead"') < page.index("<svg") < page.index('id="claims"')


def test_every_claim_has_its_difference_interval_and_number_of_examples(page):
    rows = re.findall(r'<tr id="claim-0-(\w+)">(.*?)</tr>', page, re.DOTALL)
    assert {"loss", "recall", "needle_n1_r1", "four_bits", "throughput"} <= {id for id, _ in rows}
    for id, text in rows:
        assert re.search(r"1 seed × \d+", text), id
        assert "no interval" in text or " to " in text, id
    assert page.count("Not a claim of the paper") == 1


def test_figures_have_their_settings_numbers_and_examples(page):
    for id in (
        "losses",
        "needles",
        "allocation",
        "long_nll",
        "outliers",
        "quantization",
        "recall",
        "lambda",
        "throughput",
    ):
        section = re.search(rf'<section id="{id}".*?</section>', page, re.DOTALL)[0]
        assert section.count("<svg") == 2, id  # wide and narrow
        assert "<summary>Numbers</summary>" in section, id
    needles = re.search(r'<section id="needles".*?</section>', page, re.DOTALL)[0]
    assert "Measured with length 128." in needles
    assert "Where &lt;b&gt;is&lt;/b&gt; it?" in needles
    assert {figure.paper for figure in figures.FIGURES} == {*SAID.values(), ""}
    assert "cannot be drawn" not in page


def test_the_page_needs_nothing_from_elsewhere(page):
    assert not re.findall(r"""(?:src|href)=["'](?:https?:)?//""", page)
    assert len(page) < 3_000_000


def heads_of(*sides):
    """Rows of ``eval anatomy``: two layers of two heads, and eigenvalues."""
    return [
        made
        for side in sides
        for layer, head in ((0, 0), (0, 1), (1, 0), (1, 1))
        for made in (
            row("anatomy", side, layer=layer, head=head, sink=0.1, importance=0.1 * head, keys=4.0,
                negative_mass=0.1 * layer if side == "diff" else None),
            row("hessian", side, example=head - 1 or 1, rank=head - 1 or 1, value=3.0 - head),
        )
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (
            [each for each in comparison() if each["experiment"] in ("recall", "about")],
            "No claim of the paper could be",
        ),
        (comparison(("diff",)), "1 model measured; nothing to compare with."),
        (comparison(("softmax", "mine"), setting="own"), "mine against its matched Transformer"),
        (comparison(("softmax", "llama", "gpt", "qwen"), setting=""), "4 models measured; none is the baseline"),
        (comparison(("llama", "gpt")), "2 models measured; none is the baseline of another"),
        (comparison(seeds=(0, 1, 2)), "After Holm's correction"),
        (  # speed, of one seed, has no p
            [
                each
                for each in comparison(seeds=(0, 1, 2))
                if each["experiment"] == "allocation" or (each["experiment"] == "throughput" and not each["seed"])
            ],
            "After Holm's correction 0 of them hold.",
        ),
        ([row("quantization_choice", "m", example=i, bits=4, score=1.0) for i in range(3)], "Right choices with"),
        (heads_of("diff", "softmax"), "2 models measured; the paper claims nothing about these measurements."),
        ([row("mine", "m", example=i, score=i % 2) for i in range(9)], "1 model measured"),
    ],
)
def test_any_results_have_a_page(rows, words):
    page = render(Rows(rows))
    assert words.replace("'", "&#39;") in page
    assert "cannot be drawn" not in page


def test_results_of_a_study_are_by_setting():
    rows = [
        *comparison(setting="small", seeds=(0, 1, 2)),
        *comparison(setting="large"),
        *model("diff", setting="sweep/lr1"),
    ]
    page = render(Rows(rows))
    assert "<h1>2 settings, 3 models</h1>" in page
    assert '<h2 id="setting-' in page
    assert "sweep/lr1" not in page


def test_names_and_texts_cannot_break_the_page():
    evil = '</script><script>alert(1)</script>"&\x1b\x00\ud800'
    rows = [*comparison(), *model(evil), row("mine", evil, example=0, score=1.0, prompt=evil, expected=evil, got=evil)]
    page = render(Rows([*rows, attention(evil)]))
    assert "<script>alert(1)" not in page
    page.encode()
    assert "cannot be drawn" not in page


def test_a_figure_that_fails_is_named_and_the_rest_is_drawn(monkeypatch):
    def broken(rows, sides):
        raise ZeroDivisionError("no <tokens>")

    needles = figures.Figure("needles", "Needles", "", "needle", "", broken)
    monkeypatch.setattr(figures, "FIGURES", [needles if each.id == "needles" else each for each in figures.FIGURES])
    page = render(Rows(comparison()))
    assert "This figure cannot be drawn: ZeroDivisionError: no &lt;tokens&gt;" in page
    assert page.count("cannot be drawn") == 1


def test_models_measured_with_other_settings_are_named():
    rows = comparison()
    for each in rows:
        if (each["experiment"], each["side"], each.get("of")) == ("about", "diff", "needle"):
            each["value"] = 64
    assert "length differs: DIFF 64, Transformer 128" in render(Rows(rows))


def test_the_explorer_leaves_out_what_is_too_large(monkeypatch):
    rows = Rows(comparison())
    texts, left_out = examples(rows, {"diff": "DIFF", "softmax": "Transformer", "softmax_norm": "x"})
    (text,) = texts
    assert left_out == 0
    assert [each["name"] for each in text["models"]] == ["DIFF", "Transformer", "x"]
    assert json.dumps(texts)
    (text,), _ = examples(Rows([attention("diff", "a"), attention("diff", "b")]), {"diff": "DIFF"})
    assert [each["name"] for each in text["models"]] == ["DIFF, a", "DIFF, b"]
    monkeypatch.setattr("diff_transformer.report.explorer.FIRST", 10)
    assert examples(rows, dict.fromkeys(rows.sides, "m")) == ([], 1)


def test_a_terminal_of_80_columns_has_every_claim():
    rows = Rows(comparison())
    ours, verdicts = judged(rows)
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(terminal_table(verdicts, ours))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80
    assert re.search(r"Lower language-modelling.* −0\.\d+ held", text)


def test_tables_are_differences_or_values():
    lines = markdown(Rows(comparison(seeds=(0, 1, 2))), ["loss", "recall"]).splitlines()
    assert lines[0] == "**demo**"
    assert [line.split(" | ")[:2] for line in lines[4:]] == [
        ["| DIFF", "loss"], ["| DIFF", "accuracy of key-value recall"],
        ["| Transformer + head norm", "loss"], ["| Transformer + head norm", "accuracy of key-value recall"],
    ]  # fmt: skip
    assert lines[4].endswith("| held |")
    alone = markdown(Rows(comparison(("llama",))), ["needle_n1_r1"])
    assert alone.splitlines()[-1] == "| 1 needle | 0.900 (0.769 to 0.960), n 40 |"
    choices = [row("quantization_choice", "llama", example=i, bits=4, score=float(i < 1)) for i in range(4)]
    assert "| right choices, 4-bit logits | 0.250 (0.046 to 0.699), n 4 |" in markdown(Rows(choices))
    twice = [row("mine", side, example="x", right=right) for side in ("diff", "softmax") for right in (True, False)]
    assert "| DIFF | mine right | 0.500 | 0.500 | +0.000 | 1 |" in markdown(Rows(twice))
    with pytest.raises(UserError, match=r"no quantity 'los' \(did you mean 'loss'"):
        markdown(Rows(comparison()), ["los"])


def test_pictures_have_plain_colours(tmp_path):
    text = write_picture(Rows(comparison()), "losses", tmp_path / "a.svg").read_text()
    assert text.startswith("<svg")
    assert "var(" not in text
    assert "Transformer + head norm" in text
    with pytest.raises(UserError, match="no figure 'needle'"):
        write_picture(Rows(comparison()), "needle", tmp_path / "b.svg")
    with pytest.raises(UserError, match="have no rows of many_shot"):
        write_picture(Rows(comparison()), "many_shot", tmp_path / "b.svg")


def test_axes_are_in_order_and_have_labels_whatever_was_measured(tmp_path):
    """Of models with other numbers of examples, and of intervals below 0 on a logarithmic axis."""
    shots = [row("many_shot", side, example=n, shots=n, order="random", order_seed=0, score=1.0)
             for side, counts in (("a", (1, 7, 31)), ("b", (1, 6, 28))) for n in counts]  # fmt: skip
    text = write_picture(Rows(shots), "many_shot", tmp_path / "a.svg").read_text()
    assert [int(n) for n in re.findall(r">(\d+)</text>", text)][:5] == [1, 6, 7, 28, 31]
    *_, by_order = figures.many_shot(Rows(shots), {"a": "a", "b": "b"})
    assert [*by_order.frame["side"]] == ["a", "b"]
    largest = [row("outliers_top", "a", seed, kind="logits", layer=-1, k=1, value=value)
               for seed, value in enumerate((10.0, 20.0, 300.0))]  # fmt: skip
    text = write_picture(Rows(largest), "outliers", tmp_path / "b.svg").read_text()
    assert "NaN" not in text
    assert ">100</text>" in text


def test_runs_of_one_size_are_a_point():
    runs = [row("scaling_runs", "diff", example=i, fit="tokens", x=10 * (i // 3), loss=3.0 + i) for i in range(9)]
    sides = {"diff": "DIFF"}
    (drawn, _) = draw(figures.scaling(Rows(runs), sides), sides, 300, 2)["concat"]
    assert [point["y"] for point in drawn["layer"][0]["data"]["values"]] == [4.0, 7.0, 10.0]


def test_nothing_is_written_over_and_no_rows_are_refused(tmp_path):
    rows = Rows(comparison(("diff",)))
    write_report(rows, tmp_path / "deep" / "a.html")
    with pytest.raises(UserError, match="exists; choose another file, or give --overwrite"):
        write_report(rows, tmp_path / "deep" / "a.html")
    with pytest.raises(UserError, match="no rows of a model"):
        render(Rows())


def test_sweeps_are_no_seeds_of_a_study():
    rows = [*comparison(seeds=(0, 1)), *model("diff", 100, "sweep/lr1"), *model("softmax", 100, "sweep/lr1")]
    assert "<dd>2</dd>" in re.search(r"<dt>Training seeds</dt>(.*?)</div>", render(Rows(rows)))[0]
    for setting in ("sweep/lr1", "mine/large"):  # alone; called so by its user
        assert "<h1>DIFF against its matched" in render(Rows(comparison(setting=setting)))
        assert markdown(Rows(comparison(setting=setting)), ["loss"]).startswith(f"**{setting}**")


def test_every_claim_that_is_not_tested_says_why():
    rows = comparison(seeds=(0, 1, 2))
    rows.append(row("about", "diff", 1, "demo", of="run", example="diverged", key="diverged", value="step 7: loss nan"))
    page = render(Rows(rows))
    assert page.count("not tested: training diverged with seed 1") > 10
    assert "Training diverged: DIFF, seed 1." in page


def test_a_model_from_elsewhere_is_no_counterpart():
    page = render(Rows([*model("softmax", setting=""), *model("gpt2", setting="")]))
    assert "gpt2 against its matched Transformer" not in page
    assert "2 models measured" in page
    mixed = render(Rows([*model("diff"), *model("gpt2", setting="")]))
    assert '<section id="needles"' in mixed


def test_sides_of_one_name_are_told_apart():
    assert names_of(["diff_norm1", "v1_published", "softmax"]) == {
        "diff_norm1": "DIFF as published (diff_norm1)", "v1_published": "DIFF as published (v1_published)",
        "softmax": "Transformer",
    }  # fmt: skip


def test_scores_beyond_one_and_texts_are_drawn_as_they_are():
    rows = [row("mine", "m", example=i, score=7.0 + i % 3, label="x", right=i % 2 == 0) for i in range(9)]
    page = render(Rows(rows))
    assert "cannot be drawn" not in page
    assert not re.search(r"8\.000 \([\d.]+ to 1, n", page)
