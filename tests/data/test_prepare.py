"""Prepared folders: worked by hand, killed and resumed, damaged and repaired, refused."""

import dataclasses
import json
import os
from itertools import pairwise

import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from diff_transformer import durable
from diff_transformer.cli.prepare import run_prepare, run_verify
from diff_transformer.data import prepare as prepare_module
from diff_transformer.data.corpus import load_corpus
from diff_transformer.data.prepare import PrepareConfig, prepare, totals
from diff_transformer.data.tokenizer import byte_tokenizer, encode, tokenizer_hash
from diff_transformer.data.tokens import Shards, load_prepared_tokenizer, read_plan, verify
from diff_transformer.errors import UserError

END = 256


@pytest.fixture
def rows(tmp_path):
    """Four files of ten rows of 100 bytes or so: four tasks."""
    for f in range(4):
        texts = [f"row {f} {i}: " + f"word{i} " * (12 + i % 3) for i in range(10)]
        (tmp_path / "in").mkdir(exist_ok=True)
        (tmp_path / "in" / f"{f}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return PrepareConfig((str(tmp_path / "in"),), tokenizer="bytes", validation=0.2)


def content(folder):
    """Every file with its bytes."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def test_shards_worked_by_hand(tmp_path):
    for name, text in {"train/a.txt": "ab\n", "train/b.txt": "é", "val/d.txt": "hi"}.items():
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text(text)
    prepare(PrepareConfig((str(tmp_path / "in"),), tokenizer="bytes", tasks=2), tmp_path / "out")
    shards = tmp_path / "out" / "shards"
    assert np.fromfile(shards / "train-00000.tokens", "<u2").tolist() == [*b"ab\n", END]
    assert np.fromfile(shards / "train-00001.tokens", "<u2").tolist() == [*"é".encode(), END]
    assert np.fromfile(shards / "validation-00000.tokens", "<u2").tolist() == [*b"hi", END]
    assert np.fromfile(shards / "validation-00001.tokens", "<u2").tolist() == []
    assert totals(tmp_path / "out")["train"] == {"tokens": 7, "documents": 2, "text_bytes": 5}
    tokenizer = {"hash": tokenizer_hash(byte_tokenizer()), "size": 258, "end_of_text": END}
    assert read_plan(tmp_path / "out")["tokenizer"] == tokenizer
    assert verify(tmp_path / "out") == []
    assert Shards(tmp_path / "out", "train")[:].tolist() == [*b"ab\n", END, *"é".encode(), END]


def test_a_tokenizer_is_trained_on_the_training_side_and_saved(tmp_path, documents):
    for number, document in enumerate(documents):
        (tmp_path / f"{number}.txt").write_text(document.text)
    out = tmp_path / "out"
    prepare(PrepareConfig((str(tmp_path),), vocab_size=400, validation=0.3), out)
    tokenizer, tokens = load_prepared_tokenizer(out), Shards(out, "train")
    assert len(tokenizer) == 400
    ends = np.flatnonzero(tokens[:] == tokenizer.eos_token_id) + 1
    found = [tokens[a:b].tolist() for a, b in pairwise([0, *ends])]
    assert len(found) == totals(out)["train"]["documents"] >= 2
    texts = [document.text for document in documents]
    for ids in found:
        assert ids[-1] == tokenizer.eos_token_id
        text = str(tokenizer.decode(ids[:-1]))
        assert text in texts
        assert encode(tokenizer, text).tolist() == ids[:-1]


def test_wide_vocabularies_get_wide_integers(tmp_path, rows):
    state = json.loads(byte_tokenizer().backend_tokenizer.to_str())
    state["model"]["vocab"] |= {f"token{n}": 258 + n for n in range(1 << 16)}
    backend = Tokenizer.from_str(json.dumps(state))
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>").save_pretrained(tmp_path / "wide")
    prepare(dataclasses.replace(rows, tokenizer=str(tmp_path / "wide")), tmp_path / "out")
    assert Shards(tmp_path / "out", "train").dtype == np.uint32
    assert bytes(Shards(tmp_path / "out", "train")[:3].tolist()) == b"row"


def test_the_command_says_what_was_made_and_what_comes_next(tmp_path, rows, capsys):
    run_prepare(list(rows.sources), tmp_path / "my out", {"tokenizer": "bytes", "validation": 0.2})
    said = capsys.readouterr().out
    assert "validation: " in said
    assert f"--set 'data.corpus={tmp_path / 'my out'}' --set 'data.mixture={{\"text\": 1}}' --out RUN" in said


def test_progress_counts_the_bytes_of_the_input(tmp_path, rows):
    seen = []
    prepare(rows, tmp_path / "out", progress=lambda read, total: seen.append((read, total)))
    size = sum(path.stat().st_size for path in (tmp_path / "in").iterdir())
    assert seen[-1] == (size, size)
    assert [read for read, _ in seen] == sorted(read for read, _ in seen)


class Killed(BaseException):
    pass


def test_after_a_stop_at_any_moment_resuming_gives_the_same_bytes(tmp_path, rows, monkeypatch):
    """Files appear by rename. The process stops before the first rename, before the second, and so on."""
    prepare(rows, tmp_path / "whole")
    whole, replace, moment = content(tmp_path / "whole"), os.replace, 0
    while True:
        out, count, ranks = tmp_path / f"out{moment}", [0], []

        def stopping(source, target, count=count, moment=moment):
            count[0] += 1
            if count[0] > moment:
                raise Killed
            replace(source, target)

        monkeypatch.setattr(os, "replace", stopping)
        monkeypatch.setattr(durable, "remove", lambda partial: None)  # a killed process removes nothing
        try:
            prepare(rows, out)
            break
        except Killed:
            monkeypatch.setattr(os, "replace", replace)
        finished = len([*out.glob("shards/*.json")])
        write = prepare_module.write_task
        with monkeypatch.context() as patch:
            patch.setattr(prepare_module, "write_task", lambda *a, r=ranks, write=write: r.append(a[2]) or write(*a))
            prepare(rows, out, resume=True)
        assert content(out) == whole, moment
        assert len(ranks) == 4 - finished
        moment += 1
    assert moment > 4 * 3


def test_a_truncated_or_missing_shard_is_named_and_repaired(tmp_path, rows):
    out = tmp_path / "out"
    prepare(rows, out)
    whole, path = content(out), out / "shards" / "train-00001.tokens"
    for damage in (lambda: os.truncate(path, 10), path.unlink):
        damage()
        for read in (lambda: Shards(out, "train"), lambda: load_corpus(out)):
            with pytest.raises(UserError, match=r"train-00001.tokens .*Repair the folder with `diff-tr"):
                read()
        assert len(verify(out)) == 1
        run_prepare([], out, {}, resume=True)
        assert content(out) == whole


def test_a_changed_byte_is_found_and_repaired(tmp_path, rows):
    out = tmp_path / "out"
    prepare(rows, out)
    whole, path = content(out), out / "shards" / "train-00002.tokens"
    data = bytearray(path.read_bytes())
    data[6] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"is damaged:\n.*train-00002.tokens has another checksum.*\nRepair it with"):
        run_verify(out)
    prepare(rows, out, resume=True)
    assert content(out) == whole
    other = byte_tokenizer()
    other.add_tokens(["more"])
    other.save_pretrained(out / "tokenizer")
    for command in (lambda: run_verify(out), lambda: prepare(rows, out, resume=True)):
        with pytest.raises(UserError, match=r"tokenizer has hash \w+, the shards were .*; restore it from a copy"):
            command()


def test_resuming_with_other_settings_or_files_is_refused(tmp_path, rows):
    out = tmp_path / "out"
    prepare(rows, out)
    for change, message in [
        ({"validation": 0.3}, r"settings\.validation: 0\.2 against 0\.3"),
        ({"tokenizer": "bpe"}, r"settings\.tokenizer: 'bytes' against 'bpe'"),
    ]:
        with pytest.raises(UserError, match=rf"with other settings or files \(there against here\):\n  {message}"):
            prepare(dataclasses.replace(rows, **change), out, resume=True)
    (tmp_path / "in" / "new.jsonl").write_text('{"text": "new"}\n')
    with pytest.raises(UserError, match=r"tasks: 4 against 5\n  file .*new\.jsonl: None against .*\ngive") as raised:
        prepare(rows, out, resume=True)
    assert "0.jsonl" not in str(raised.value)


def test_rows_without_text_may_be_skipped_after_all(tmp_path, rows):
    (tmp_path / "in" / "9.jsonl").write_text('{"body": "x"}\n')
    with pytest.raises(UserError, match="row 1 has no text"):
        prepare(rows, tmp_path / "out")
    run_prepare([], tmp_path / "out", {"skip_invalid": True}, resume=True)
    assert totals(tmp_path / "out")["left_out"]["invalid"] == 1


def test_nothing_is_written_over(tmp_path, rows):
    prepare(rows, tmp_path / "out")
    before = content(tmp_path / "out")
    with pytest.raises(UserError, match=r"holds a preparation; continue or repair it \(--resume\), or choose ano"):
        prepare(rows, tmp_path / "out")
    assert content(tmp_path / "out") == before
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "thesis.txt").write_text("years of work")
    for resume in (False, True):
        with pytest.raises(UserError, match="own holds something else; choose another folder"):
            prepare(rows, tmp_path / "own", resume=resume)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file is a file; choose another --out"):
        prepare(rows, tmp_path / "file" / "out")


def test_bad_settings_and_text_are_one_sentence(tmp_path, rows):
    for change, message in [
        ({"validation": 1.0}, "validation is 1.0; input should be less than 1"),
        ({"vocab_size": 0}, "vocab_size is 0; input should be greater than 0"),
        ({"tasks": 9}, "tasks is 9, and the sources have 4 files, which are not divided; give fewer"),
        ({"tokenizer": "/nowhere"}, "no tokenizer at '/nowhere'"),
        ({"field": "body"}, "row 1 has no text in 'body': {'text': 'row 0 0: .*another field"),
    ]:
        with pytest.raises(UserError, match=message):
            run_prepare(list(rows.sources), tmp_path / f"out-{len(message)}", {"tokenizer": "bytes", **change})
    with pytest.raises(UserError, match=r"no source of text; give at least one, or the --out of a preparation"):
        run_prepare([], tmp_path / "none", {}, resume=True)
    with pytest.raises(UserError, match=r"the validation side has no document .*; give more text, a larger --validat"):
        run_prepare(list(rows.sources), tmp_path / "one", {"tokenizer": "bytes", "validation": 1e-9})


def test_a_folder_that_is_not_complete_is_refused(tmp_path, rows):
    prepare(rows, tmp_path / "out")
    (tmp_path / "out" / "shards" / "00001.json").unlink()
    with pytest.raises(UserError, match=r"out is not complete; continue with `diff-transformer prepare --out .*out"):
        Shards(tmp_path / "out", "train")
    assert verify(tmp_path / "out") == ["task 1 has not finished"]
    with pytest.raises(UserError, match=r"is not a folder of `diff-transformer prepare`: it has no plan\.json or"):
        read_plan(tmp_path)
