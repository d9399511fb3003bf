"""Choice by measurement: what is timed, what is kept, and what never disturbs a call."""

import json
import logging
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from filelock import FileLock

from diff_transformer.ops import measuring
from diff_transformer.ops.measuring import kept, measure

KEY = {"processor": "abacus", "width": 64}


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("DIFF_TRANSFORMER_CACHE", str(tmp_path))
    monkeypatch.delenv(measuring.SWITCH, raising=False)
    next_process(monkeypatch)
    return tmp_path / "fastest"


def next_process(monkeypatch):
    monkeypatch.setattr(measuring, "_measurements", {})


class Forms(dict):
    """Candidates that take these seconds, or raise; ``calls`` counts what ran."""

    def __init__(self, **takes):
        super().__init__({name: lambda name=name: self.run(name) for name in takes})
        self.takes, self.calls, self.last = takes, dict.fromkeys(takes, 0), None

    def run(self, name):
        self.calls[name] += 1
        self.last = name
        if isinstance(self.takes[name], Exception):
            raise self.takes[name]

    def timer(self, run):
        run()
        return self.takes[self.last]


def chosen(forms, key=KEY, **options):
    return measure(key, forms, timer=forms.timer, **options).fastest


def test_the_fastest_is_found_once_on_a_machine(monkeypatch, cache, caplog):
    forms = Forms(first=0.003, second=0.001, third=0.0011)
    with caplog.at_level(logging.INFO, logger="diff_transformer"):
        assert chosen(forms) == chosen(forms) == "second"
    assert len(caplog.messages) == 1
    assert "second 1 ms, third 1.1 ms, first 3 ms" in caplog.messages[0]
    assert forms.calls["first"] == 1 + measuring.TURNS[0], "one call to warm up"
    assert forms.calls["second"] >= 1 + measuring.TURNS[0]
    next_process(monkeypatch)
    again = Forms(first=0.001, second=1.0, third=1.0)
    assert chosen(again) == "second", "kept on the disk"
    assert set(again.calls.values()) == {0}
    [path] = cache.glob("*.json")
    kept = json.loads(path.read_text())
    assert kept["key"] == KEY | {"candidates": ["first", "second", "third"]}
    assert kept["milliseconds"] == {"first": 3.0, "second": 1.0, "third": 1.1}
    assert chosen(Forms(first=0.1, second=0.2, third=0.3), KEY | {"width": 128}) == "first", "another key"
    assert chosen(Forms(second=0.2, fourth=0.1)) == "fourth", "other candidates"


def test_one_slow_turn_decides_nothing():
    forms = Forms(first=0.002, second=0.001)
    slow = iter([0.0, 0.05])  # in the warm-up and the first turn of the second form
    timer = forms.timer
    forms.timer = lambda run: timer(run) + (next(slow, 0.0) if forms.last == "second" else 0.0)
    assert chosen(forms) == "second"


