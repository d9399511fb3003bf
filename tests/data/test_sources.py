"""What the texts of files, folders and data sets are, and on which side of the split they are."""

import bz2
import gzip
import json
import lzma
import os
from types import SimpleNamespace

import pytest
import zstandard

from diff_transformer.data import load_corpus, python_library
from diff_transformer.data.documents import Corpus, Document, hash_of_name
from diff_transformer.data.sources import Reader, find_sources
from diff_transformer.errors import UserError

TEXTS = ["one é", "two\nlines", "three", "four 日本"]


def write(root, files):
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


def lines_of(texts):
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


def read(*names, share=0.1, field="text", skip_invalid=False, part=(0, 1)):
    """(split, text) of all sources, and the counts of what was left out."""
    reader = Reader(field, share, skip_invalid, part)
    texts = [pair for source in find_sources([str(name) for name in names], share) for pair in reader.texts(source)]
    return texts, dict(reader.left_out)


@pytest.mark.parametrize(
    ("name", "pack"),
    [
        ("a.jsonl", bytes),
        ("a.ndjson", bytes),
        ("a.jsonl.gz", gzip.compress),
        ("a.jsonl.bz2", bz2.compress),
        ("a.jsonl.xz", lzma.compress),
        ("a.jsonl.zst", lambda data: zstandard.ZstdCompressor().compress(data)),
    ],
)
def test_json_lines_plain_and_compressed(tmp_path, name, pack):
    write(tmp_path, {name: pack((lines_of(TEXTS) + "\n  \n").encode())})
    assert [text for _, text in read(tmp_path / name)[0]] == TEXTS


