"""The page that lays training runs over one another: finished ones, ones in progress, damaged ones."""

import html
import json
import re
import shutil

import numpy as np
import pytest
from browser import CHROMIUM, needs_chromium
from typer.testing import CliRunner

from diff_transformer.cli import app
from diff_transformer.lab.recipes import recipe
from diff_transformer.report.load import ResultsError, is_run, load_runs
from diff_transformer.report.run_figures import thinned
from diff_transformer.report.runs_page import render_runs_page, write_runs_report
from diff_transformer.train.config import override

ATTACK = "</script><img src=x onerror=alert(1)>"
PARTS = ("embedding", "query", "key", "value", "output", "lambda", "head_norm", "feed_forward", "norms")


def write_run(folder, attention="diff", steps=400, settings=(), finished=True, level=3.0, layers=3, every=5):
    """A run folder as ``train`` leaves it, with curves from a fixed seed."""
    draw = np.random.default_rng(3)
    folder.mkdir(parents=True)
    override(recipe("debug"), [f"model.attention={attention}", *settings]).save(folder / "config.json")
    lines = []
    for step in range(0, steps + 1, every):
        line: dict = {"step": step}
        if step:
            norms = draw.uniform(0.1, 1.0, len(PARTS))
            line |= {"loss": level + 3 * np.exp(-step / 60) + draw.normal(0, 0.02), "lr": 1e-3 * (1 - step / 500)}
            line |= {"grad_norm": float(np.linalg.norm(norms)), "tokens_per_second": draw.normal(9000, 90), "mfu": 0.31}
            line["grad_norm_by_part"] = {name: float(v) for name, v in zip(PARTS, norms, strict=True)}
            line["loss_by_source"] = {"text": level + 0.1, "recall": 0.4}
            line |= {"memory_bytes": 600_000_000, "peak_memory_bytes": 700_000_000}
        if attention == "diff":
            line["lambda"] = [0.2 + 0.1 * i + 1e-4 * step for i in range(layers)]
            line["head_norm_gain"] = [0.1 + 1e-4 * step] * layers
        if step % 50 == 0:
            line["validation_loss"] = level + 0.05 + 3 * float(np.exp(-step / 60))
        lines.append(line)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if finished:
        (folder / "model").mkdir()
    return folder


@pytest.fixture
def pair(tmp_path):
    other = write_run(tmp_path / "plain", "softmax", level=3.2, settings=["optim.lr=0.5"])
    return [write_run(tmp_path / "ours"), other]


@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        ("metrics.jsonl", lambda data: data[:3000], "ends at step {last}, and the run was finished at step 400"),
        ("metrics.jsonl", lambda data: b"", "ends at step 0, and the run was finished at step 400"),
        ("metrics.jsonl", lambda data: b"\0" * len(data), "ends at step 0, and the run was finished at step 400"),
        ("metrics.jsonl", lambda data: b"\0" * 300 + data[300:], "is damaged: 80 lines from line 1 on cannot be read"),
        ("metrics.jsonl", lambda data: b"{" + b"[" + data[2:], "is damaged: 81 lines from line 1 on cannot be read"),
        ("metrics.jsonl", lambda data: data.replace(b"lr", b"l\xf2", 9), "is damaged: 80 lines from line 2 on cannot"),
        (
            "metrics.jsonl",
            lambda data: data.replace(b'"step": 200', b'"step": 210'),
            "is damaged: 40 lines from line 42 on",
        ),
        (
            "metrics.jsonl",
            lambda data: data + b"[" * 10**5 + b"\n",
            "is damaged: 1 line from line 82 on cannot",
        ),
        ("config.json", lambda data: data[:300], "is damaged (is not JSON ("),
        ("config.json", lambda data: b"", "is damaged (is not JSON ("),
        ("config.json", lambda data: b"[" * 10**5, "is damaged (is not JSON ("),
        ("config.json", lambda data: b"[1]", "is damaged ("),
        ("config.json", lambda data: data.replace(b"optim", b"opti\xed", 1), "is damaged (is not JSON ("),
        ("config.json", lambda data: data.replace(b"optim", b"optio", 1), "is damaged (no setting 'optio'"),
        ("config.json", None, "is missing"),
    ],
)
def test_what_cannot_be_read_is_said_on_the_page_and_the_terminal(tmp_path, caplog, name, damage, said):
    folder = write_run(tmp_path / "run", settings=["train.steps=400"])
    whole = (folder / name).read_bytes()
    (folder / name).unlink() if damage is None else (folder / name).write_bytes(damage(whole))
    (run,) = load_runs([folder])
    said = f"{folder / name} {said}".replace("{last}", str(run.step))
    assert said in caplog.text
    page = render_runs_page([run])
    assert said.split(" (")[0] in html.unescape(visible(page))
    caplog.clear()
    (folder / name).write_bytes(whole)
    (run,) = load_runs([folder])
    assert run.damage == ()
    assert caplog.text == ""