def test_what_cannot_run_is_left_out(monkeypatch, cache):
    forms = Forms(first=RuntimeError("no kernel for this"), second=0.2, third=0.1)
    assert chosen(forms) == "third"
    assert forms.calls["first"] == 1
    [path] = cache.glob("*.json")
    assert json.loads(path.read_text())["left_out"] == {"first": "RuntimeError: no kernel for this"}
    assert chosen(Forms(only=RuntimeError("not even called"))) == "only"
    broken = Forms(first=ValueError("a"), second=TypeError("b"))
    assert chosen(broken) == chosen(broken) == "first", "the default, where none runs"
    assert broken.calls == {"first": 1, "second": 1}, "and not tried at every call"


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("8 GiB"),
        RuntimeError("CUDA error: out of memory"),
        OSError(28, "No space left on device"),
        RuntimeError("Failed to find C compiler. Please specify via CC environment variable."),
        measuring.NotNow("the trial found no GPU"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_reason_that_may_pass_condemns_nothing(monkeypatch, cache, error):
    forms = Forms(first=0.2, second=error)
    assert chosen(forms) == chosen(forms) == "first"
    assert forms.calls["second"] == 1
    assert not list(cache.glob("*.json"))
    next_process(monkeypatch)
    assert chosen(Forms(first=0.2, second=0.1)) == "second"


def test_the_switch(monkeypatch):
    forms = Forms(first=0.2, second=0.1)
    monkeypatch.setenv(measuring.SWITCH, "0")
    assert chosen(forms) == "first"
    assert forms.calls == {"first": 0, "second": 0}
    monkeypatch.setenv(measuring.SWITCH, "1")
    assert chosen(forms) == "second"
    monkeypatch.setenv(measuring.SWITCH, "0")
    assert chosen(forms) == "first", "nor are verdicts read"
    monkeypatch.setenv(measuring.SWITCH, "force")
    next_process(monkeypatch)
    other = Forms(first=0.1, second=0.2)
    assert chosen(other) == chosen(other) == "first"
    assert other.calls["first"] <= 1 + measuring.TURNS[1], "once in a process"
    next_process(monkeypatch)
    monkeypatch.setenv(measuring.SWITCH, "1")
    assert chosen(forms) == "first", "force replaced the verdict"
    monkeypatch.setenv(measuring.SWITCH, "yes")
    with pytest.raises(ValueError, match=r"DIFF_TRANSFORMER_TUNE is 'yes'; give 0 \(never measure\), 1 .* or force"):
        chosen(forms)


def test_without_measuring_only_a_kept_verdict_counts(monkeypatch):
    forms = Forms(first=0.2, second=0.1)
    assert kept(KEY, list(forms)) == "first"
    assert forms.calls == {"first": 0, "second": 0}
    chosen(forms)
    next_process(monkeypatch)
    before = dict(forms.calls)
    assert kept(KEY, list(forms)) == "second"
    assert forms.calls == before


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"fastest": "third", "milliseconds": {}, "left_out": {}}',
        '{"fastest": "second", "milliseconds": {"second": null}, "left_out": {}}',
    ],
)
def test_a_damaged_verdict_is_measured_again(monkeypatch, cache, content):
    forms = Forms(first=0.2, second=0.1)
    chosen(forms)
    [path] = cache.glob("*.json")
    whole = path.read_text()
    path.write_text(content)
    next_process(monkeypatch)
    assert chosen(forms) == "second"
    assert path.read_text() == whole


def test_a_disk_that_takes_nothing_costs_only_the_measurement(monkeypatch, tmp_path):
    (tmp_path / "fastest").write_text("a file where the folder should be")
    forms = Forms(first=0.2, second=0.1)
    assert chosen(forms) == "second"
    monkeypatch.setattr(measuring, "cache_folder", lambda: no_home())
    assert chosen(forms, {"another": "key"}) == "second"


def no_home():
    raise RuntimeError("Could not determine home directory.")


def test_one_thread_measures_and_the_others_do_not_wait(monkeypatch):
    forms = Forms(first=0.2, second=0.1)
    with measuring._measuring, ThreadPoolExecutor(1) as pool:
        assert pool.submit(chosen, forms).result(timeout=10) == "first"
    assert forms.calls == {"first": 0, "second": 0}
    assert chosen(forms) == "second", "the default was for that moment"


def test_processes_that_want_the_same_verdict_wait_for_the_one_that_measures(monkeypatch, cache):
    forms = Forms(first=0.2, second=0.1)
    chosen(forms)
    [path] = cache.glob("*.json")
    verdict = path.read_text()
    path.unlink()
    next_process(monkeypatch)
    waiting = Forms(first=0.1, second=0.2)
    with ThreadPoolExecutor(1) as pool:
        with FileLock(path.with_suffix(".lock")):  # another process measures
            answer = pool.submit(chosen, waiting)
            time.sleep(0.1)
            assert not answer.done()
            path.write_text(verdict)
        assert answer.result(timeout=10) == "second"
    assert waiting.calls == {"first": 0, "second": 0}
    next_process(monkeypatch)
    path.unlink()
    monkeypatch.setattr(measuring, "WAIT", 0.01)
    with FileLock(path.with_suffix(".lock")):
        assert chosen(waiting) == "first", "nor for ever"


def test_real_times():
    forms = {"slow": lambda: time.sleep(0.004), "fast": lambda: time.sleep(0.001)}
    begin = time.perf_counter()
    assert measure(KEY, forms).fastest == "fast"
    assert time.perf_counter() - begin < 2
