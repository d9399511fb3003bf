import gzip
import io
import json
import os
import shutil
import sys
import tarfile
import types
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from diff_transformer.data import python_library
from diff_transformer.data.corpus import load_corpus
from diff_transformer.data.documents import Corpus, Document, hash_of_name
from diff_transformer.data.prepare import pieces as pieces_module
from diff_transformer.data.prepare.pieces import cut
from diff_transformer.data.prepare.readers import Tally, read_pieces
from diff_transformer.data.prepare.sources import find_sources


def read(*names, field="text", share=0.2, **options):
    """(text, side) of every document."""
    documents = []
    for piece in read_pieces(find_sources([str(n) for n in names], share), field=field, share=share, **options):
        if piece.first:
            documents.append(["", piece.split])
        documents[-1][0] += piece.text
    return [tuple(document) for document in documents]


def texts(*names, **options):
    return [text for text, _ in read(*names, **options)]


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


ROWS = [{"text": f"row {i} café\n", "id": i} for i in range(30)]


@pytest.mark.parametrize(
    ("name", "pack"),
    [
        ("rows.jsonl", bytes),
        ("rows.jsonl.gz", gzip.compress),
        ("rows.jsonl.zst", lambda data: zstandard.compress(data[:100]) + zstandard.compress(data[100:])),
    ],
)
def test_json_lines_plain_and_compressed(tmp_path, name, pack):
    (tmp_path / name).write_bytes(pack(lines(ROWS)))
    assert texts(tmp_path / name) == [row["text"] for row in ROWS]


def test_parquet_reads_one_column(tmp_path):
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"body": [r["text"] for r in ROWS], "id": [r["id"] for r in ROWS]}), path, row_group_size=7)
    assert texts(path, field="body") == [row["text"] for row in ROWS]
    with pytest.raises(ValueError, match="no column 'text' but 'body', 'id'; give --field"):
        texts(path)


def test_rows_of_a_set_on_the_hub_are_streamed(monkeypatch):
    asked = {}

    def load_dataset(*arguments, **options):
        asked["arguments"], asked["options"] = arguments, options
        return iter(ROWS)

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert texts("hub:owner/name?config=en&split=all") == [row["text"] for row in ROWS]
    assert asked["arguments"] == ("owner/name", "en")
    assert asked["options"] == {"split": "all", "revision": None, "streaming": True}
    with pytest.raises(ValueError, match="unheard; accepted: config, split, revision"):
        texts("hub:owner/name?unheard=1")


def test_a_set_that_cannot_be_streamed_says_how_far_it_came(monkeypatch):
    def load_dataset(*arguments, **options):
        yield from ROWS[:3]
        raise ConnectionError("no route")

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(ValueError, match=r"hub:a/b cannot be streamed after row 3.*no route.*--resume"):
        texts("hub:a/b")


def test_several_sources_follow_one_another_and_a_folder_may_hold_all_kinds(tmp_path):
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.txt").write_text("plain a")
    (folder / "b.jsonl").write_bytes(lines(ROWS[:2]))
    (folder / "sub" / "c.md").write_bytes(b"\xef\xbb\xbfplain c\r\nline")
    (folder / "picture.png").write_bytes(b"\x89PNG")
    (folder / ".hidden.txt").write_text("hidden")
    (tmp_path / "d.jsonl").write_bytes(lines(ROWS[2:4]))
    found = texts(folder, tmp_path / "d.jsonl")
    assert found == ["plain a", *(row["text"] for row in ROWS[:2]), "plain c\nline", *(r["text"] for r in ROWS[2:4])]


@pytest.mark.parametrize("suffix", [".tar", ".tar.gz", ".tar.xz"])
def test_archives_read_like_the_folders_they_hold(tmp_path, suffix):
    files = {"train/a.txt": "in a", "val/b.txt": "in b", "train/c.txt": "in c", "x.txt": "x"}
    files = {f"novels/{name}": text for name, text in files.items()}
    mode: Any = f"w:{suffix[5:]}"
    with tarfile.open(tmp_path / f"n{suffix}", mode) as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
            path = tmp_path / "folder" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    expected = [("in a", "train"), ("in b", "validation"), ("in c", "train")]
    assert sorted(read(tmp_path / f"n{suffix}")) == expected
    assert sorted(read(tmp_path / "folder")) == expected


def test_of_a_member_that_was_added_again_the_last_counts(tmp_path):
    with tarfile.open(tmp_path / "updated.tar", "w") as archive:
        for name, text in (("a.txt", "old a"), ("b.txt", "b"), ("a.txt", "new a")):
            member = tarfile.TarInfo(name)
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    assert sorted(texts(tmp_path / "updated.tar")) == ["b", "new a"]
    corpus = load_corpus(tmp_path / "updated.tar")
    assert sorted(document.text for document in corpus.train + corpus.validation) == ["b", "new a"]


