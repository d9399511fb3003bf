"""Preparation as tasks of datatrove."""

import dataclasses
import io
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

from diff_transformer.data.documents import hash_of_name
from diff_transformer.data.prepare.config import PrepareConfig
from diff_transformer.data.prepare.engine import Engine
from diff_transformer.data.prepare.folder import read_manifest, verify
from diff_transformer.data.prepare.readers import streamed_rows
from diff_transformer.data.prepare.run import prepare
from diff_transformer.data.prepared import Shards

pytest.importorskip("datatrove", reason="needs pip install 'diff-transformer[datatrove]'")
LOCAL = Engine("local")


def write_rows(folder, files=3, rows=30):
    """Files of rows of 100 bytes or so; their texts."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = [[f"row {f} {i}: " + f"word{i} " * (12 + i % 3) for i in range(rows)] for f in range(files)]
    for f, mine in enumerate(texts):
        (folder / f"{f}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in mine))
    return texts


def content(folder):
    """Every file with its bytes, without the bookkeeping."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    names = {path.relative_to(folder).as_posix(): path for path in files}
    return {name: path.read_bytes() for name, path in names.items() if not name.startswith(("logs/", "tasks/"))}


def documents(folder, side):
    """The texts of a side of a folder that is prepared in bytes."""
    tokens = Shards(folder, side)
    starts = [*np.concatenate(list(tokens.document_starts())), len(tokens)]
    return [bytes(tokens[a : b - 1].tolist()).decode() for a, b in pairwise(starts)]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Settings of three files for two tasks, with about four rows to a shard."""
    folder = tmp_path_factory.mktemp("rows")
    write_rows(folder)
    return PrepareConfig((str(folder),), tokenizer="bytes", validation=0.2, shard_bytes=400, tasks=2)


@pytest.fixture(scope="module")
def whole(rows, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "out"
    prepare(rows, out, jobs=1, engine=LOCAL)
    return out


def test_tasks_write_every_document_once_in_the_order_of_tasks(rows, whole, tmp_path):
    texts = write_rows(tmp_path / "same")
    ordered = [*texts[0], *texts[2], *texts[1]]  # task 0 reads files 0 and 2
    held_out = [text for text in ordered if hash_of_name(text) < 0.2]
    assert 5 < len(held_out) < 45
    assert documents(whole, "validation") == held_out
    assert documents(whole, "train") == [text for text in ordered if text not in held_out]
    assert verify(whole) == []
    names = [record["name"] for record in read_manifest(whole)["train"]["shards"]]
    assert names[:2] == ["train-00000-000000", "train-00000-000001"]
    assert "train-00001-000000" in names


def test_the_number_of_processes_changes_nothing(rows, whole, tmp_path):
    prepare(rows, tmp_path / "two", jobs=2, engine=LOCAL)
    assert content(tmp_path / "two") == content(whole)


def test_a_killed_preparation_resumes_to_the_same_bytes(tmp_path):
    for f in range(2):
        lines = (json.dumps({"text": f"row {f} {i} " + f"word{i} " * 300}) for i in range(1500))
        (tmp_path / f"{f}.jsonl").write_text("".join(line + "\n" for line in lines))
    sources = [str(tmp_path / f"{f}.jsonl") for f in range(2)]
    command = [sys.executable, "-m", "diff_transformer", "prepare", *sources, "--tokenizer", "bytes"]
    command += ["--shard-mb", "0.1", "--engine", "local", "--jobs", "2", "--out", str(tmp_path / "out")]
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    journals, deadline = tmp_path / "out" / "tasks", time.monotonic() + 120
    while sum(path.read_text().count("\n") for path in journals.glob("*")) < 6 and time.monotonic() < deadline:
        time.sleep(0.01)
    with open(f"/proc/{running.pid}/task/{running.pid}/children") as file:
        children = [int(child) for child in file.read().split()]
    running.kill()
    running.wait()
    assert len(children) >= 2
    while any(_alive(child) for child in children) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(_alive(child) for child in children)
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "shards").glob("*.documents")}
    assert len(kept) >= 6
    config = PrepareConfig(tuple(sources), tokenizer="bytes", shard_bytes=100_000)
    with pytest.raises(FileExistsError, match=r"interrupted preparation; continue it \(--resume\)"):
        prepare(config, tmp_path / "out", engine=LOCAL)
    with pytest.raises(ValueError, match=r"the 2 tasks of .* are not finished; when none is running, continue with"):
        prepare(dataclasses.replace(config, tasks=2), tmp_path / "out", resume=True)
    prepare(config, tmp_path / "out", resume=True, engine=LOCAL, jobs=2)
    again = [path for path, written in kept.items() if path.stat().st_mtime_ns != written]
    assert len(again) <= 4  # one for each side of a task, whose record was not in the journal yet
    prepare(config, tmp_path / "unbroken", engine=LOCAL, jobs=2)
    assert content(tmp_path / "out") == content(tmp_path / "unbroken")


def _alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_a_damaged_shard_is_made_again_and_finished_tasks_are_not_run_again(rows, tmp_path, whole):
    out = tmp_path / "out"
    prepare(rows, out, jobs=1, engine=LOCAL)
    (out / "shards" / "train-00001-000001.tokens").unlink()
    os.truncate(out / "shards" / "train-00001-000002.documents", 3)
    finished = (out / "tasks" / "00000.jsonl").stat().st_mtime_ns
    prepare(rows, out, jobs=1, engine=LOCAL, resume=True)
    assert content(out) == content(whole)
    assert (out / "tasks" / "00000.jsonl").stat().st_mtime_ns == finished
    assert prepare(rows, out, resume=True) == read_manifest(whole)  # nothing to do needs no engine


def test_text_that_changed_behind_the_same_name_and_size_is_refused(tmp_path):
    write_rows(tmp_path / "in")
    config = PrepareConfig((str(tmp_path / "in"),), tokenizer="bytes", validation=0.2, shard_bytes=400, tasks=3)
    out = tmp_path / "out"
    prepare(config, out, engine=LOCAL)
    before = content(out)
    (out / "shards" / "train-00001-000001.tokens").unlink()
    source = tmp_path / "in" / "1.jsonl"
    source.write_text(source.read_text().replace("row 1 0: word0", "row 1 0: WORD0"))
    with pytest.raises(ValueError, match=r"task 1 of 3 failed: the text of \S+ is not what .*out was prepared from"):
        prepare(config, out, engine=LOCAL, resume=True)
    assert before.keys() - content(out).keys() == {"shards/train-00001-000001.tokens"}
    source.write_text(source.read_text().replace("row 1 0: WORD0", "row 1 0: word0"))
    prepare(config, out, engine=LOCAL, resume=True)
    assert content(out) == before


def test_a_row_without_text_stops_its_task_and_is_named(tmp_path):
    write_rows(tmp_path / "in", files=2)
    (tmp_path / "in" / "1.jsonl").open("a").write("not JSON\n")
    config = PrepareConfig((str(tmp_path / "in"),), tokenizer="bytes", validation=0.2)
    with pytest.raises(ValueError, match=r"^task 1 of 2 failed: .*1.jsonl, line 31 is not JSON .*--skip-invalid"):
        prepare(config, tmp_path / "out", engine=LOCAL)
    made = prepare(dataclasses.replace(config, skip_invalid=True), tmp_path / "skipped", engine=LOCAL)
    assert made["left_out"] == {"blank": 0, "invalid": 1, "filtered": 0}


def test_a_worker_that_is_killed_is_an_error_that_says_what_to_do(rows, tmp_path):
    before = set(multiprocessing.active_children())

    def kill_a_child():
        while not (children := set(multiprocessing.active_children()) - before):
            time.sleep(0.01)
        children.pop().kill()

    threading.Thread(target=kill_a_child, daemon=True).start()
    with pytest.raises(RuntimeError, match=r"killed, perhaps because memory ran out.*--resume and fewer --jobs"):
        prepare(rows, tmp_path / "out", jobs=1, engine=LOCAL)


def test_text_parquet_urls_and_a_data_set_are_read(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    texts = write_rows(tmp_path / "set", files=3)
    (tmp_path / "in" / "train").mkdir(parents=True)
    (tmp_path / "in" / "val").mkdir()
    (tmp_path / "in" / "train" / "a.txt").write_text("a text\r\nof two lines")
    (tmp_path / "in" / "val" / "b.txt").write_text("held out")
    parquet.write_table(pyarrow.table({"text": ["a row", " ", "another"]}), tmp_path / "in" / "train" / "c.parquet")
    sources = (f"file://{tmp_path / 'in'}", f"hub:{tmp_path / 'set'}")
    made = prepare(PrepareConfig(sources, tokenizer="bytes", tasks=2), tmp_path / "out", engine=LOCAL)
    found = documents(tmp_path / "out", "train")
    of_set = [text for mine in texts for text in mine if hash_of_name(text) >= 0.01]
    assert sorted(found) == sorted(["a text\nof two lines", "a row", "another", *of_set])
    assert found[0] == "a text\nof two lines"
    assert "held out" in documents(tmp_path / "out", "validation")
    assert made["left_out"] == {"blank": 1, "invalid": 0, "filtered": 0}


@pytest.mark.parametrize("parts", [2, 5])
def test_parts_of_a_data_set_have_every_row_once(tmp_path, parts):
    texts = write_rows(tmp_path, files=3, rows=4)
    found = [[text for text, _ in streamed_rows(f"hub:{tmp_path}", "text", (part, parts))] for part in range(parts)]
    assert sorted(text for part in found for text in part) == sorted(text for mine in texts for text in mine)
    assert all(found)


def test_a_page_of_a_warc_file_is_its_text(tmp_path):
    pytest.importorskip("magic", reason="needs libmagic", exc_type=ImportError)
    from warcio.statusandheaders import StatusAndHeaders
    from warcio.warcwriter import WARCWriter

    paragraphs = [f"Paragraph {n} of a page about rivers and the towns that stand beside them." for n in range(9)]
    page = (
        "<html><body><nav>menu</nav><article>" + "".join(f"<p>{p}</p>" for p in paragraphs) + "</article></body></html>"
    )
    with (tmp_path / "a.warc.gz").open("wb") as file:
        writer = WARCWriter(file, gzip=True)
        for n in range(2):
            headers = StatusAndHeaders("200 OK", [("Content-Type", "text/html")], protocol="HTTP/1.1")
            record = writer.create_warc_record(
                f"http://example.org/{n}", "response", payload=io.BytesIO(page.encode()), http_headers=headers
            )
            writer.write_record(record)
    write_rows(tmp_path, files=1)
    config = PrepareConfig((str(tmp_path),), tokenizer="bytes", validation=0.2, tasks=2)
    prepare(config, tmp_path / "out", engine=LOCAL)
    found = [text for side in ("train", "validation") for text in documents(tmp_path / "out", side)]
    assert [text for text in found if "Paragraph" in text] == ["\n".join(paragraphs)] * 2  # equal pages stay


def test_filters_drop_what_the_rules_name(tmp_path):
    lines = prose(np.random.default_rng(0), 108)
    good = ["\n".join(lines[n : n + 9]) for n in range(0, 108, 9)]
    bad = ["short.", "buy now " * 300, "\n".join("- item" for _ in range(90))]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in good + bad))
    config = PrepareConfig((str(tmp_path / "rows.jsonl"),), tokenizer="bytes", validation=0.3, filters=("gopher",))
    made = prepare(config, tmp_path / "out", engine=LOCAL)
    kept = documents(tmp_path / "out", "train") + documents(tmp_path / "out", "validation")
    assert sorted(kept) == sorted(good)
    assert made["left_out"] == {"blank": 0, "invalid": 0, "filtered": 3}
    assert verify(tmp_path / "out") == []


def prose(rng, lines):
    """Lines of 16 words or so, which the filters keep."""
    words = ["".join(rng.choice(list("aeioubdlmnrst"), 6)) for _ in range(500)]
    return [" ".join(["The", *rng.choice(words, 9), "and", *rng.choice(words, 4), "with it."]) for _ in range(lines)]


@pytest.mark.slow
def test_near_duplicates_leave_one_of_each_whatever_the_number_of_processes(tmp_path):
    lines = prose(np.random.default_rng(0), 400)
    texts = ["\n".join(lines[n : n + 20]) for n in range(0, 400, 20)]
    (tmp_path / "0.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[:12]))
    again = [*texts[12:], texts[0], texts[1] + " One word.", "The " + texts[15]]
    (tmp_path / "1.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in again))
    sources = tuple(str(tmp_path / f"{n}.jsonl") for n in range(2))
    config = PrepareConfig(sources, tokenizer="bytes", validation=0.2, dedup="minhash")
    made = prepare(config, tmp_path / "out", jobs=2, engine=LOCAL)
    kept = documents(tmp_path / "out", "train") + documents(tmp_path / "out", "validation")
    assert made["left_out"] == {"blank": 0, "invalid": 0, "filtered": 3}
    assert {text.split("\n")[5] for text in kept} == {text.split("\n")[5] for text in texts}
    assert len(kept) == 20
    (tmp_path / "out" / "shards" / "train-00000-000000.tokens").unlink()
    prepare(config, tmp_path / "out", resume=True, engine=LOCAL)
    prepare(config, tmp_path / "one", jobs=1, engine=LOCAL)
    assert content(tmp_path / "out") == content(tmp_path / "one")


def test_bad_input_is_one_sentence_before_anything_is_written(rows, tmp_path, monkeypatch):
    def refused(message, engine=LOCAL, error=ValueError, **changes):
        with pytest.raises(error, match=message) as caught:
            prepare(dataclasses.replace(rows, **changes), tmp_path / "out", engine=engine)
        assert "\n" not in str(caught.value)

    refused("no engine 'lokal' .did you mean 'local'.*; there are: local, slurm, ray", Engine("lokal"))
    refused("--partition is an option of --engine slurm, not of local; leave it out", Engine("local", partition="a"))
    refused("no filter 'gofer' .did you mean 'gopher'.", filters=("gofer",))
    refused("no deduplication 'minhsh' .did you mean 'minhash'.", dedup="minhsh")
    refused("tasks is 4, and the sources have 3 files, which are not divided; give --tasks of at most 3", tasks=4)
    refused("tasks is -1; it must be positive", tasks=-1)
    refused("tasks, filters and deduplication need an engine; give --engine local", None)
    refused("--engine slurm needs --partition NAME and --time HH:MM:SS", Engine("slurm"))
    refused("source 's3x://bucket/a' cannot be listed .*check the URL and access", sources=("s3x://bucket/a",))
    monkeypatch.setenv("PATH", str(tmp_path))
    submitted = Engine("slurm", partition="cpu", time="01:00:00")
    refused("there is no command sbatch here; .*--dry-run", submitted, RuntimeError)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refused(r"--engine needs datatrove and dill; install with: pip install 'diff-transformer\[datatrove\]'",
            error=RuntimeError)  # fmt: skip
    assert not (tmp_path / "out").exists()


def test_slurm_runs_the_tasks_and_a_last_job_writes_the_manifest(rows, whole, tmp_path, monkeypatch):
    """With commands that stand for Slurm's: sbatch keeps its script, and the test runs the scripts."""
    for name, does in {
        "sbatch": f'cd {tmp_path}; cp "${{!#}}" job$(ls | grep -c job); echo "$@" >> given; echo Job 7',
        "scontrol": "echo here",
        "srun": 'exec "${@:4}"',
    }.items():
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{does}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    slurm, out = Engine("slurm", partition="cpu", time="01:00:00"), tmp_path / "out"
    assert prepare(rows, out, jobs=1, engine=dataclasses.replace(slurm, dry_run=True)) is None
    drawn = [(out / "logs" / "shards" / f"{name}_script.slurm").read_text() for name in ("launch", "last")]
    assert not (tmp_path / "given").exists()
    assert prepare(rows, out, jobs=1, engine=slurm) is None
    jobs = [(tmp_path / f"job{n}").read_text() for n in range(2)]
    assert jobs == [drawn[0], drawn[1].replace("afterany:JOB", "afterany:7")]
    assert "#SBATCH --array=0-1%1\n" in jobs[0]
    assert "#SBATCH --partition=cpu\n" in jobs[0]
    assert jobs[1].rstrip().endswith(f"-m diff_transformer prepare --out {out} --resume")
    assert "--array" not in jobs[1]

    def run(job, **environment):
        command = ["bash", str(tmp_path / f"job{job}")]
        return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)

    run(0, SLURM_ARRAY_TASK_ID="1", SLURM_NODELIST="here")
    assert "error: task 0 of the 2 tasks" in run(1).stderr
    run(0, SLURM_ARRAY_TASK_ID="0", SLURM_NODELIST="here")
    assert run(1).returncode == 0
    assert content(out) == content(whole)


def test_an_address_where_nothing_listens_is_said_at_once(rows, tmp_path):
    pytest.importorskip("ray", reason="needs pip install 'diff-transformer[ray]'")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        begun = time.monotonic()
        with pytest.raises(ConnectionError, match=rf"^nothing listens at --address {address} .*; give HOST:PORT"):
            prepare(rows, tmp_path / "out", engine=Engine("ray", address=address))
        with pytest.raises(ValueError, match=r"^--address 'nonsense' is not HOST:PORT of a Ray cluster's head"):
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
        prepare(rows, tmp_path / "out", jobs=None, engine=Engine("ray", address=cluster.address))
        assert content(tmp_path / "out") == content(whole)
        (tmp_path / "bad.jsonl").write_text("not JSON\n")
        bad = dataclasses.replace(rows, sources=(*rows.sources, str(tmp_path / "bad.jsonl")))
        with pytest.raises(ValueError, match=r"^task 1 of 2 failed: .*bad.jsonl, line 1 is not JSON"):
            prepare(bad, tmp_path / "bad", jobs=None, engine=Engine("ray", address=cluster.address))
    finally:
        ray.shutdown()
        with suppress(Exception):  # on a loaded machine it may wait for nodes in vain
            cluster.shutdown()