def test_parquet_reads_one_column(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pyarrow.table({"id": list(range(4)), "body": TEXTS, "text": ["x"] * 4})
    parquet.write_table(table, tmp_path / "a.parquet")
    assert [text for _, text in read(tmp_path / "a.parquet", field="body")[0]] == TEXTS
    with pytest.raises(ValueError, match=r"a.parquet, row 1 has no field 'words' but 'id', 'body', 'text'; give --fie"):
        read(tmp_path / "a.parquet", field="words")


def test_rows_of_a_set_on_the_hub_are_streamed_and_shared(monkeypatch):
    def load(name, config, *, split, revision, streaming):
        assert (name, config, split, revision, streaming) == ("acme/set", "en", "test", "v1", True)
        return iter([{"text": text} for text in TEXTS])

    monkeypatch.setitem(__import__("sys").modules, "datasets", SimpleNamespace(load_dataset=load))
    name = "hub:acme/set?config=en&split=test&revision=v1"
    assert [text for _, text in read(name)[0]] == TEXTS
    parts = [[text for _, text in read(name, part=(part, 3))[0]] for part in range(3)]
    assert parts == [[TEXTS[0], TEXTS[3]], [TEXTS[1]], [TEXTS[2]]]
    with pytest.raises(ValueError, match=r"source 'hub:acme/set.speed=2': speed; accepted: config, split, revision"):
        read("hub:acme/set?speed=2")


def test_a_set_that_cannot_be_streamed_says_how_far_it_came(monkeypatch):
    def load(*_, **__):
        yield {"text": "first"}
        yield {"text": "second"}
        raise ConnectionError("no route")

    monkeypatch.setitem(__import__("sys").modules, "datasets", SimpleNamespace(load_dataset=load))
    with pytest.raises(ValueError, match=r"hub:a/b cannot be streamed after row 1 \(ConnectionError: no route\); conn"):
        read("hub:a/b")


def test_rows_are_held_out_by_a_hash_of_their_text(tmp_path):
    texts = [f"row {i}" for i in range(300)]
    write(tmp_path, {"a.jsonl": lines_of(texts), "b.jsonl": lines_of(texts[::-1])})
    found, _ = read(tmp_path, share=0.2)
    assert {text for split, text in found if split == "validation"} == {t for t in texts if hash_of_name(t) < 0.2}
    assert len(found) == 600


def test_files_are_held_out_by_name_and_at_least_one(tmp_path):
    write(tmp_path, {f"{i}.txt": f"text {i}" for i in range(4)})
    splits = [split for split, _ in read(tmp_path, share=0.001)[0]]
    assert splits.count("validation") == 1
    other = write(tmp_path / "again", {f"{i}.md": f"text {i}" for i in range(40)})
    assert 2 < [split for split, _ in read(other, share=0.2)[0]].count("validation") < 16


def test_folders_train_and_val_are_the_split(tmp_path):
    write(
        tmp_path,
        {"in/train/a.txt": "a", "in/valid/b.txt": "b", "in/c.txt": "not read", "in/train/d.jsonl": '{"text": "d"}'},
    )
    assert read(tmp_path)[0] == [("train", "a"), ("train", "d"), ("validation", "b")]


def test_a_single_text_keeps_its_end_for_validation_cut_at_a_line_end(tmp_path):
    lines = [f"line {i} of a play\n" for i in range(100)]
    write(tmp_path, {"play.txt": "".join(lines)})
    (first, train), (second, held_out) = read(tmp_path, share=0.1)[0]
    assert (first, second) == ("train", "validation")
    assert train + held_out == "".join(lines)
    assert train.endswith("\n")
    assert 0.08 < len(held_out) / len(train + held_out) < 0.12


def test_the_python_library_keeps_its_own_split(monkeypatch):
    corpus = Corpus("python", [Document("a", "prose")], [Document("b", "held out")], "")
    monkeypatch.setattr(python_library, "load_python_library", lambda: corpus)
    assert read("python")[0] == [("train", "prose"), ("validation", "held out")]


def test_text_is_as_a_corpus_in_memory_reads_it(tmp_path):
    write(tmp_path, {"train/a.txt": b"\xef\xbb\xbfone\r\ntwo", "val/b.txt": "three", "val/.hidden.txt": "no"})
    corpus = load_corpus(tmp_path)
    texts = [("train", d.text) for d in corpus.train] + [("validation", d.text) for d in corpus.validation]
    assert read(tmp_path)[0] == texts == [("train", "one\ntwo"), ("validation", "three")]


def test_blank_texts_and_invalid_rows_are_counted(tmp_path):
    rows = '{"text": " "}\n{"text": null}\nnot JSON\n{"text": "good"}\n{"text": "\\ud800"}\n[]\n'
    write(tmp_path, {"a.jsonl": rows})
    found, left_out = read(tmp_path / "a.jsonl", skip_invalid=True)
    assert [text for _, text in found] == ["good"]
    assert left_out == {"blank": 1, "invalid": 4}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("not JSON", r"row 2 is not JSON in UTF-8 \("),
        ("[1]", "row 2 holds a list, not an object"),
        ('{"body": "x"}', "row 2 has no field 'text' but 'body'; give --field"),
        ('{"text": 3}', "row 2 has a int in 'text', not a text; give --field"),
        ('{"text": "\\ud800"}', "row 2 holds half of a surrogate pair"),
    ],
)
def test_a_row_without_text_stops_and_is_named(tmp_path, line, message):
    write(tmp_path, {"a.jsonl": '{"text": "good"}\n' + line + "\n"})
    with pytest.raises(ValueError, match=rf"a\.jsonl, {message}.*; or leave such rows out \(--skip-invalid\)"):
        read(tmp_path / "a.jsonl")


def test_errors_name_what_is_wrong(tmp_path):
    write(tmp_path, {
        "latin.txt": b"caf\xe9", "x/image.png": b"", "cut.jsonl.gz": gzip.compress(lines_of(TEXTS * 99).encode())[:99],
        "a.tar.gz": b"", "a.parquet": b"nothing",
    })  # fmt: skip
    os.mkfifo(tmp_path / "pipe.txt")
    for name, error, message in [
        ("latin.txt", ValueError, r"latin\.txt is not UTF-8 \(byte 3: 0xe9\); convert it with `iconv"),
        ("none", UserError, "none' does not exist; give 'python', a text file"),
        ("x", ValueError, "x' holds nothing that is read; give"),
        ("cut.jsonl.gz", ValueError, r"cut\.jsonl\.gz cannot be unpacked after line \d+ \("),
        ("a.tar.gz", ValueError, r"a\.tar\.gz' is an archive; unpack it \(tar xf .*a\.tar\.gz\) and give the folder"),
        ("a.parquet", ValueError, r"a\.parquet cannot be read as parquet after row 0"),
        ("pipe.txt", ValueError, "is a pipe, a socket or a device"),
    ]:
        with pytest.raises(error, match=message):
            read(tmp_path / name)
    with pytest.raises(ValueError, match="no source of text; give 'python'"):
        read()
