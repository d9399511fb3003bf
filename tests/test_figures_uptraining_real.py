"""The study of a pretrained model: its plan, and its tests on outcomes that are known."""

import io
import re
import sys
import tarfile

import pytest

from diff_transformer.lab.record import Record
from diff_transformer.train.config import RunConfig


@pytest.fixture
def page(figure_module):
    return figure_module("uptraining_real")


@pytest.fixture
def train(page):
    return sys.modules["uptraining_real.train"]


@pytest.fixture
def cells(page):
    """DIFF V2 is ahead of both others by more than its spread, DIFF is level with them."""

    def record(side, seed, value):
        metrics = {"needle": {"n4_r2": value + 0.01 * seed, "n6_r2": value}}
        metrics |= {name: {} for name, _ in page.SECONDARY.values()}
        for name, key in page.SECONDARY.values():
            metrics[name][key] = 1.5
        return Record(page.SETTING, side, seed, metrics=metrics)

    levels = {"softmax": 0.4, "wider": 0.42, "diff_v2": 0.6, "diff": 0.41}
    sides = {
        side: {seed: record(side, seed, value + 0.02 * (side == "diff_v2") * (seed % 2)) for seed in range(page.SEEDS)}
        for side, value in levels.items()
    }
    for seed in range(0, page.SEEDS, 2):
        sides["diff"][seed] = record("diff", seed, 0.39)
    return {page.SETTING: {**sides, "source": {0: record("source", 0, 0.3)}}}


def test_the_primary_outcome_is_tested_in_the_planned_order(page, cells):
    seeds = page.whole_seeds(cells)
    assert page.differences(cells, "diff_v2", "softmax", seeds) == pytest.approx([0.2, 0.22] * 3)
    assert page.p_value(page.differences(cells, "diff_v2", "softmax", seeds)) == pytest.approx(2 / 2**6)
    said = page.primary(cells)
    assert re.findall(r"\| ([a-z ]+) \|$", said, re.M)[-4:] == ["held", "held", "undecided", "not tested"]
    assert "| Transformer before training | Transformer, trained further |" in page.measures(cells)
    assert page.tables(cells).startswith("Finished: 24 of 24 runs of the plan.\n")


def test_nothing_is_decided_before_all_seeds_are_there_and_half_a_seed_does_not_count(page, cells):
    del cells[page.SETTING]["wider"][page.SEEDS - 1]
    assert page.whole_seeds(cells) == list(range(page.SEEDS - 1))
    said = page.tables(cells)
    assert said.startswith("Finished: 23 of 24 runs of the plan; nothing is decided.")
    assert said.count("| not finished |") == 4
    assert page.tables({}).startswith("Finished: 0 of 24 runs")


def test_the_page_says_what_the_record_says(page):
    cells = sys.modules["study"].cells_of(page.HERE)
    found = page.differences(cells, "diff_v2", "softmax", page.whole_seeds(cells))
    low, high = page.bootstrapped(found)
    said = f"{page.fmean(found):+.3f} ({low:+.3f} to {high:+.3f}, p = {page.p_value(found):.3f})"
    assert said in (page.HERE / "README.md").read_text()
    assert "| undecided |" in page.primary(cells)


def test_the_plan_is_a_run_of_attention_on_parts_of_the_books(train, tmp_path):
    for archive, count in train.TEXTS.values():
        with tarfile.open(tmp_path / archive, "w:xz") as made:
            for i in range(count):
                member = tarfile.TarInfo(f"folder/{i}.txt")
                text = (f"{archive} {i} ".encode() * 20_000)[: train.SKIPPED + 50]
                member.size = len(text)
                made.addfile(member, io.BytesIO(text))
    folder = train.write_texts(tmp_path, tmp_path / "texts")
    for side, (archive, count) in train.TEXTS.items():
        texts = [path.read_text() for path in (folder / side).iterdir()]
        assert len(texts) == count
        assert all(archive in text and len(text) == 50 for text in texts)
    made = train.config(folder).validate()
    assert made.train.weights == "attention"
    assert made.evaluation.needles == train.CELLS
    assert RunConfig.from_dict(made.to_dict()).to_dict() == made.to_dict()
