"""The pool on a Ray cluster: what is refused, what dies, and whether the records are those of local runs."""

import importlib.util
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from command_line import cli
from killed_runs import assert_same_run

from diff_transformer.lab import ray_pool
from diff_transformer.lab.pool import LOG, run_pool
from diff_transformer.lab.recipes import recipe
from diff_transformer.lab.record import load_records
from diff_transformer.lab.rows import finished
from diff_transformer.lab.spec import RunSpec, with_seed
from diff_transformer.train.checkpoint import latest_checkpoint
from diff_transformer.train.config import override
from diff_transformer.train.signals import Interrupted

RAY = importlib.util.find_spec("ray") is not None
needs_ray = pytest.mark.skipif(not RAY, reason="needs Ray: pip install 'diff-transformer[ray]'")
pytestmark = pytest.mark.timeout(900)  # on a busy machine
COMMANDS = ("study desk", "compare")


@pytest.fixture(autouse=True)
def no_memory_is_kept(monkeypatch):
    """Commands run in this process, which goes on to other tests."""
    monkeypatch.setattr("diff_transformer.memory.keep_freed_memory", lambda: True)


def refused(out, command, *options) -> str:
    """The one sentence with which a command that writes nothing ends."""
    done = cli(*command.split(), "--out", out, *options)
    assert (done.returncode, done.stdout) == (2, "")
    assert not out.exists()
    return done.stderr.strip()


@pytest.mark.parametrize("command", COMMANDS)
def test_unknown_engines_and_a_missing_extra_are_refused(command, tmp_path, monkeypatch):
    out = tmp_path / "out"
    known = "error: no engine 'rai' (did you mean 'ray'?); there are: local, ray"
    assert refused(out, command, "--engine", "rai") == known
    assert "give --engine ray, or leave it out" in refused(out, command, "--gpus-per-run", 1)
    monkeypatch.setitem(sys.modules, "ray", None)
    missing = "error: --engine ray needs ray; install with: pip install 'diff-transformer[ray]'"
    assert refused(out, command, "--engine", "ray") == missing


@needs_ray
@pytest.mark.parametrize("gpus", [-1, 1.5])
def test_gpus_that_cannot_be_given_are_refused(gpus, tmp_path):
    said = refused(tmp_path / "out", "study desk", "--engine", "ray", "--gpus-per-run", gpus)
    assert said == f"error: GPUs per run are {float(gpus)}; give 0, a fraction of 1, or a whole number"


class Ended:
    """A worker that has ended."""

    def __init__(self, code=0):
        self.code = code

    def poll(self):
        return self.code


@pytest.mark.parametrize(("gpus", "seen"), [(0.0, ""), (0.5, "3")])
def test_a_run_without_gpus_sees_none(gpus, seen, tmp_path, monkeypatch):
    (tmp_path / "request.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")  # as Ray sets it
    monkeypatch.setattr(ray_pool, "start_worker", lambda folder: Ended())
    assert ray_pool._execute(tmp_path, tmp_path, gpus) == 0
    assert os.environ["CUDA_VISIBLE_DEVICES"] == seen


def test_a_node_that_does_not_see_the_folder_says_so(tmp_path):
    with pytest.raises(ValueError, match=r"node \S+ does not see .*; give an --out that all nodes share"):
        ray_pool._execute(tmp_path / "elsewhere", tmp_path, 1)


