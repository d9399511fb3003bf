from contextlib import contextmanager

import pytest
import torch

from diff_transformer.bench import record, timing


def test_functions_take_turns_there_and_back():
    calls = []
    times = timing.interleaved_times({k: lambda k=k: calls.append(k) for k in "abc"}, repeats=2, device="cpu")
    assert "".join(calls) == "abc" * 2 + "abc" + "cba"
    assert times.keys() == {"a", "b", "c"}


def test_quartiles():
    times = timing.summary([4.0, 1.0, 3.0, 2.0, 5.0])
    assert times == (3.0, 2.0, 4.0, (4.0, 1.0, 3.0, 2.0, 5.0))
    assert times.turns == 5
    assert timing.summary([7.0])[:3] == (7.0, 7.0, 7.0)


def test_a_ratio_does_not_change_when_the_machine_slows_down():
    """The ratio of the medians of these would be 0.4. A function that stopped early counts in its turns alone."""
    first, second = timing.summary([2.0, 4.0, 20.0]), timing.summary([1.0, 2.0, 10.0, 10.0, 10.0])
    assert first.over(second) == 2.0
    assert second.over(first) == 0.5


@pytest.fixture
def seconds(monkeypatch):
    """A clock on which functions add their seconds."""
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def taking(amount):
        def run():
            now[0] += amount

        return run

    return taking


def test_medians_are_of_the_functions_own_time(seconds):
    times = timing.interleaved_times({"slow": seconds(2.0), "fast": seconds(0.5)}, repeats=5, device="cpu")
    assert times["slow"] == (2.0, 2.0, 2.0, (2.0,) * 5)
    assert times["fast"] == (0.5, 0.5, 0.5, (0.5,) * 5)


def test_a_function_that_used_its_time_sits_out_after_three_turns(seconds):
    runs = {"slow": seconds(2.0), "fast": seconds(0.5)}
    times = timing.interleaved_times(runs, repeats=20, device="cpu", seconds=4.0)
    assert (times["slow"].turns, times["fast"].turns) == (3, 8)


class Device:
    """A CUDA device with a queue: the host returns at once, events take the queue's time, in milliseconds."""

    def __init__(self, monkeypatch):
        self.now, self.log = 0.0, []
        device = self
        self.current = "cuda:0"

        @contextmanager
        def on(name):
            before, self.current = self.current, name
            yield
            self.current = before

        monkeypatch.setattr(torch.cuda, "device", on)

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.at = device.now
                assert device.current == "cuda:1"

            def synchronize(self):
                device.log.append("wait")

            def elapsed_time(self, end):
                return end.at - self.at

        class Memory:
            def zero_(self):
                device.spend(9.0, "flush")

        def empty(size, dtype, device):
            assert size == 4 * 1000
            return Memory()

        properties = type("Properties", (), {"L2_cache_size": 1000})
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda d: properties)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: self.spend(5.0, "sleep"), raising=False)
        monkeypatch.setattr(timing.torch, "empty", empty)

    def spend(self, milliseconds, what):
        assert self.current == "cuda:1"
        self.now += milliseconds
        self.log.append(what)


def test_events_measure_the_run_alone_on_a_cold_cache_of_its_gpu(monkeypatch):
    device = Device(monkeypatch)
    runs = {"a": lambda: device.spend(2.0, "a"), "b": lambda: device.spend(3.0, "b")}
    times = timing.interleaved_times(runs, repeats=2, device="cuda:1", warmup=0)
    assert times["a"].median == pytest.approx(0.002)
    assert times["b"].median == pytest.approx(0.003)
    turn = ["flush", "sleep", "a", "flush", "sleep", "b"]
    assert device.log[:6] == turn
    assert device.log.count("wait") == 4
    assert device.log.index("wait") == 6  # the host waits once all of a turn are queued


def test_a_benchmark_runs_on_its_gpu(monkeypatch):
    """Waits for the device and captured graphs are on the current one."""
    device = Device(monkeypatch)

    def rows():
        yield {"on": device.current}
        yield {"on": device.current}

    found = record.collect("attention", rows(), {"device": "cuda:1"})
    assert found["rows"] == [{"on": "cuda:1"}] * 2
    assert device.current == "cuda:0"
