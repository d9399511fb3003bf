"""The pool on workers that run nothing: order, limits, failures, interruptions. And what a spec writes and reads."""

import dataclasses
import signal
import subprocess
import sys
import time

import pytest
from rich.console import Console

from diff_transformer.errors import UserError
from diff_transformer.lab import pool
from diff_transformer.lab.pool import RunFailed, progress_bars, run_pool
from diff_transformer.lab.recipes import recipe
from diff_transformer.lab.rows import FILE, finished, row, write_rows
from diff_transformer.lab.spec import RunSpec, check_folders, everything
from diff_transformer.train.config import override
from diff_transformer.train.signals import Stopped


@pytest.mark.parametrize(("runs", "jobs"), [(1, 1), (2, 2), (3, 3), (4, 2), (5, 2)])
def test_as_many_runs_as_cores_and_a_few_more_together(runs, jobs, monkeypatch):
    monkeypatch.setattr(pool.os, "cpu_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert pool.default_jobs(runs) == jobs


class Worker:
    """Exits with ``code`` at the third poll; if ``code`` is None, it exits only when stopped."""

    def __init__(self, folder, code, log):
        self.folder, self.code, self.asked, self.log = folder, code, 0, log

    def poll(self):
        self.asked += 1
        if self.asked < 3 or self.code is None:
            return None
        if self.code == 0:
            write_rows(self.folder / FILE, [row("model", self.folder.name, parameters=1)])
        return self.code

    def send_signal(self, number):
        self.log.append((self.folder.name, signal.Signals(number).name))

    def wait(self, timeout=None):
        return 0


class Workers:
    """An executor of such workers that records its calls."""

    def __init__(self, codes):
        self.codes, self.log = codes, []

    def start(self, folder):
        assert RunSpec.load(folder).side == folder.name
        (folder / pool.LOG).write_text("one\n" * 20 + "the cause\n")
        self.log.append((folder.name, "started"))
        return Worker(folder, self.codes.get(folder.name, 0), self.log)


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.setattr(pool, "_POLL_SECONDS", 0.0)
    return {tmp_path / side: RunSpec("s", side, 0, recipe("debug")) for side in ("a", "b", "c")}


def nothing(folder, status):
    pass


def test_runs_start_in_order_a_few_at_a_time_and_finished_ones_do_not(runs):
    write_rows(list(runs)[1] / FILE, [row("model", "b", parameters=1)])
    seen, workers = [], Workers({})
    run_pool(runs, jobs=1, show=lambda folder, status: seen.append(folder.name), executor=workers)
    assert workers.log == [("a", "started"), ("c", "started")]
    assert list(dict.fromkeys(seen)) == ["a", "c"]
    assert all(map(finished, runs))
    run_pool(runs, jobs=1, show=nothing, executor=workers)
    assert len(workers.log) == 2


def test_a_failed_run_stops_the_others_and_shows_the_end_of_its_log(runs):
    workers = Workers({"a": 1, "b": None})
    with pytest.raises(
        RunFailed, match=r"s/a-seed0 failed with exit code 1; the end of .*worker\.log:(\none){11}\nthe"
    ):
        run_pool(runs, jobs=2, show=nothing, executor=workers)
    assert workers.log == [("a", "started"), ("b", "started"), ("b", "SIGTERM")]


@pytest.mark.parametrize(
    ("code", "kind"), [(130, KeyboardInterrupt), (-2, KeyboardInterrupt), (143, Stopped), (-15, Stopped)]
)
def test_a_run_that_was_stopped_stops_the_pool(runs, code, kind):
    with pytest.raises(kind):
        run_pool(runs, jobs=1, show=nothing, executor=Workers({"a": code}))


@pytest.mark.parametrize(("saved", "code", "message"), [(False, 143, ""), (True, 0, "stopped, state saved; once more")])
def test_an_interruption_says_how_to_go_on_if_runs_saved_their_states(runs, saved, code, message):
    def stop(folder, status):
        raise Stopped

    workers = Workers({})
    if saved:
        (next(iter(runs)) / "run" / "checkpoints" / "step-00000010").mkdir(parents=True)
    with pytest.raises(KeyboardInterrupt) as caught:
        run_pool(runs, jobs=3, show=stop, executor=workers, resume_hint="once more")
    assert (caught.value.exit_code, str(caught.value)) == (code, message)
    assert [what for _, what in workers.log] == ["started"] * 3 + ["SIGTERM"] * 3


def test_the_time_limit_asks_runs_to_save_and_returns(runs):
    workers = Workers({"a": None})
    run_pool(runs, jobs=1, show=nothing, executor=workers, until=time.monotonic() - 1)
    assert workers.log == []
    until = time.monotonic() + 0.2
    run_pool(runs, jobs=1, show=lambda folder, status: time.sleep(0.3), executor=workers, until=until)
    assert workers.log == [("a", "started"), ("a", "SIGTERM")]


def test_bars_show_every_run(runs):
    console = Console(record=True, width=120)
    with progress_bars(runs, console) as show:
        show(next(iter(runs)), {"stage": "training", "step": 3, "loss": 4.25})
    shown = console.export_text()
    assert all(f"s/{side}-seed0" in shown for side in "abc")
    assert "loss 4.250" in shown
    assert "waiting" in shown


def test_a_spec_survives_its_file(tmp_path):
    config = recipe("debug")
    spec = RunSpec("novels", "diff", 3, config, everything(config), may_diverge=True)
    spec.save(tmp_path)
    assert RunSpec.load(tmp_path) == spec
    assert spec.key == "novels/diff-seed3"
    config.evaluation.samples, config.train.compile = 99, True  # as for `train --resume`
    check_folders({tmp_path: spec, tmp_path / "new": spec})
    (tmp_path / "rows.jsonl.gz").touch()  # it is finished
    with pytest.raises(UserError, match=r"another configuration[^\0]*evaluation.samples: \d+ against 99"):
        check_folders({tmp_path: spec})
    config.evaluation.samples = recipe("debug").evaluation.samples
    with pytest.raises(UserError, match=r"ended without ruler; leave them out, choose another folder, or measure"):
        check_folders({tmp_path: dataclasses.replace(spec, measure=(*spec.measure, "ruler"))})
    config.train.steps = 99
    with pytest.raises(UserError, match=r"another configuration[^\0]*train.steps: 20 against 99"):
        check_folders({tmp_path: spec})


def test_a_worker_without_a_request_fails(tmp_path):
    command = [sys.executable, "-m", "diff_transformer.lab.worker", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "request.json" in done.stderr


def test_a_worker_ends_with_the_process_that_started_it(tmp_path):
    """A driver that is killed closes the pipe. Its workers must not hold the folders that a resumed plan needs."""
    RunSpec("s", "a", 0, override(recipe("debug"), ["train.steps=100000"])).save(tmp_path)
    worker = pool.LocalProcesses().start(tmp_path)
    worker.stdin.close()
    assert worker.wait(timeout=300) == 1  # on a busy machine
    assert (tmp_path / pool.LOG).read_text().count("Traceback") == 0
