"""The page as a file: complete, self-contained, small, and honest about seeds and losses."""

import copy
import io
import json
import os
import re
from pathlib import Path

import pytest
from rich.console import Console

from diff_transformer.errors import UserError
from diff_transformer.report import ResultsError, load_results, write_report
from diff_transformer.report.claims import interval, render_claims, two
from diff_transformer.report.figures import losses
from diff_transformer.report.page import render_page

SECTIONS = ["loss", "lambda", "recall", "needles", "allocation", "explorer", "outliers", "slices", "throughput"]


def sections(page: str) -> list[str]:
    return re.findall(r'<section id="([a-z]+)"', page)


def test_page_has_every_section_in_order(results):
    assert sections(render_page(results)) == ["claims", *SECTIONS, "method", "caveats"]


def test_a_figure_that_fails_is_named_and_the_others_are_drawn(results, monkeypatch):
    def broken(shown):
        raise ZeroDivisionError("no <steps>")

    monkeypatch.setattr(losses, "build", broken)
    page = render_page(results)
    assert sections(page) == ["claims", *SECTIONS[1:], "method", "caveats"]
    assert "This figure cannot be drawn: ZeroDivisionError: no &lt;steps&gt;" in page


def test_the_note_of_an_experiment_stands_at_its_figure(results):
    results = copy.deepcopy(results)
    for one in results["evals"]:
        if (one["eval"], one["attention"]) == ("outliers", "diff"):
            one["provenance"]["note"] = "too small"
    page = render_page(results)
    figure = page[page.index('<section id="outliers"') : page.index('<section id="slices"')]
    assert figure.count('<span class="who note">Note</span><span class="said">DIFF: too small.</span>') == 1


def test_file_is_written_from_a_dictionary_and_from_a_path(tmp_path, results):
    (tmp_path / "results.json").write_text(json.dumps(results))
    one = write_report(results, tmp_path / "new" / "one.html")
    two = write_report(tmp_path / "results.json", tmp_path / "two.html")
    assert one == tmp_path / "new" / "one.html"
    assert one.read_bytes() == two.read_bytes()
    assert not list(tmp_path.rglob("*.part"))


def test_existing_file_is_kept_unless_told(tmp_path, results):
    path = tmp_path / "page.html"
    path.write_text("mine")
    with pytest.raises(UserError, match="overwrite=True"):
        write_report(results, path)
    assert path.read_text() == "mine"
    write_report(results, path, overwrite=True)
    assert path.read_text().startswith("<!doctype html>")