def test_a_run_in_progress_may_be_within_a_line(tmp_path):
    folder = write_run(tmp_path / "run", settings=["train.steps=900"], finished=False)
    metrics = folder / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes()[:-20])
    assert load_runs([folder])[0].damage == ()


def visible(page: str) -> str:
    return re.sub(r"<(script|style).*?</\1>", "", page, flags=re.DOTALL)


def sections(page: str) -> list[str]:
    return re.findall(r'<section id="([\w-]+)"', page)


def section(page: str, name: str) -> str:
    start = page.index(f'<section id="{name}"')
    return page[start : page.index("</section>", start)]


def test_every_curve_has_its_place(pair):
    page = render_runs_page(load_runs(pair))
    assert sections(page) == ["loss", "sources", "gradients", "rate", "lambda", "gain", "speed", "memory", "settings"]
    titles = re.findall(r"<h3>(.*?)</h3>", section(page, "gradients"))
    expected = [name.replace("_", " ").capitalize() for name in PARTS]
    assert titles == ["All parameters", *expected]
    assert re.findall(r"<h3>(.*?)</h3>", section(page, "lambda")) == [
        "Last value of each layer",
        "Layer 1",
        "Layer 2",
        "Layer 3",
    ]
    for name, lines in {"loss": 4, "sources": 4, "rate": 2, "lambda": 4, "speed": 4, "memory": 4}.items():
        assert section(page, name).count('class="mark-line"') == lines, name
    assert "Last validation loss, the lowest first: ours 3.0538 (step 400), plain 3.2538 (step 400)." in page


def test_the_pair_has_its_colours_and_others_have_theirs(pair, tmp_path):
    assert [run.side for run in load_runs(pair)] == ["diff", "softmax"]
    third = write_run(tmp_path / "third")
    assert [run.side for run in load_runs([*pair, third])] == ["s1", "softmax", "s2"]


def test_settings_that_differ_and_no_others(pair):
    table = section(render_runs_page(load_runs(pair)), "settings")
    assert re.findall(r'<tr><th scope="row">(.*?)</th><td>(.*?)</td><td>(.*?)</td>', table) == [
        ("model.attention", "diff", "softmax"),
        ("optim.lr", "0.003", "0.5"),
    ]
    assert "2 settings of the configuration differ." in table
    alone = section(render_runs_page(load_runs(pair[:1])), "settings")
    assert "There are no two configurations to compare." in alone


def test_the_first_table_sums_up(pair, tmp_path):
    running = write_run(tmp_path / "running", steps=120, finished=False)
    page = visible(render_runs_page(load_runs([*pair, running])))
    head = page[: page.index("<section")]
    assert "1 of 3 runs is not finished." in head
    rows = re.findall(r'<tr><th scope="row">.*?</i>(\w+)</span></th>(.*?)</tr>', head)
    cells = {name: re.findall(r"<td>(.*?)</td>", row) for name, row in rows}
    assert cells["running"][:2] == ["not finished", "120 of 20"]
    assert cells["ours"][3:] == ["3.0538", "3.0538 (400)", cells["ours"][5], "31.0 %", "700 MB"]
    assert re.fullmatch(r"(8\.9\d|9(\.0\d)?) K", cells["ours"][5])


