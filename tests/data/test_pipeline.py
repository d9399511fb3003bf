"""Preparation as a pipeline of datatrove."""

import dataclasses
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from itertools import pairwise

import numpy as np
import pytest

from diff_transformer.data.prepare import PrepareConfig, prepare, totals
from diff_transformer.data.tokens import Shards, read_plan, verify
from diff_transformer.errors import UserError

pytest.importorskip("datatrove", reason="needs pip install 'diff-transformer[prepare]'")
from diff_transformer.data.pipeline import Engine, stages

LOCAL = Engine("local", jobs=1)


def write_rows(folder, files=3, rows=30):
    """Files of rows of 100 bytes or so; their texts."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = [[f"row {f} {i}: " + f"word{i} " * (12 + i % 3) for i in range(rows)] for f in range(files)]
    for f, mine in enumerate(texts):
        (folder / f"{f}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in mine))
    return texts


def content(folder):
    """Every file with its bytes, without the bookkeeping."""
    names = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in names.items() if not name.startswith(("logs/", "dedup/"))}


def documents(folder, side):
    """The texts of a side of a folder that is prepared in bytes."""
    tokens = Shards(folder, side)
    starts = [*np.concatenate(list(tokens.document_starts())), len(tokens)]
    return [bytes(tokens[a : b - 1].tolist()).decode() for a, b in pairwise(starts)]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Settings of three files for two tasks."""
    folder = tmp_path_factory.mktemp("rows")
    write_rows(folder)
    return PrepareConfig((str(folder),), tokenizer="bytes", validation=0.2, tasks=2)


@pytest.fixture(scope="module")
def whole(rows, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "out"
    prepare(rows, out, engine=LOCAL)
    return out


def test_an_engine_gives_the_bytes_of_this_process_and_so_does_any_number_of_processes(rows, whole, tmp_path):
    prepare(rows, tmp_path / "here")
    assert content(tmp_path / "here") == content(whole)
    prepare(rows, tmp_path / "two", engine=Engine("local", jobs=2))
    assert content(tmp_path / "two") == content(whole)


def test_a_killed_preparation_resumes_to_the_same_bytes(tmp_path):
    for f in range(6):
        lines = (json.dumps({"text": f"row {f} {i} " + f"word{i} " * 300}) for i in range(800))
        (tmp_path / f"{f}.jsonl").write_text("".join(line + "\n" for line in lines))
    sources = [str(tmp_path / f"{f}.jsonl") for f in range(6)]
    command = [sys.executable, "-m", "diff_transformer", "prepare", *sources, "--tokenizer", "bytes"]
    command += ["--engine", "local", "--jobs", "2", "--out", str(tmp_path / "out")]
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    records, deadline = tmp_path / "out" / "shards", time.monotonic() + 120
    while len([*records.glob("*.json")]) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    with open(f"/proc/{running.pid}/task/{running.pid}/children") as file:
        children = [int(child) for child in file.read().split()]
    running.kill()
    running.wait()
    while any(_alive(child) for child in children) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(_alive(child) for child in children)
    kept = {path: path.stat().st_mtime_ns for path in records.glob("*.json")}
    assert len(kept) >= 2
    config = PrepareConfig(tuple(sources), tokenizer="bytes")
    prepare(config, tmp_path / "out", resume=True, engine=Engine("local", jobs=2))
    prepare(config, tmp_path / "unbroken")
    assert content(tmp_path / "out") == content(tmp_path / "unbroken")


def _alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_a_damaged_shard_is_made_again(rows, tmp_path, whole):
    out = tmp_path / "out"
    prepare(rows, out, engine=LOCAL)
    (out / "shards" / "train-00001.tokens").unlink()
    kept = (out / "shards" / "train-00000.tokens").stat().st_mtime_ns
    prepare(rows, out, engine=LOCAL, resume=True)
    assert content(out) == content(whole)
    assert (out / "shards" / "train-00000.tokens").stat().st_mtime_ns == kept


def test_a_row_without_text_stops_its_task_and_is_named(tmp_path):
    write_rows(tmp_path / "in", files=2)
    (tmp_path / "in" / "1.jsonl").open("a").write("not JSON\n")
    config = PrepareConfig((str(tmp_path / "in"),), tokenizer="bytes", validation=0.2)
    with pytest.raises(UserError, match=r"1.jsonl, row 31 is not JSON .*--skip-inv"):
        prepare(config, tmp_path / "out", engine=LOCAL)
    prepare(dataclasses.replace(config, skip_invalid=True), tmp_path / "skipped", engine=LOCAL)
    assert totals(tmp_path / "skipped")["left_out"]["invalid"] == 1


def test_a_worker_that_is_killed_is_an_error_that_says_what_to_do(rows, tmp_path):
    before = set(multiprocessing.active_children())

    def kill_a_child():
        while not (children := set(multiprocessing.active_children()) - before):
            time.sleep(0.01)
        children.pop().kill()

    threading.Thread(target=kill_a_child, daemon=True).start()
    with pytest.raises(UserError, match=r"killed, perhaps because memory ran out.*--resume and fewer --jobs"):
        prepare(rows, tmp_path / "out", engine=LOCAL)


def test_filters_drop_what_the_rules_name(tmp_path):
    lines = prose(np.random.default_rng(0), 108)
    good = ["\n".join(lines[n : n + 9]) for n in range(0, 108, 9)]
    bad = ["short.", "buy now " * 300, "\n".join("- item" for _ in range(90))]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in good + bad))
    config = PrepareConfig((str(tmp_path / "rows.jsonl"),), tokenizer="bytes", validation=0.3, filters=("gopher",))
    pytest.importorskip("spacy", reason="needs pip install 'diff-transformer[prepare]'")
    prepare(config, tmp_path / "out", engine=LOCAL)
    kept = documents(tmp_path / "out", "train") + documents(tmp_path / "out", "validation")
    assert sorted(kept) == sorted(good)
    assert totals(tmp_path / "out")["left_out"]["filtered"] == 3
    assert verify(tmp_path / "out") == []