def test_the_python_library_keeps_its_own_split(monkeypatch):
    corpus = Corpus("python", [Document("a", "in a"), Document("b", "in b")], [Document("c", "in c")], "")
    monkeypatch.setattr(python_library, "load_python_library", lambda: corpus)
    assert read("python") == [("in a", "train"), ("in b", "train"), ("in c", "validation")]


def test_rows_are_held_out_by_a_hash_of_their_text(tmp_path):
    rows = [{"text": f"text {i % 150}"} for i in range(300)]
    (tmp_path / "rows.jsonl").write_bytes(lines(rows))
    found = read(tmp_path / "rows.jsonl", share=0.2)
    assert all((side == "validation") == (hash_of_name(text) < 0.2) for text, side in found)
    assert 30 < sum(side == "validation" for _, side in found) < 90
    assert found[:150] == found[150:]


@pytest.mark.parametrize("share", [1e-6, 1 - 1e-6])
def test_a_few_rows_leave_no_side_empty(tmp_path, share):
    (tmp_path / "rows.jsonl").write_bytes(lines(ROWS[:3]))
    assert {side for _, side in read(tmp_path / "rows.jsonl", share=share)} == {"train", "validation"}


def test_files_are_held_out_by_name_and_at_least_one(tmp_path):
    for i in range(40):
        (tmp_path / f"{i}.txt").write_text(f"file {i}")
    sides = dict(read(tmp_path, share=0.3))
    assert all((sides[f"file {i}"] == "validation") == (hash_of_name(f"{i}.txt") < 0.3) for i in range(40))
    assert sum(side == "validation" for side in dict(read(tmp_path, share=1e-9)).values()) == 1


def test_texts_given_one_by_one_are_divided_together(tmp_path):
    paths = [tmp_path / ("even" if i % 2 == 0 else "odd") / f"{i // 2}.txt" for i in range(40)]
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        path.write_text("/".join(path.parts[-2:]))
    sides = dict(read(*paths, share=0.3))
    assert len(sides) == 40
    assert all((side == "validation") == (hash_of_name(name) < 0.3) for name, side in sides.items())
    assert read(*paths, share=0.3) == read(*paths, share=0.3)
    assert sorted(dict(read(*paths[:2], share=1e-9)).values()) == ["train", "validation"]
    (tmp_path / "even" / "0.txt").write_text("")  # an empty file is no side
    assert {side for _, side in read(*paths[:6:2], share=1 - 1e-9)} == {"train", "validation"}


def test_what_has_a_held_out_side_is_divided_as_ever(tmp_path):
    """Each source alone; a text file among others belongs to the training side."""
    (tmp_path / "folder").mkdir()
    for i in range(3):
        (tmp_path / "folder" / f"{i}.txt").write_text(f"file {i}")
        (tmp_path / f"{i}.txt").write_text(f"alone {i}")
    (tmp_path / "rows.jsonl").write_bytes(lines(ROWS))
    alone = [tmp_path / f"{i}.txt" for i in range(3)]
    for more in (tmp_path / "folder", tmp_path / "rows.jsonl"):
        mixed = read(*alone, more)
        assert all(side == "train" for text, side in mixed if text.startswith("alone"))
        assert [pair for pair in mixed if not pair[0].startswith("alone")] == read(more)


def test_too_few_texts_for_two_sides_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("some text")
    (tmp_path / "b.txt").write_text("")
    with pytest.raises(ValueError, match=r"1 of 2 text files hold text, too few .*; give two different ones or more"):
        find_sources([str(tmp_path / "a.txt"), str(tmp_path / "b.txt")], 0.1)
    with pytest.raises(ValueError, match="2 of 2 text files hold text, too few"):
        find_sources([str(tmp_path / "a.txt")] * 2, 0.1)
    for side, text in (("train", "text"), ("val", "")):
        (tmp_path / "split" / side).mkdir(parents=True)
        (tmp_path / "split" / side / "c.txt").write_text(text)
    with pytest.raises(ValueError, match="no file of the validation side holds text; put text into folders train/"):
        find_sources([str(tmp_path / "split")], 0.1)


def test_a_single_text_keeps_its_end_for_validation_cut_at_a_line_end(tmp_path):
    text = "".join(f"line {i:03d}\n" for i in range(101))
    (tmp_path / "play.txt").write_text(text)
    (train, first), (validation, second) = read(tmp_path / "play.txt", share=0.25)
    assert (first, second) == ("train", "validation")
    assert train + validation == text
    assert train.endswith("\n")
    assert len(train) == 675  # the last line end before byte 681 of 909: 75 lines of 9 bytes
    (tmp_path / "dos.txt").write_bytes(text.replace("\n", "\r\n").encode())
    assert read(tmp_path / "dos.txt", share=0.25) == [(train, first), (validation, second)]
    (tmp_path / "line.txt").write_text("x" * 100)
    assert [len(text) for text in texts(tmp_path / "line.txt", share=0.25)] == [75, 25]