def test_a_killed_worker_is_lost_and_one_that_fails_is_not(tmp_path, monkeypatch):
    (tmp_path / "request.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ray_pool, "start_worker", lambda folder: Ended(-9))
    with pytest.raises(ray_pool.Lost):
        ray_pool._execute(tmp_path, tmp_path, 1)
    monkeypatch.setattr(ray_pool, "start_worker", lambda folder: Ended(1))
    assert ray_pool._execute(tmp_path, tmp_path, 1) == 1


# ---- on a cluster


@pytest.fixture(scope="module")
def cluster():
    """A head and a node, each with one CPU."""
    pytest.importorskip("ray", reason="needs Ray: pip install 'diff-transformer[ray]'")
    import ray
    from ray.cluster_utils import Cluster

    handler = signal.getsignal(signal.SIGTERM)
    memory = {"object_store_memory": 100 * 2**20}
    started = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False, **memory})
    started.add_node(num_cpus=1, **memory)
    started.wait_for_nodes()
    yield started
    signal.signal(signal.SIGTERM, handler)
    ray.shutdown()
    with suppress(Exception):  # on a busy machine the end of a cluster may take longer than Ray waits
        started.shutdown()


@pytest.fixture
def tasks(cluster, tmp_path, monkeypatch):
    from diff_transformer.lab.ray_pool import RayTasks

    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    return RayTasks(tmp_path)


@pytest.fixture(scope="module")
def specs(texts):
    settings = [f"data.corpus={texts}", "data.max_bytes=null", "train.steps=600", "train.checkpoint_every=50"]
    config = override(recipe("debug"), [*settings, "train.threads=1"])
    return [RunSpec("s", "diff", seed, with_seed(config, seed)) for seed in range(4)]


@pytest.fixture(scope="module")
def local(specs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("local")
    run_pool({folder / spec.key: spec for spec in specs}, jobs=2, show=nothing)
    return folder


def nothing(folder, status):
    pass


def process(folder: Path) -> int:
    """The process that trains in ``folder``."""
    return int(subprocess.check_output(["pgrep", "-f", f"lab.worker {folder}"]).split()[0])


class Once:
    """Progress that acts on the first run with a checkpoint, once."""

    def __init__(self, act):
        self.act, self.hit = act, None

    def __call__(self, folder, status):
        if self.hit is None and status["stage"] == "training" and latest_checkpoint(folder / "run"):
            self.hit = folder
            self.act(folder)


def assert_same_records(folder: Path, local: Path, specs):
    """Every record once, and every model and number those of the local run."""
    assert [(record.setting, record.side, record.seed) for record in load_records(folder)] == [
        ("s", "diff", seed) for seed in range(4)
    ]
    for spec in specs:
        assert_same_run(folder / spec.key / "run", local / spec.key / "run")


@pytest.mark.slow
def test_a_killed_worker_goes_on_and_every_record_is_that_of_the_local_run(tasks, specs, local, tmp_path):
    kill = Once(lambda folder: os.kill(process(folder), signal.SIGKILL))
    run_pool({tmp_path / spec.key: spec for spec in specs}, jobs=None, show=kill, executor=tasks)
    assert kill.hit is not None
    assert_same_records(tmp_path, local, specs)


@pytest.mark.slow
def test_an_interruption_saves_the_states_and_empties_the_queue(tasks, specs, tmp_path):
    def interrupt(folder):
        raise KeyboardInterrupt

    stop, runs = Once(interrupt), {tmp_path / spec.key: spec for spec in specs}
    with pytest.raises(Interrupted, match="stopped, state saved"):
        run_pool(runs, jobs=None, show=stop, executor=tasks)
    assert not finished(stop.hit)
    time.sleep(3)
    assert subprocess.run(["pgrep", "-f", f"lab.worker {tmp_path}"]).returncode == 1  # none is left
    assert sum((folder / LOG).exists() for folder in runs) == 2


@pytest.mark.slow
def test_runs_of_a_dead_node_go_on_elsewhere(tasks, cluster, specs, local, tmp_path):
    """The last test: the cluster then has one node."""
    (node,) = cluster.worker_nodes
    kill = Once(lambda folder: cluster.remove_node(node, allow_graceful=False))
    run_pool({tmp_path / spec.key: spec for spec in specs}, jobs=None, show=kill, executor=tasks)
    assert kill.hit is not None
    assert_same_records(tmp_path, local, specs)