def prose(rng, lines):
    """Lines of 16 words or so, which the filters keep."""
    words = ["".join(rng.choice(list("aeioubdlmnrst"), 6)) for _ in range(500)]
    return [" ".join(["The", *rng.choice(words, 9), "and", *rng.choice(words, 4), "with it."]) for _ in range(lines)]


@pytest.mark.slow
def test_near_duplicates_leave_one_of_each_whatever_the_number_of_processes(tmp_path):
    pytest.importorskip("spacy", reason="needs pip install 'diff-transformer[prepare]'")
    lines = prose(np.random.default_rng(0), 400)
    texts = ["\n".join(lines[n : n + 20]) for n in range(0, 400, 20)]
    (tmp_path / "0.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[:12]))
    again = [*texts[12:], texts[0], texts[1] + " One word.", "The " + texts[15]]
    (tmp_path / "1.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in again))
    sources = tuple(str(tmp_path / f"{n}.jsonl") for n in range(2))
    config = PrepareConfig(sources, tokenizer="bytes", validation=0.2, dedup="minhash")
    prepare(config, tmp_path / "out", engine=Engine("local", jobs=2))
    kept = documents(tmp_path / "out", "train") + documents(tmp_path / "out", "validation")
    assert totals(tmp_path / "out")["left_out"]["filtered"] == 3
    assert {text.split("\n")[5] for text in kept} == {text.split("\n")[5] for text in texts}
    assert len(kept) == 20
    (tmp_path / "out" / "shards" / "train-00000.tokens").unlink()
    prepare(config, tmp_path / "out", resume=True, engine=LOCAL)
    prepare(config, tmp_path / "one", engine=LOCAL)
    assert content(tmp_path / "out") == content(tmp_path / "one")


def test_bad_input_is_one_sentence_before_anything_is_written(rows, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    for message, engine in [
        ("no engine 'lokal' .did you mean 'local'.*; there are: local, slurm, ray", Engine("lokal")),
        ("--partition is an option of --engine slurm, not of local", Engine("local", partition="a")),
        ("--engine slurm needs --partition NAME and --time HH:MM:SS", Engine("slurm")),
        ("there is no command sbatch here", Engine("slurm", partition="cpu", time="01:00:00")),
    ]:
        with pytest.raises(UserError, match=message):
            prepare(rows, tmp_path / "out", engine=engine)
    assert not (tmp_path / "out").exists()


def test_slurm_runs_the_tasks(rows, whole, tmp_path, monkeypatch):
    """With commands that stand for Slurm's: sbatch keeps its script, and the test runs it."""
    for name, does in {
        "sbatch": f'cd {tmp_path}; cp "${{!#}}" job$(ls | grep -c job); echo Job 7',
        "scontrol": "echo here",
        "srun": 'exec "${@:4}"',
    }.items():
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{does}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    launch = f"#!{sys.executable}\nfrom datatrove.tools.launch_pickled_pipeline import main\nmain()\n"
    (tmp_path / "bin" / "launch_pickled_pipeline").write_text(launch)
    (tmp_path / "bin" / "launch_pickled_pipeline").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    out = tmp_path / "out"
    prepare(rows, out, engine=Engine("slurm", jobs=1, partition="cpu", time="01:00:00"))
    job = (tmp_path / "job0").read_text()
    assert "#SBATCH --array=0-1%1\n" in job
    assert "#SBATCH --partition=cpu\n" in job
    for task in "10":
        environment = {**os.environ, "SLURM_ARRAY_TASK_ID": task, "SLURM_NODELIST": "here"}
        subprocess.run(["bash", str(tmp_path / "job0")], env=environment, capture_output=True, check=True)
        assert (out / "shards" / f"0000{task}.json").exists()
    assert content(out) == content(whole)


def test_deduplication_has_four_stages_on_slurm(rows, tmp_path):
    pytest.importorskip("spacy", reason="needs pip install 'diff-transformer[prepare]'")
    prepare(rows, tmp_path / "out")
    plan = read_plan(tmp_path / "out")
    plan["settings"]["dedup"] = "minhash"
    assert [*stages(tmp_path / "out", plan)] == ["signatures", "buckets", "clusters", "write"]


def test_an_address_where_nothing_listens_is_said_at_once(rows, tmp_path):
    pytest.importorskip("ray", reason="needs pip install 'diff-transformer[ray]'")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        begun = time.monotonic()
        with pytest.raises(UserError, match=rf"^nothing listens at --address {address} .*; give HOST:PORT"):
            prepare(rows, tmp_path / "out", engine=Engine("ray", address=address))
        with pytest.raises(UserError, match=r"^--address 'nonsense' is not HOST:PORT of a Ray cluster's head"):
            prepare(rows, tmp_path / "out", engine=Engine("ray", address="nonsense"))
        assert time.monotonic() - begun < 10
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_ray_cluster_of_two_nodes_gives_the_same_bytes(rows, whole, tmp_path):
    ray = pytest.importorskip("ray", reason="needs pip install 'diff-transformer[ray]'")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=1)
        prepare(rows, tmp_path / "out", engine=Engine("ray", address=cluster.address))
        assert content(tmp_path / "out") == content(whole)
        (tmp_path / "bad.jsonl").write_text("not JSON\n")
        bad = dataclasses.replace(rows, sources=(*rows.sources, str(tmp_path / "bad.jsonl")))
        with pytest.raises(UserError, match=r"tasks of write have not finished; see"):
            prepare(bad, tmp_path / "bad", engine=Engine("ray", address=cluster.address))
    finally:
        ray.shutdown()
        with suppress(Exception):  # on a loaded machine it may wait for nodes in vain
            cluster.shutdown()
