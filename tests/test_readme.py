"""README is true: its code runs, its commands and files exist, its tables are those of the committed JSON."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DESK = ROOT / "figures" / "desk"
README = (ROOT / "README.md").read_text()


def test_python_code_runs(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[[1, 2, 3, ")
    assert 1.0 < float(done.stdout.split()[-1]) < 1.01


def test_commands_exist():
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"^make (\w+)", README, re.MULTILINE)) <= targets
    help_text = subprocess.run(
        [sys.executable, "-m", "diff_transformer", "--help"], capture_output=True, text=True
    ).stdout
    named = set(re.findall(r"`diff-transformer (\w+)", README))
    assert len(named) >= 5
    assert all(re.search(rf"\b{command}\b", help_text) for command in named)


def test_linked_files_exist():
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if not link.startswith("http")]
    assert len(links) > 8
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_tables_are_the_committed_numbers():
    done = subprocess.run([sys.executable, str(ROOT / "benchmarks" / "speed_tables.py"), "--check"])
    assert done.returncode == 0, "README's tables differ from the JSON: run python benchmarks/speed_tables.py"


def test_it_is_short():
    assert len(README.splitlines()) <= 120
    assert len(README.split()) < 1300


INTERVAL = re.compile(
    r"(\d\.\d{3}) nats (lower|higher)\s+\(95 %\s+CI\s+(-?\d\.\d{3})\s+to\s+(-?\d\.\d{3}),\s+(\d)\s+seeds\)"
)


@pytest.fixture(scope="module")
def differences():
    """What the desk study gives: mean, low, high and pairs of every difference in loss that a page may name."""
    from diff_transformer.lab.record import grouped, load_all
    from diff_transformer.lab.stats import over_seeds

    cells = grouped(load_all(DESK / "measured.json"))
    normed = [cells["ablation"]["softmax_norm"], cells["ablation"]["softmax_wide_norm"]]
    found = set()
    for setting, sides in cells.items():
        if setting.startswith("sweep"):
            continue
        baselines = [sides.get("softmax", cells["novels"]["softmax"]), *normed]
        for ours in sides.values():
            for theirs in baselines:
                seeds = sorted(ours.keys() & theirs.keys())
                steps = [theirs[seed].curves["validation"]["step"] for seed in seeds]
                losses = [[of[seed].curves["validation"]["loss"] for seed in seeds] for of in (ours, theirs)]
                if ours is theirs or len({len(curve) for curves in losses for curve in curves}) != 1:
                    continue
                for place, step in enumerate(steps[0]):
                    if step in (250, 500, 1000, 1500, 3000, 4500):
                        mean, low, high, _ = over_seeds([a[place] - b[place] for a, b in zip(*losses, strict=True)])
                        found.add((f"{mean:.3f}", f"{low:.3f}", f"{high:.3f}", str(len(seeds))))
    return found


PAGES = ("README.md", "docs/faq.md", "docs/findings.md", "docs/reproduction.md", "figures/desk/README.md")


@pytest.mark.parametrize("page", PAGES)
def test_intervals_in_prose_are_those_of_the_record(page, differences):
    """ "0.087 nats lower (95 % CI 0.040 to 0.134, 5 seeds)" is a difference of -0.087 (-0.134 to -0.040)."""
    text = (ROOT / page).read_text()
    assert len(re.findall(r"nats (?:lower|higher)\s+\(95 %\s+CI", text)) == len(INTERVAL.findall(text))
    for size, side, low, high, seeds in INTERVAL.findall(text):
        if side == "lower":
            said = (f"{-float(size):.3f}", f"{-float(high):.3f}", f"{-float(low):.3f}", seeds)
        else:
            said = (size, low, high, seeds)
        assert said in differences, f"{page}: {size} nats {side} ({low} to {high}, {seeds} seeds)"


RECALL = re.compile(
    r"is (\d\.\d{3})\s+higher\s+\(95 % CI (\d\.\d{3}) to (\d\.\d{3}), 30\s+seeds\)\s+than the\s+Transformer's"
)


def test_what_pages_say_of_recall_is_the_record():
    """The outcomes on thirty fresh seeds, and the runs that reached 0.9, as the study's page has them."""
    study = (ROOT / "figures" / "recall_confirmation" / "README.md").read_text()
    assert "360 of 360 runs of the plan." in study
    found = re.findall(r"minus Transformer \| \+([\d.]+) \(\+([\d.]+) to \+([\d.]+)\) .*\| held \|", study)
    published, (matched, *interval) = found
    for page in ("README.md", "docs/findings.md", "docs/reproduction.md"):
        text = " ".join((ROOT / page).read_text().split())
        assert RECALL.findall(text) == [published], page
        assert f"from the Transformer's scale {matched} higher" in text or f"scale it is {matched} higher" in text, page
    assert "scale {} higher ({} to {})".format(matched, *interval) in README
    shares = re.findall(r"^\| [^|]+ \|((?: \d+ \([\d.]+, [\d.]+ to [\d.]+\) \|){3})$", study, re.MULTILINE)
    softmax, diff, from_scale, _ = (re.findall(r" (\d+) \(", row) for row in shares)
    counts = f"{diff[0]} of 30, from that scale in {from_scale[0]}, the Transformer in {softmax[0]}"
    assert f"reaches 0.9 in {counts}" in README
    page = " ".join((ROOT / "docs" / "findings.md").read_text().split())
    assert f"with 4 pairs ({softmax[2]} of 30), at times with 8 pairs and 2 noise tokens ({softmax[0]}), never" in page
    assert softmax[1] == "0"
    assert sum(map(int, from_scale)) == 89