def test_a_folder_that_may_not_be_written_to_is_said_before_the_page_is_made(tmp_path, results, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # no rights bind root
    with pytest.raises(UserError, match=f"{tmp_path} may not be written to; choose another --out"):
        write_report(results, tmp_path / "new" / "page.html")
    assert not list(tmp_path.iterdir())


def test_page_asks_for_nothing_outside_itself(results):
    page = render_page(results)
    assert not re.findall(r"https?://|@import|url\((?!#c)|srcset=|<img|<iframe", page)
    assert set(re.findall(r'(?:src|href)="([^"#]*)', page)) == {"", "data:,"}


def test_page_is_small(tmp_path, results):
    assert write_report(results, tmp_path / "page.html").stat().st_size < 1_500_000


def test_summary_sentence_and_verdicts_are_in_the_html_itself(results):
    page = render_page(results)
    said = "2 of 4 claims of the paper held in these 2 pairs of models, 1 did not and 1 is undecided."
    assert f"{said} Intervals are over examples; another seed may give another result." in page
    rows = re.findall(r'(?s)<tr id="claim-\d">.*?</tr>', page)
    verdicts = [word for row in rows for word in re.findall(r'class="verdict [a-z-]+"><svg.*?</svg>([a-z ]+)<', row)]
    assert verdicts == ["held", "undecided", "held", "did not hold"]
    assert "difference −0.047, interval over 2 seeds −0.077 to −0.017" in rows[0]
    assert "mean over 5 depths" in rows[1]


def test_the_first_screen_says_what_became_of_loss_and_retrieval(controlled):
    claims = controlled["claims"]
    claims[1]["id"] = "recall"
    page = render_page(controlled)
    loss = "Loss: better than the Transformer (−0.047), worse than the Transformer + head norm (+0.103)."
    recall = "Recall from noise (not a claim of the paper): not distinguishable from the Transformer (+0.025)."
    assert f"{loss} {recall}</p>" in page
    assert "Accuracy at the end: DIFF 0.365, Transformer 0.340; difference +0.025, " in page  # as the claim has it


@pytest.mark.parametrize("said", [{"id": "recall"}, {"ours": True}])  # an earlier record, and one of now
def test_what_the_paper_does_not_claim_stands_apart_and_is_not_counted(results, said):
    results["claims"][0] |= said
    for claim, p_value in zip(results["claims"], (0.001, 0.5, 0.03, 0.04), strict=True):
        claim["p_value"] = p_value
    page = render_page(results)
    assert "1 of 3 claims of the paper held in these 2 pairs of models, 1 did not and 1 is undecided." in page
    assert "Without a correction 2 of 3 tested claims are significant" in page
    table = page[page.index('<table class="claims">') : page.index("</table>")]
    assert re.findall(r"Not a claim of the paper|claim-\d", table) == [
        "claim-2", "claim-3", "claim-4", "Not a claim of the paper", "claim-1",
    ]  # fmt: skip
    assert 'href="#claim-1"' in page  # its figure still leads to it
    console = Console(record=True, width=200, file=io.StringIO())
    console.print(render_claims(results))
    text = console.export_text()
    assert text.index("Smaller largest attention logit") < text.index("(not a claim of the paper)")


def test_the_demo_s_page_counts_the_paper_s_claims():
    page = render_page(load_results(Path(__file__).parents[2] / "figures" / "demo"))
    assert "In one run, 7 of 15 claims of the paper came out in its favour" in page
    assert "worse than the Transformer + head norm (+0.033)" in page  # the old file has another name
    assert "normalised heads" not in page


def test_one_seed_has_no_interval(one_seed):
    page = render_page(one_seed)
    assert "In one run, 2 of 4 claims of the paper came out in its favour and 2 against it. Intervals are over" in page
    verdicts = re.findall(r'<td data-label="Verdict"><span class="verdict one-run">([^<]*)<', page)  # no tick
    assert sorted(verdicts) == ["one run: against"] * 2 + ["one run: in favour"] * 2
    assert ">one run: in favour</span><span>Lower language-modelling loss</span></a>" in page
    assert "held<" not in page
    assert page.count("difference −0.047, one seed: no interval") == 4  # the claim, its figure, twice in the picture
    assert "interval over" not in page
    assert "One seed: these results cannot separate a difference between models" in page


def test_a_claim_of_one_run_does_not_make_all_of_them_one_run(results):
    results["claims"][0] |= {"diff": [1.0], "softmax": [2.0]}  # as the throughput, which is timed once
    assert "In one run" not in render_page(results)


def test_an_undecided_claim_shows_how_many_seeds_would_decide_it(results):
    results["claims"][1]["power"] = "18 seeds would decide it, with this mean and spread"
    page = render_page(results)
    assert page.count('<span class="small">18 seeds would decide it, with this mean and spread</span>') == 1
    assert "one run" not in page


def test_holm_s_correction_over_the_claims_stands_below_them(results):
    assert "Holm" not in render_page(results)
    for claim, p_value in zip(results["claims"], (0.001, 0.5, 0.03, 0.04), strict=True):
        claim["p_value"] = p_value
    page = render_page(results)
    said = "Without a correction 3 of 4 tested claims are significant; with Holm&#x27;s correction 1 is: "
    assert page.count(said + results["claims"][0]["claim"]) == 1
    assert "without a correction for multiple tests" not in page


def test_the_control_is_a_column_of_the_claims(results, controlled):
    page = render_page(controlled)
    head = page[page.index('<table class="claims controlled">') : page.index("</thead>")]
    names = re.findall(r'<th scope="col">([A-Z][^<]*)', head)
    assert names == ["Claim", "Paper", "Here", "Transformer + head norm", "Verdict"]
    cells = re.findall(r'<td data-label="Control">(.*?)</td>', page)
    assert len(cells) == len(controlled["claims"])
    assert "3.800 nats a token" in cells[0]
    assert "difference +0.103 (+0.100 to +0.106)" in cells[0]
    assert "compared with it: did not hold" in cells[0]
    assert 'data-label="Control">' not in render_page(results)


def test_an_interval_over_examples_is_not_taken_for_one_over_seeds(one_seed):
    claim = one_seed["claims"][0]
    claim["difference"] = {"mean": -0.05, "low": -0.07, "high": -0.03, "over": "examples", "relative": True}
    page = render_page(one_seed)
    assert "difference −5.00 %, interval over examples −7.00 % to −3.00 % (one seed)" in page


def test_a_bound_beside_zero_is_not_written_as_zero(one_seed):
    claim = one_seed["claims"][0]
    claim["difference"] = {"mean": -0.0153, "low": -0.0365, "high": -0.00039, "over": "examples"}
    assert interval(claim) == "difference −0.0153, interval over examples −0.0365 to −0.0004 (one seed)"
    claim["difference"] = {"mean": 0.0, "low": 0.0, "high": 0.0, "over": "examples"}
    assert interval(claim) == "difference 0, one seed: no interval"


def test_two_numbers_carry_the_marks_of_their_models():
    marked = (
        '<i class="swatch softmax" aria-hidden="true"></i>.62 / <i class="swatch diff" aria-hidden="true"></i>.84 (4K)'
    )
    assert two(".62 / .84 (4K)") == marked
    assert two("not reported; <6>: .55 / .85") == "not reported; &lt;6&gt;: .55 / .85"


def test_a_loss_of_diff_is_named(results):
    page = render_page(results)
    outliers = page[page.index('<section id="outliers"') : page.index('<section id="slices"')]
    assert re.search(
        r'who softmax weak">Transformer ahead in this run</span><span class="said">Logits, top 1: DIFF 23.1,', outliers
    )


def test_claims_link_to_their_figures_and_back(results):
    page = render_page(results)
    assert re.findall(r'(?s)<tr id="claim-2">.*?href="(.*?)".*?</tr>', page) == ["#needles"]
    assert 'href="#claim-2"' in page[page.index('<section id="needles"') : page.index('<section id="allocation"')]


@pytest.mark.parametrize(
    "key", ["claims", "curves", "evals", "explorer", "pair", "train", "provenance", "title", "seconds"]
)
@pytest.mark.parametrize("emptied", ["absent", "null"])
def test_absent_sections_are_left_out(results, key, emptied):
    whole = sections(render_page(results))
    if emptied == "absent":
        del results[key]
    else:
        results[key] = None
    gone = {
        "claims": {"claims"},
        "curves": {"loss", "lambda"},
        "explorer": {"explorer"},
        "evals": {"recall", "needles", "allocation", "outliers", "slices", "throughput"},
    }.get(key, set())
    assert sections(render_page(results)) == [s for s in whole if s not in gone]


@pytest.mark.parametrize("attention", ["diff", "softmax"])
def test_page_stands_with_one_model_only(results, attention):
    for key in ("curves", "evals", "explorer"):
        results[key] = [entry for entry in results[key] if entry["attention"] == attention]
    page = render_page(results)
    assert ("lambda" in sections(page)) == (attention == "diff")
    assert "ahead</span>" not in page


def test_page_stands_with_the_schema_alone():
    assert sections(render_page({"schema": 1})) == ["method", "caveats"]


def test_values_that_are_no_numbers_are_skipped(results):
    broken = copy.deepcopy(results)
    for curve in broken["curves"]:
        curve["loss"][3] = float("nan")
        curve["loss"][4] = None
    for entry in broken["evals"]:
        entry["metrics"] = {k: (None if i % 2 else v) for i, (k, v) in enumerate(entry["metrics"].items())}
    page = render_page(broken)
    assert not re.search(r"\bnan\b|\binf\b", re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL))