def test_the_pieces_of_a_long_document_are_a_function_of_its_text(monkeypatch):
    text = "one two  three\nfour, five " * 20
    whole = list(cut([text], 50))
    assert "".join(piece for piece, _, _ in whole) == text
    assert [first for _, first, _ in whole] == [True] + [False] * (len(whole) - 1)
    assert [last for _, _, last in whole] == [False] * (len(whole) - 1) + [True]
    assert all(len(piece) <= 50 for piece, _, _ in whole)
    assert all(a[-1].isalpha() and b[0] in " \n" for (a, _, _), (b, _, _) in pairwise(whole))
    assert list(cut([text[i : i + 7] for i in range(0, len(text), 7)], 50)) == whole
    assert [len(piece) for piece, _, _ in cut(["x" * 120], 50)] == [50, 50, 20]
    assert list(cut([" \n", " "], 50)) == []


def test_a_long_file_is_read_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(pieces_module, "PIECE_CHARACTERS", 100)
    monkeypatch.setattr(pieces_module, "_READ_BYTES", 7)
    text = "naïve café “quoted”\r\n" * 40
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_bytes(text.encode())
    sources = find_sources([str(tmp_path)], 0.5)
    found = list(read_pieces(sources, field="text", share=0.5))
    assert len(found) > 8
    assert "".join(piece.text for piece in found) == text.replace("\r\n", "\n") * 2
    assert sum(piece.read for piece in found) >= 0.9 * sources[0].size


def test_blank_documents_are_left_out_and_counted(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(lines([{"text": " \n"}, {"text": "word"}, {"text": ""}, {"text": "more"}]))
    tally = Tally()
    assert texts(tmp_path / "rows.jsonl", tally=tally) == ["word", "more"]
    assert (tally.blank, tally.train + tally.validation) == (2, 2)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "cut off', "line 2 is not JSON"),
        (b'{"body": "x", "id": 1}', "line 2 has no field 'text' but 'body', 'id'; give --field"),
        (b'{"text": 7}', "'text' holds a int, not a text"),
        (b'["text"]', "line 2 holds a list, not an object"),
        (b'{"text": "\xff"}', "line 2 is not JSON in UTF-8"),
        (b'{"text": ' + b"[" * 100_000, "line 2 is not JSON in UTF-8"),
        (rb'{"text": "\ud800"}', "half of a surrogate pair"),
    ],
)
def test_a_row_without_text_stops_or_is_counted(tmp_path, line, message):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(lines(ROWS[:1]) + line + b"\n\n" + lines(ROWS[1:2]))
    with pytest.raises(ValueError, match=message):
        texts(path)
    tally = Tally()
    assert texts(path, skip_invalid=True, tally=tally) == [ROWS[0]["text"], ROWS[1]["text"]]
    assert tally.invalid == 1


def test_errors_name_what_is_wrong(tmp_path):
    pipes = tmp_path / "pipes"
    pipes.mkdir()
    os.mkfifo(pipes / "pipe.txt")
    for pipe in (pipes / "pipe.txt", pipes, "/dev/zero"):
        with pytest.raises(ValueError, match=r"(pipe.txt|/dev/zero) is a pipe, a socket or a device"):
            find_sources([str(pipe)], 0.1)
    shutil.rmtree(pipes)
    with pytest.raises(FileNotFoundError, match=r"nowhere' does not exist; give 'python', a text file"):
        texts(tmp_path / "nowhere")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    for path in (tmp_path / "picture.png", tmp_path):
        with pytest.raises(ValueError, match="holds nothing that is read; give 'python', a text file"):
            texts(path)
    (tmp_path / "latin.txt").write_bytes(b"a caf" + b"\xe9 in Latin-1")
    with pytest.raises(ValueError, match=r"latin.txt is not UTF-8 \(byte 5: 0xe9\); convert it"):
        texts(tmp_path / "latin.txt")
    (tmp_path / "broken.jsonl.gz").write_bytes(gzip.compress(lines(ROWS) * 100)[:-40])
    with pytest.raises(ValueError, match=r"broken.jsonl.gz cannot be unpacked after line"):
        texts(tmp_path / "broken.jsonl.gz")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"broken.parquet cannot be read as parquet"):
        texts(tmp_path / "broken.parquet")
    (tmp_path / "broken.tar.xz").write_bytes(b"no archive")
    with pytest.raises(ValueError, match=r"broken.tar.xz cannot be read as a tar archive"):
        texts(tmp_path / "broken.tar.xz")