def test_a_cut_last_line_a_gap_and_no_configuration(pair):
    """Incomplete folders: a run in progress, a killed run, a partial copy."""
    file = pair[0] / "metrics.jsonl"
    whole = file.read_text()
    file.write_text(whole + '{"step": 405, "lo')
    assert load_runs(pair)[0].step == 400
    file.write_bytes(whole.encode()[:-7] + b"\xff\xfe")
    assert load_runs(pair)[0].step == 395
    (pair[0] / "config.json").write_text("{")
    lines = [{"step": 1, "loss": float("nan"), "lambda": None}, {"step": 2, "loss": 3.0, "lambda": [0.1, None]}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = visible(render_runs_page(load_runs(pair)))
    assert not re.search(r"\bnan\b|\bNone\b", page)
    file.write_text("")
    assert "–" in render_runs_page(load_runs(pair[:1]))
    file.write_text("no json\n")
    assert sections(render_runs_page(load_runs(pair[:1]))) == ["settings"]


def test_alarms(pair):
    file = pair[0] / "metrics.jsonl"
    lines = [json.loads(text) for text in file.read_text().splitlines()]
    lines[40]["lambda"][1] = 1.25
    lines[60]["lambda"][2] = -0.5
    lines[50]["grad_norm"] = 100.0
    lines.append({"step": 400, "note": "checkpoint step-00000400 is damaged: x; step-00000200 is used instead"})
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = visible(render_runs_page(load_runs(pair)))
    alarms = re.findall(r'class="who alarm">Alarm</span><span class="said">(.*?)</span>', page)
    assert alarms[0] == "ours, step 400: checkpoint step-00000400 is damaged: x; step-00000200 is used instead."
    assert re.fullmatch(r"ours: the gradient norm reached 100 at step 250, \d+ times its median\.", alarms[1])
    assert alarms[2] == ("ours: lambda left the range 0 to 1 in layers 2, 3, first at step 200 (1.250 in layer 2).")
    assert len(alarms) == 3


def test_names_tell_runs_apart(tmp_path):
    for member in ("diff-seed0", "softmax-seed0"):
        write_run(tmp_path / "a" / "members" / member / "run")
    write_run(tmp_path / "b" / "members" / "diff-seed0" / "run")
    members = [tmp_path / "a" / "members" / name for name in ("diff-seed0", "softmax-seed0")]
    assert [run.label for run in load_runs(members)] == ["diff-seed0", "softmax-seed0"]
    other = tmp_path / "b" / "members" / "diff-seed0" / "run" / "metrics.jsonl"
    labels = [run.label for run in load_runs([*members, other])]
    assert labels == ["a/members/diff-seed0", "a/members/softmax-seed0", "b/members/diff-seed0"]
    assert len(load_runs([members[0], members[0] / "run"])) == 1


def test_many_long_runs_fit_on_a_page(tmp_path):
    first = write_run(tmp_path / "run0", steps=600, every=1, layers=28)
    for i in range(1, 12):
        shutil.copytree(first, tmp_path / f"run{i}")
    path = write_runs_report([tmp_path / f"run{i}" for i in range(12)], tmp_path / "page.html")
    assert path.stat().st_size < 3_000_000
    assert "8 of 28 layers are shown over training." in path.read_text()


def test_thinning_keeps_the_mean_and_shares_its_steps():
    steps = [float(i) for i in range(1, 101)]
    points = [(step, step) for step in steps]
    few = thinned(points, steps, runs=30)
    assert len(few) == 12
    assert few[-1][0] == 100.0
    assert few[0] == (8.0, 4.5)
    assert [step for step, _ in thinned(points[:40], steps, runs=30)] == [step for step, _ in few if step <= 42]
    assert thinned(points[:10], steps[:10], runs=30) == points[:10]


def test_the_page_stands_alone_and_text_stays_text(pair):
    lines = json.loads((pair[0] / "metrics.jsonl").read_text().splitlines()[-1])
    lines |= {"note": ATTACK, "grad_norm_by_part": {ATTACK: 1.0}, "step": 500}
    with (pair[0] / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(lines) + "\n")
    evil = pair[0].rename(pair[0].with_name("<img src=x>"))
    page = render_runs_page(load_runs([evil, pair[1]]))
    assert "<img" not in page
    assert set(re.findall(r'(?:src|href)="([^"#]*)', page)) == {"", "data:,"}
    assert not re.findall(r"https?://|@import|url\((?!#c)", page)


def test_the_command_takes_runs(pair, tmp_path):
    out = tmp_path / "page.html"
    done = CliRunner().invoke(app, ["report", *map(str, pair), "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "Training runs" in out.read_text()
    again = CliRunner().invoke(app, ["report", str(pair[0]), "--out", str(out)])
    assert isinstance(again.exception, FileExistsError)


def test_what_is_no_run(tmp_path, pair):
    assert is_run(pair[0])
    assert is_run(pair[0] / "metrics.jsonl")
    assert not is_run(tmp_path)
    assert not is_run(tmp_path / "nowhere")
    with pytest.raises(
        ResultsError, match=r"is not a run: it has no metrics\.jsonl; give the folders that `train` wrote"
    ):
        load_runs([*pair, tmp_path])


@needs_chromium
def test_fits_every_screen_and_is_read_by_keyboard(pair, tmp_path):
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    third = write_run(tmp_path / ("without_a_break_" * 8), finished=False)
    path, complaints = write_runs_report([*pair, third], tmp_path / "page.html"), []
    backgrounds = {"light": "rgb(252, 252, 250)", "dark": "rgb(21, 23, 27)"}
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for width, height, scheme in ((1280, 800, "light"), (390, 844, "dark"), (390, 844, "light")):
            page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
            page.on("console", lambda message: complaints.append(message.text))
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.on("request", lambda asked: asked.url.startswith(("file:", "data:")) or complaints.append(asked.url))
            page.goto(path.as_uri())
            page.evaluate("document.querySelectorAll('details').forEach((d) => (d.open = true))")
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            page.locator("#lambda svg.chart").first.focus()
            page.keyboard.press("ArrowRight")
            assert page.locator("#tip").inner_text().startswith("layer 1\nours: 0.2")
            assert page.evaluate("getComputedStyle(document.body).backgroundColor") == backgrounds[scheme]
        browser.close()
    assert complaints == []