def test_lambda_outside_its_range_is_an_alarm(results):
    assert 'who alarm">Alarm' not in render_page(results)
    results["curves"][0]["lambda"][7][1] = -0.02
    page = render_page(results)
    assert "Lambda left the range 0 to 1: −0.020 in layer 2 at step 35, seed 0." in page


def test_a_page_above_the_limit_is_refused(tmp_path, results):
    results["command"] = "x" * 3_000_000
    with pytest.raises(ResultsError, match="above 3,000,000"):
        write_report(results, tmp_path / "page.html")
    assert not list(tmp_path.iterdir())


def test_a_quantity_has_one_interval_on_the_page(results):
    """The claim, the figure of the experiment and the figure of all models say the same of a difference."""
    for claim in results["claims"]:
        claim["difference"] |= {"over": "examples"}
        claim["control"] = {"values": claim["softmax"], "difference": claim["difference"], "verdict": "held"}
    rows = [{"variant": "softmax_norm", "loss": {"0": 3.9, "1": 3.91}}]
    page = render_page({**results, "variants": rows})
    loss = "difference −0.047, interval over examples −0.077 to −0.017 (2 seeds)"
    needle = "difference +0.025, interval over examples −0.005 to +0.055 (2 seeds)"
    assert page.count(loss) == 9  # the claim; DIFF against both in two figures; each twice in the picture
    assert page.count(needle) == 6
    for said in re.findall(r"(?:All tokens|N = 4, R = 2): [^<]*", page):
        assert "the same sign" not in said


def test_what_is_computed_is_not_called_measured(results):
    rows = [{"variant": name, "loss": {"0": 4.0}, "flops_per_token": 2.5e6} for name in ("diff", "softmax", "dint")]
    page = render_page({**results, "variants": rows})
    assert "FLOPs a token (computed)" in page
    assert "tokens/s, training (measured)" in page
    assert "Parameters and arithmetic, computed" in page
    assert "speed are as measured" not in page


def test_the_picture_of_all_claims_comes_before_their_table(results):
    """Further right is as claimed, on a scale that claims share: the square root of the difference over its scale."""
    results["claims"][1]["control"] = {"values": [0.3], "difference": {"mean": -0.25, "low": -0.36, "high": -0.16}}
    page = render_page(results)
    assert page.index('class="forest"') < page.index('class="claims')
    loss, needles, answer, logits = re.findall(r'(?s)<div class="row"><a href="#claim-\d">.*?</svg>', page)
    gap = 0.047 / 3.964  # lower by 0.047, over the Transformer's loss: to the right
    assert f'class="swatch softmax" style="left:{50 + 50 * gap**0.5:.1f}%' in loss
    assert 'class="swatch softmax" style="left:57.9%' in needles  # 0.025 of the 100 points of an accuracy
    assert 'class="spread s1" style="left:20.0%;width:10.0%"' in needles  # -0.36 to -0.16 against the control
    assert 'class="swatch s1" style="left:25.0%"' in needles
    assert 'class="swatch s1"' not in answer
    left = float(re.search(r'class="swatch softmax" style="left:([\d.]+)%', logits)[1])
    assert left < 50  # larger where the paper says smaller