def test_what_it_says_of_the_objective_is_the_record(monkeypatch):
    """The two models are indistinguishable on the objective at one rate; at width 256 DIFF is significantly lower."""
    monkeypatch.syspath_prepend(str(DESK))
    import objective

    from diff_transformer.lab.record import grouped, load_all

    cells = grouped(load_all(DESK / "measured.json"))
    (prose, needles, both), _ = objective.differences(cells, "novels", "diff_same_rate", "novels")
    assert prose.high < 0
    assert needles.low < 0 < needles.high
    assert both.low < 0 < both.high
    assert objective.differences(cells, "novels", "diff", "novels")[0][2].low > 0  # at its own rate it is worse
    assert objective.differences(cells, "wide", "diff", "wide")[0][2].high < 0


def test_what_pages_say_of_a_gpu_is_the_record():
    results = ROOT / "benchmarks" / "results"
    rows = json.loads((results / "attention_gpu.json").read_text())["rows"]
    at = {(row["width"], row["backend"]): row for row in rows if row["length"] == 4096 and row["causal"]}
    page = " ".join((ROOT / "docs" / "performance.md").read_text().split())
    of = {}
    for width in (128, 64):
        cudnn, flash = at[width, "triton"]["both_ratio"], at[width, "triton"]["ratios"]["softmax[flash]"]["both"]
        of[width] = f"{cudnn:.2f}", f"{flash:.2f}"
    assert f"{of[128][0]} times as long as softmax attention on cuDNN at width 128 and {of[64][0]} at width 64" in page
    assert f"{of[128][1]} and {of[64][1]} times as long as on FlashAttention-2" in page
    assert "| {} (cuDNN), {} (FlashAttention-2) |".format(*of[128]) in README
    pairs = json.loads((results / "throughput_gpu.json").read_text())["rows"]
    (ratio,) = {
        f"{row['forward_backward_ratio']:.2f}" for row in pairs if row["side"] == "diff" and row["length"] == 4096
    }
    assert f"3B, bf16, batch 2, length 4096 | NVIDIA H200 | {ratio} |" in README
    assert f"runs at {ratio} of the Transformer's tokens a second" in page


def test_what_the_page_says_of_a_processor_without_avx512_is_the_record():
    rows = json.loads((ROOT / "benchmarks" / "results" / "attention_avx2.json").read_text())["rows"]
    page = " ".join((ROOT / "docs" / "performance.md").read_text().split())
    ms = {(r["dtype"], r["length"], r["width"]): r["forward_ms"] for r in rows if r["role"] == "baseline"}
    slower = [ms["bfloat16", n, d] / time for (dtype, n, d), time in ms.items() if dtype == "float32" and n >= 2048]
    assert f"takes {min(slower):.2f} to {max(slower):.2f} of its fp32 forward's time from 2048 tokens on" in page
    ours = [r for r in rows if r["backend"] == "blockwise"]
    shares = [round(r[f"{k}_ratio"], 2) for r in ours if r["dtype"] == "float32" for k in ("forward", "both")]
    assert [share for share in shares if share > 1] == [1.03]
    assert all(r["forward_ratio"] > 0.7 for r in ours if r["dtype"] == "bfloat16" and r["length"] >= 2048)


def test_the_correction_readme_speaks_of_is_the_studys():
    text = " ".join((ROOT / "README.md").read_text().split())
    assert "not significant after Holm's correction" in text
    study = (ROOT / "figures" / "desk" / "README.md").read_text()
    table = study.split("DIFF, initialised at 0.1, the Transformer's rate** (5 pairs)")[1]
    sentence = next(line for line in table.splitlines() if "Holm's correction" in line)
    assert "validation loss" not in sentence


def test_what_it_says_of_33m_parameters_is_the_study():
    page = (ROOT / "figures" / "scale" / "README.md").read_text()
    (losses,) = re.findall(r"^\| held-out loss \|(.*)\|$", page, re.MULTILINE)
    softmax, published, matched, norm, _ = losses.replace(" ", "").split("|")
    said = (
        f"Transformer {softmax}, DIFF as published {published}, DIFF from the Transformer's scale {matched}, at twice"
    )
    assert said in README
    assert f"The Transformer + head norm has {norm}" in README
    assert f"{published} against {matched}" in README
    assert "`books`: one run of each side" in page
