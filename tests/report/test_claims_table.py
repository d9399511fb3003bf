"""The claims in a terminal."""

from io import StringIO

from rich.console import Console

from diff_transformer.report import render_claims


def printed(results: dict, width: int = 240) -> str:
    out = StringIO()
    Console(file=out, width=width).print(render_claims(results))
    return out.getvalue()


def test_every_claim_with_its_verdict(results):
    text = printed(results)
    assert text.count("✓ held") == 2
    assert text.count("✗ did not hold") == 1
    assert text.count("? undecided") == 1
    assert "here (Transformer / DIFF)" in text
    assert "3.950 / 3.903" in text
    assert "interval over 2 seeds" in text


def test_one_run_and_the_seeds_that_would_decide_are_said(results, one_seed):
    text = printed(one_seed)
    assert (text.count("one run, in favour"), text.count("one run, against"), text.count("held")) == (2, 2, 0)
    results["claims"][1]["power"] = "18 seeds would decide it"
    text = printed(results)
    assert "18 seeds would decide it" in text
    assert "one run" not in text


def test_the_control_has_a_column(controlled):
    text = printed(controlled)
    assert "Transformer + head norm" in text
    assert "3.800" in text
    assert "compared with it: did not hold" in text
    narrow = printed(controlled, width=80)
    assert {line[-1] for line in narrow.splitlines()[1:-1] if line.strip()} <= set("┓┃┩│┤┘")
    assert "…" not in narrow


def test_text_is_not_read_as_markup(results):
    results["claims"][0]["here"] = "[red]3.9[/red]"
    assert "[red]3.9[/red]" in printed(results)


def test_no_claims_still_renders():
    assert "Claims" in printed({"schema": 1})
