import dataclasses
import errno
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from diff_transformer.cli.prepare import run_prepare
from diff_transformer.data.prepare import workers
from diff_transformer.data.prepare.config import PrepareConfig
from diff_transformer.data.prepare.folder import load_prepared_tokenizer, read_manifest, verify
from diff_transformer.data.prepare.run import prepare
from diff_transformer.data.prepared import Shards
from diff_transformer.data.tokenizer import byte_tokenizer, encode, tokenizer_hash
from diff_transformer.durable import DiskError

END = 256


@pytest.fixture
def rows(tmp_path):
    """Forty rows of 100 bytes or so, and the settings that put about four into a shard."""
    path = tmp_path / "rows.jsonl"
    texts = [f"row {i}: " + f"word{i} " * (12 + i % 3) for i in range(40)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return PrepareConfig((str(path),), tokenizer="bytes", validation=0.2, shard_bytes=400)


def content(folder):
    """Every file with its bytes."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def test_shards_worked_by_hand(tmp_path):
    for name, text in {"train/a.txt": "ab\n", "train/b.txt": "é", "train/c.txt": "cdefg", "val/d.txt": "hi"}.items():
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text(text)
    manifest = prepare(PrepareConfig((str(tmp_path / "in"),), tokenizer="bytes", shard_bytes=4), tmp_path / "out")
    shards = tmp_path / "out" / "shards"
    first = np.fromfile(shards / "train-000000.tokens", "<u2").tolist()
    assert first == [*b"ab\n", END, *"é".encode(), END]
    assert np.fromfile(shards / "train-000000.documents", "<i8").tolist() == [0, 4]
    assert np.fromfile(shards / "train-000001.tokens", "<u2").tolist() == [*b"cdefg", END]
    assert np.fromfile(shards / "validation-000000.tokens", "<u2").tolist() == [*b"hi", END]
    assert {key: manifest["train"][key] for key in ("tokens", "documents", "text_bytes")} == {
        "tokens": 13, "documents": 3, "text_bytes": 10,
    }  # fmt: skip
    assert manifest["tokenizer"] == {"hash": tokenizer_hash(byte_tokenizer()), "size": 258, "end_of_text": END}
    assert manifest == read_manifest(tmp_path / "out")
    assert verify(tmp_path / "out") == []


def test_a_document_may_reach_over_several_shards(tmp_path, monkeypatch):
    monkeypatch.setattr("diff_transformer.data.prepare.pieces.PIECE_CHARACTERS", 50)
    (tmp_path / "long.txt").write_text("some words " * 40)
    out = tmp_path / "out"
    prepare(PrepareConfig((str(tmp_path),), tokenizer="bytes", validation=0.5, shard_bytes=60), out)
    tokens = Shards(out, "train")
    assert len(list((out / "shards").glob("train-*.tokens"))) >= 3
    assert tokens.num_documents == 1
    assert np.concatenate(list(tokens.document_starts())).tolist() == [0]
    whole = [*tokens[:], *Shards(out, "validation")[:]]
    assert bytes(token for token in whole if token != END) == b"some words " * 40
    assert whole.count(END) == 2
    assert whole[-1] == END


def test_a_tokenizer_is_trained_on_the_training_side_and_saved(tmp_path, documents):
    for number, document in enumerate(documents):
        (tmp_path / f"{number}.txt").write_text(document.text)
    out = tmp_path / "out"
    config = PrepareConfig((str(tmp_path),), vocab_size=400, sample_bytes=40_000, validation=0.3)
    prepare(config, out)
    tokenizer, tokens = load_prepared_tokenizer(out), Shards(out, "train")
    assert len(tokenizer) == 400
    starts = [*np.concatenate(list(tokens.document_starts())), len(tokens)]
    found = [tokens[a:b].tolist() for a, b in pairwise(starts)]
    assert len(found) == tokens.num_documents >= 2
    texts = [document.text for document in documents]
    for ids in found:
        assert ids[-1] == tokenizer.eos_token_id
        text = str(tokenizer.decode(ids[:-1]))
        assert text in texts
        assert encode(tokenizer, text).tolist() == ids[:-1]
    assert "token" not in json.dumps(read_manifest(out)["left_out"])


def test_wide_vocabularies_get_wide_integers(tmp_path, rows):
    state = json.loads(byte_tokenizer().backend_tokenizer.to_str())
    state["model"]["vocab"] |= {f"token{n}": 258 + n for n in range(1 << 16)}
    backend = Tokenizer.from_str(json.dumps(state))
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>").save_pretrained(tmp_path / "wide")
    out = tmp_path / "out"
    prepare(PrepareConfig(rows.sources, tokenizer=str(tmp_path / "wide"), validation=0.2), out)
    assert Shards(out, "train").dtype == np.uint32
    assert bytes(Shards(out, "train")[:3].tolist()) == b"row"


def test_the_number_of_processes_changes_nothing(tmp_path, rows):
    seen = []
    prepare(rows, tmp_path / "one", progress=lambda state: seen.append((state.read, state.total)))
    prepare(rows, tmp_path / "two", jobs=2)
    assert content(tmp_path / "one") == content(tmp_path / "two")
    assert len(content(tmp_path / "one")) > 20
    size = os.path.getsize(rows.sources[0])
    assert seen[0] == (0, size)
    assert seen[-1] == (size, size)


class Killed(BaseException):
    pass


def test_after_a_stop_at_any_moment_resuming_gives_the_same_bytes(tmp_path, rows, monkeypatch):
    """Files appear by rename. The process stops before the first rename, before the second, and so on."""
    prepare(rows, tmp_path / "whole")
    whole = content(tmp_path / "whole")
    replace, write = os.replace, workers.write_shard
    renames = len(whole) + 2  # of the files, the tokenizer's folder and the plan, which does not stay
    renames -= len([name for name in whole if name.startswith("tokenizer/")])
    for moment in range(renames):
        out, count, written = tmp_path / f"out{moment}", [0], []

        def stopping(source, target, count=count, moment=moment):
            count[0] += 1
            if count[0] > moment:
                raise Killed
            replace(source, target)

        monkeypatch.setattr(os, "replace", stopping)
        with pytest.raises(Killed):
            prepare(rows, out)
        monkeypatch.setattr(os, "replace", replace)
        assert not (out / "manifest.json").exists()
        journal = out / "finished.jsonl"
        kept = len(journal.read_text().splitlines()) if journal.exists() else 0
        monkeypatch.setattr(workers, "write_shard", lambda *a, written=written: written.append(a[1].name) or write(*a))
        prepare(rows, out, resume=True)
        assert content(out) == whole, moment
        assert len(written) == len(list(out.rglob("*.documents"))) - kept
    prepare(rows, tmp_path / "last")  # and no stop comes too late: the renames were counted right
    assert content(tmp_path / "last") == whole


def test_a_killed_process_leaves_no_child_and_its_work_goes_on(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": f"row {i} " + f"word{i} " * 300}) + "\n" for i in range(1500)))
    command = [sys.executable, "-m", "diff_transformer", "prepare", path, "--tokenizer", "bytes", "--shard-mb", "0.1"]
    command = [*map(str, command), "--out", str(tmp_path / "out"), "--jobs", "2"]
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    journal, deadline = tmp_path / "out" / "finished.jsonl", time.monotonic() + 120
    while not (journal.exists() and journal.read_text().count("\n") >= 3) and time.monotonic() < deadline:
        time.sleep(0.01)
    children = _children(running.pid)
    running.kill()
    running.wait()
    assert len(children) >= 2
    while any(map(_alive, children)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(_alive, children))
    finished = len(journal.read_text().splitlines())
    assert finished >= 3
    config = PrepareConfig((str(path),), tokenizer="bytes", shard_bytes=100_000)
    with pytest.raises(FileExistsError, match=r"holds an interrupted preparation; continue it \(--resume\)"):
        prepare(config, tmp_path / "out")
    prepare(config, tmp_path / "out", resume=True)
    prepare(config, tmp_path / "whole")
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def _children(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]


def _alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_a_child_that_is_killed_is_an_error_that_says_what_to_do(tmp_path, rows):
    def kill_children(state):
        if state.tokens:
            for child in multiprocessing.active_children():
                child.kill()

    with pytest.raises(RuntimeError, match=r"killed, perhaps because memory ran out.*--resume and fewer --jobs"):
        prepare(rows, tmp_path / "out", jobs=2, progress=kill_children)
    prepare(rows, tmp_path / "out", resume=True)
    prepare(rows, tmp_path / "whole")
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_nothing_is_written_over(tmp_path, rows):
    prepare(rows, tmp_path / "out")
    with pytest.raises(FileExistsError, match="is prepared already; check or repair it"):
        prepare(rows, tmp_path / "out")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("notes")
    for resume in (False, True):
        with pytest.raises(FileExistsError, match="is not empty and holds no preparation"):
            prepare(rows, tmp_path / "mine", resume=resume)
    assert content(tmp_path / "mine") == {"notes.txt": b"notes"}


def interrupted(config, out, monkeypatch, shards=3):
    """A preparation that stopped after a few shards."""
    write, done = workers.write_shard, []

    def stopping(*arguments):
        if len(done) == shards:
            raise Killed
        done.append(1)
        return write(*arguments)

    monkeypatch.setattr(workers, "write_shard", stopping)
    with pytest.raises(Killed):
        prepare(config, out)
    monkeypatch.setattr(workers, "write_shard", write)


def test_resuming_with_another_tokenizer_or_other_sources_is_refused(tmp_path, rows, monkeypatch):
    out = tmp_path / "out"
    interrupted(rows, out, monkeypatch)
    before = content(out)
    other = byte_tokenizer()
    other.add_tokens(["row"])
    other.save_pretrained(tmp_path / "other")
    hashes = tokenizer_hash(byte_tokenizer()), tokenizer_hash(other)
    with pytest.raises(ValueError, match=f"a tokenizer of hash {hashes[0]}, this one .*other.* has {hashes[1]}"):
        prepare(dataclasses.replace(rows, tokenizer=str(tmp_path / "other")), out, resume=True)
    with pytest.raises(ValueError, match=r"(?s)other settings .*settings.validation: 0.2 against 0.1"):
        prepare(dataclasses.replace(rows, validation=0.1), out, resume=True)
    (tmp_path / "more.jsonl").write_text('{"text": "more"}\n')
    with pytest.raises(ValueError, match=r"(?s)other settings .*more.jsonl"):
        prepare(dataclasses.replace(rows, sources=(*rows.sources, str(tmp_path / "more.jsonl"))), out, resume=True)
    with open(rows.sources[0], "a") as file:
        file.write('{"text": "one row more"}\n')
    with pytest.raises(ValueError, match=r"(?s)other settings .*\n  sources"):
        prepare(rows, out, resume=True)
    assert content(out) == before


def test_a_folder_may_be_called_like_a_tokenizer(tmp_path, rows, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for resume in (False, True):
        made = run_prepare(list(rows.sources), Path("bytes"), {"tokenizer": "bytes"}, resume=resume)
        assert made is not None
    assert verify(tmp_path / "bytes") == []


def test_text_that_changed_behind_the_same_name_and_size_is_refused(tmp_path, rows, monkeypatch):
    out = tmp_path / "out"
    interrupted(rows, out, monkeypatch)
    source = tmp_path / "rows.jsonl"
    source.write_text(source.read_text().replace("row 0: word0", "row 0: WORD0"))
    with pytest.raises(ValueError, match=r"the text of train-000000 is not what .*out was prepared from"):
        prepare(rows, out, resume=True)


@pytest.mark.parametrize("ending", [".tokens", ".documents"])
def test_a_truncated_or_missing_shard_is_named_and_repaired(tmp_path, rows, ending):
    out = tmp_path / "out"
    prepare(rows, out)
    before = content(out)
    path = out / "shards" / f"train-000002{ending}"
    size = path.stat().st_size
    os.truncate(path, size - 3)
    message = rf"train-000002{ending} has {size - 3} bytes, {size} expected.*diff-transformer prepare --out .*--resume"
    with pytest.raises(ValueError, match=message):
        Shards(out, "train")
    assert len(verify(out)) == 1
    Shards(out, "validation")
    prepare(rows, out, resume=True)
    assert content(out) == before
    path.unlink()
    with pytest.raises(ValueError, match=f"train-000002{ending} is missing; {size} bytes expected"):
        Shards(out, "train")
    unchecked = Shards(out, "train", check=False)
    first = unchecked._records[0]["tokens"]
    assert len(unchecked[:first]) == first
    with pytest.raises(ValueError, match=f"train-000002{ending} is missing; {size} bytes expected. Repair"):
        unchecked[:]
    prepare(rows, out, resume=True)
    assert content(out) == before


def test_a_changed_byte_is_found_and_repaired(tmp_path, rows):
    out = tmp_path / "out"
    prepare(rows, out)
    before = content(out)
    path = out / "shards" / "train-000001.tokens"
    damaged = bytearray(path.read_bytes())
    damaged[10] ^= 1
    path.write_bytes(damaged)
    (problem,) = verify(out)
    assert "train-000001.tokens has checksum" in problem
    prepare(rows, out, resume=True)
    assert content(out) == before
    state = out / "tokenizer" / "tokenizer.json"
    state.write_text(state.read_text().replace('"add_prefix_space": false', '"add_prefix_space": true'))
    assert any("has hash" in problem for problem in verify(out))
    with pytest.raises(ValueError, match=r"has hash .* the shards were made with"):
        load_prepared_tokenizer(out)


def test_a_changed_manifest_is_refused(tmp_path, rows):
    out = tmp_path / "out"
    prepare(rows, out)
    text = (out / "manifest.json").read_text()
    (out / "manifest.json").write_text(text.replace('"text_bytes": ', '"text_bytes": 1', 1))
    with pytest.raises(ValueError, match=r"manifest.json is damaged \(its checksum differs\); copy it again"):
        verify(out)
    manifest = json.loads(text)
    del manifest["checksum"]  # as an earlier version wrote it
    (out / "manifest.json").write_text(json.dumps(manifest))
    assert verify(out) == []


def test_a_repair_does_not_take_text_that_changed(tmp_path, rows):
    out = tmp_path / "out"
    prepare(rows, out)
    before = content(out)
    (out / "shards" / "train-000000.tokens").unlink()
    source = tmp_path / "rows.jsonl"
    source.write_text(source.read_text().replace("row 0: word0", "row 0: WORD0"))
    with pytest.raises(ValueError, match="the text of train-000000 is not what"):
        prepare(rows, out, resume=True)
    del before["shards/train-000000.tokens"]
    assert content(out) == before


def test_a_full_disk_keeps_what_is_finished(tmp_path, rows, monkeypatch):
    out, fsync, count = tmp_path / "out", os.fsync, 0

    def full(number):
        nonlocal count
        count += 1
        if count == 30:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(number)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RuntimeError, match=r"No space left on device; finished .* kept: continue with --resume"):
        prepare(rows, out)
    monkeypatch.setattr(os, "fsync", fsync)
    prepare(rows, out, resume=True)
    prepare(rows, tmp_path / "whole")
    assert content(out) == content(tmp_path / "whole")


def test_two_at_work_in_one_folder_is_refused(tmp_path, rows, monkeypatch):
    out = tmp_path / "out"
    interrupted(rows, out, monkeypatch)
    with FileLock(out / ".lock"), pytest.raises(RuntimeError, match="another process is preparing"):
        prepare(rows, out, resume=True)


def test_a_side_without_documents_is_refused(tmp_path, rows):
    path = tmp_path / "one.jsonl"
    path.write_text('{"text": "a single row"}\n')
    config = PrepareConfig((str(path),), tokenizer="bytes")
    with pytest.raises(
        ValueError, match=r"none of the 1 documents fell to the validation side .* 0.01; give more text"
    ):
        prepare(config, tmp_path / "out")
    assert not (tmp_path / "out" / "manifest.json").exists()
    path.write_text('{"text": " "}\n')
    with pytest.raises(ValueError, match="the sources hold no text: 1 blank and 0 invalid documents"):
        prepare(config, tmp_path / "blank")
    path.write_text("".join(json.dumps({"text": f"row {i}"}) + "\n" for i in range(9)))
    prepare(config, tmp_path / "blank")
    assert verify(tmp_path / "blank") == []


@pytest.mark.parametrize("resume", [False, True])
def test_after_bad_input_the_same_command_begins_anew_until_a_shard_is_finished(tmp_path, rows, resume):
    for name in ("good", "other"):
        (tmp_path / f"{name}.txt").write_text(f"a {name} text\n" * 30)
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"a caf\xe9\n" * 30)
    out = tmp_path / "out"
    names = [str(tmp_path / f"{name}.txt") for name in ("good", "other", "bad")]
    for shard_bytes in (10_000, 100):
        config = PrepareConfig(tuple(names), tokenizer="bytes", validation=0.3, shard_bytes=shard_bytes)
        with pytest.raises(ValueError, match=r"bad.txt is not UTF-8"):
            prepare(config, out, resume=resume)
    assert (out / "finished.jsonl").read_text()
    bad.write_text("a café\n" * 30)
    if resume:
        with pytest.raises(ValueError, match=r"(?s)other settings .*remove .*out to start anew, or choose another"):
            prepare(config, out, resume=True)
    else:
        with pytest.raises(FileExistsError, match="holds an interrupted preparation"):
            prepare(config, out)
    shutil.rmtree(out)
    bad.write_bytes(b"a caf\xe9\n" * 30)
    config = dataclasses.replace(config, shard_bytes=10_000)
    with pytest.raises(ValueError, match=r"bad.txt is not UTF-8"):
        prepare(config, out)
    bad.write_text("a café\n" * 30)
    prepare(config, out, resume=resume)
    prepare(config, tmp_path / "whole")
    assert content(out) == content(tmp_path / "whole")


def test_a_folder_that_is_not_complete_or_not_ours_is_refused(tmp_path, rows, monkeypatch):
    interrupted(rows, tmp_path / "out", monkeypatch)
    with pytest.raises(ValueError, match=r"is not complete; continue with `diff-transformer prepare .* --resume`"):
        Shards(tmp_path / "out", "train")
    with pytest.raises(FileNotFoundError, match=r"is not a prepared folder: it has no manifest\.json"):
        Shards(tmp_path, "train")
    (tmp_path / "manifest.json").write_text('{"format": "something else", "version": 1}')
    with pytest.raises(ValueError, match=r"is of format .*something else"):
        Shards(tmp_path, "train")


def test_an_out_that_may_not_be_written_to_is_said_before_anything_is_read(tmp_path, rows, monkeypatch):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(DiskError, match="file is a file; choose another --out"):
        prepare(rows, tmp_path / "file")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # no rights bind root
    with pytest.raises(DiskError, match=f"{tmp_path} may not be written to; choose another --out"):
        prepare(dataclasses.replace(rows, sources=("/nowhere",)), tmp_path / "out")


def test_settings_are_checked_before_anything_is_written(tmp_path, rows):
    for change, message in [
        ({"validation": 0.0}, "validation is 0.0; give a share between 0 and 1"),
        ({"shard_bytes": 0}, "shard_bytes is 0"),
        ({"sources": ()}, "no source of text; give 'python'"),
        ({"tokenizer": str(tmp_path)}, "no tokenizer at"),
    ]:
        with pytest.raises(ValueError, match=message):
            prepare(dataclasses.replace(rows, **change), tmp_path / "out")
    with pytest.raises(ValueError, match="jobs is 0"):
        prepare(rows, tmp_path / "out", jobs=0)
    assert not (tmp_path / "out").exists()
