import torch

from diff_transformer.bench import record, timing


def test_functions_take_turns_there_and_back(monkeypatch):
    calls = []
    monkeypatch.setattr(timing, "seconds_of", lambda run, device, kernels: run())
    runs = {name: lambda name=name: calls.append(name) or 1.0 for name in "abc"}
    times = timing.interleaved_times(runs, repeats=2, device="cpu")
    assert "".join(calls) == "abc" + "cba"
    assert times.keys() == {"a", "b", "c"}


def test_quartiles():
    times = timing.Times((4.0, 1.0, 3.0, 2.0, 5.0))
    assert (times.median, times.quartiles) == (3.0, (2.0, 4.0))
    assert timing.Times((7.0,)).quartiles == (7.0, 7.0)


def test_a_ratio_does_not_change_when_the_machine_slows_down():
    """The ratio of the medians of these would be 0.4. A function that stopped early counts in its turns alone."""
    first, second = timing.Times((2.0, 4.0, 20.0)), timing.Times((1.0, 2.0, 10.0, 10.0, 10.0))
    assert first.over(second) == 2.0
    assert second.over(first) == 0.5


def test_a_function_that_used_its_time_sits_out_after_three_turns(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def taking(run, device, kernels):
        now[0] += run()
        return run()

    monkeypatch.setattr(timing, "seconds_of", taking)
    runs = {"slow": lambda: 2.0, "fast": lambda: 0.5}
    times = timing.interleaved_times(runs, repeats=20, device="cpu", seconds=4.0)
    assert (times["slow"].seconds, len(times["fast"].seconds)) == ((2.0,) * 3, 8)


def test_a_call_is_timed_on_its_device(monkeypatch):
    """With the threads in use, after one that does not count; on a GPU its kernels by Triton, on that GPU."""
    calls = []
    seconds = timing.seconds_of(lambda: calls.append(torch.get_num_threads()), "cpu")
    assert 0 < seconds < 0.1
    assert len(calls) >= 2
    assert {*calls} == {torch.get_num_threads()}
    current = ["cuda:0"]

    class On:
        def __init__(self, device):
            self.device = device

        def __enter__(self):
            current.append(self.device)

        def __exit__(self, *error):
            current.pop()

    monkeypatch.setattr(torch.cuda, "device", On)
    monkeypatch.setattr("triton.testing.do_bench", lambda run, **options: calls.append(current[-1]) or 3.0)
    assert timing.seconds_of(lambda: None, "cuda:1", kernels=True) == 0.003
    assert calls[-1] == "cuda:1"
    monkeypatch.setattr(record, "machine", lambda device: {})
    options = record.Options("cuda:1", on_row=lambda row: calls.append(current[-1]))
    rows = options.collect("attention", [("", lambda: [{}])])["rows"]
    assert (rows, calls[-1], current) == ([{}], "cuda:1", ["cuda:0"])


def test_a_copy_counts_both_ways(monkeypatch):
    monkeypatch.setattr(timing, "seconds_of", lambda run, device, kernels: run() is None or 0.5)
    assert timing.copy_rate("cpu") == round(2 * 2**14 / 0.5 / 1e9, 2)
