"""Texts of files, folders and data sets, their side of the split, and corpora in memory."""

import gzip
import itertools
import json
import os

import pytest
import zstandard

from diff_transformer.data import python_library
from diff_transformer.data.corpus import load_corpus
from diff_transformer.data.documents import Document, hash_of_name, take_bytes
from diff_transformer.data.sources import Reader, find_sources
from diff_transformer.errors import UserError

TEXTS = ["one é", "two\nlines", "three", "four 日本"]
PACKERS = {"": bytes, ".gz": gzip.compress}
PACKERS[".zst"] = lambda data: b"".join(zstandard.ZstdCompressor().compress(part) for part in (data[:9], data[9:]))


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


def names_of(documents):
    return sorted(document.name for document in documents)


@pytest.mark.parametrize("packed", PACKERS)
def test_lines_and_texts_plain_and_compressed(tmp_path, packed):
    write(tmp_path, {f"a.jsonl{packed}": PACKERS[packed]((lines_of(TEXTS) + "\n  \n").encode())})
    assert [text for _, text in read(tmp_path / f"a.jsonl{packed}")[0]] == TEXTS
    text = PACKERS[packed](b"\xef\xbb\xbfone\r\ntwo\r\nthree\n")
    write(tmp_path, {f"t/a.txt{packed}": text, f"notes{packed}": text, "t/plan.json": "not one of prepare"})
    for name in ("t", f"notes{packed}"):
        assert "".join(text for _, text in read(tmp_path / name)[0]) == "one\ntwo\nthree\n"
    assert load_corpus(tmp_path / "t").train[0].text == "one\ntwo\n"


def test_parquet_reads_one_column(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pyarrow.table({"id": list(range(4)), "body": TEXTS, "text": ["x"] * 4})
    parquet.write_table(table, tmp_path / "a.parquet")
    assert [text for _, text in read(tmp_path / "a.parquet", field="body")[0]] == TEXTS
    with pytest.raises(UserError, match=r"a.parquet, row 1 has no text in 'words': {'id': 0, .*; `diff"):
        read(tmp_path / "a.parquet", field="words")


def test_rows_of_a_set_on_the_hub_are_streamed_and_shared(monkeypatch):
    datasets = pytest.importorskip("datasets")

    def load(name, config, *, split, revision, streaming):
        assert (name, config, split, revision, streaming) == ("acme/set", "en", "test", "v1", True)
        return datasets.Dataset.from_dict({"text": TEXTS}).to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load)
    name = "hub:acme/set?config=en&split=test&revision=v1"
    assert [text for _, text in read(name)[0]] == TEXTS
    parts = [[text for _, text in read(name, part=(part, 3))[0]] for part in range(3)]
    assert sorted(text for part in parts for text in part) == sorted(TEXTS)
    with pytest.raises(UserError, match=r"source 'hub:acme/set.speed=2': speed; accepted: config, split, revision"):
        read("hub:acme/set?speed=2")
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: 1 / 0)
    with pytest.raises(UserError, match=r"hub:a/b cannot be read after row 0 \(ZeroDivisionError"):
        read("hub:a/b")


def test_a_set_on_the_hub_is_read_as_far_as_it_is_used(monkeypatch):
    datasets = pytest.importorskip("datasets")
    rows = datasets.IterableDataset.from_generator(lambda: ({"text": f"row {i} " * 9} for i in itertools.count()))
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: rows)
    assert sum(document.num_bytes for document in load_corpus("hub:acme/set", max_bytes=2000).train) == 2000


def test_rows_are_held_out_by_a_hash_of_their_text(tmp_path):
    texts = [f"row {i}" for i in range(300)]
    write(tmp_path, {"a.jsonl": lines_of(texts), "b.jsonl": lines_of(texts[::-1])})
    pairs, _ = read(tmp_path, share=0.2)
    assert {text for split, text in pairs if split == "validation"} == {t for t in texts if hash_of_name(t) < 0.2}
    assert len(pairs) == 600
    corpus = load_corpus(tmp_path)
    assert len(corpus.train) + len(corpus.validation) == 600
    assert corpus == load_corpus(tmp_path)


def test_files_are_held_out_by_name_and_stay_put_when_others_come(tmp_path):
    write(tmp_path / "few", {f"{i}.txt": f"text {i}" for i in range(4)})
    assert [split for split, _ in read(tmp_path / "few", share=0.001)[0]].count("validation") == 1
    files, root = {f"sub{n % 3}/{n}.zip.md": f"text {n}" for n in range(60)}, tmp_path / "unpacked.zip"
    first = load_corpus(write(root, files | {".git/x.txt": "hidden", "picture.png": b"\x89PNG"}))
    assert names_of(first.train + first.validation) == sorted(files)
    assert 1 <= len(first.validation) <= 15
    second = load_corpus(write(root, {f"more/{n}.md": "new" for n in range(20)}))
    assert set(names_of(first.validation)) <= set(names_of(second.validation))
    assert [d.name for d in second.train] == [d.name for d in load_corpus(root).train] != names_of(second.train)


@pytest.mark.parametrize("side", ["val", "valid", "validation"])
def test_folders_train_and_val_are_the_split(tmp_path, side):
    """The held-out side is a link to a folder; a link to the folder itself is not followed."""
    files = {"in/train/a.txt": "a", "in/c.txt": "not read", "in/train/d.jsonl": lines_of("d")}
    write(tmp_path, {"held/b.txt": "b"} | {f"all/{name}": text for name, text in files.items()})
    (tmp_path / "all" / "in" / side).symlink_to(tmp_path / "held")
    (tmp_path / "all" / "in" / "train" / "loop").symlink_to(tmp_path / "all")
    assert read(tmp_path / "all")[0] == [("train", "a"), ("train", "d"), ("validation", "b")]
    corpus = load_corpus(tmp_path / "all")
    assert names_of(corpus.train) == ["train/a.txt", "train/d.jsonl[0]"]
    assert names_of(corpus.validation) == [f"{side}/b.txt"]


def test_a_single_text_keeps_its_end_for_validation_cut_at_a_line_end(tmp_path, monkeypatch):
    lines = "".join(f"line {i} of a play\n" for i in range(100))
    write(tmp_path, {"play.txt": lines, "folder/only.md": lines, "folder/empty.md": "", "line.txt": "abcdefghij" * 10})
    for path in ("play.txt", "folder"):
        (first, train), (second, held_out) = read(tmp_path / path, share=0.1)[0]
        assert (first, second, train + held_out) == ("train", "validation", lines)
        assert train.endswith("\n")
        assert 0.08 < len(held_out) / len(lines) < 0.12
    monkeypatch.setenv("HOME", str(tmp_path))
    corpus = load_corpus("~/line.txt")
    assert (len(corpus.train[0].text), len(corpus.validation[0].text)) == (90, 10)
    write(tmp_path, {"title.txt": "Title\n\n" + "abcdefghij" * 1000})
    for max_bytes, sizes in ((None, (9006, 1001)), (1000, (1000, 111))):
        corpus = load_corpus(tmp_path / "title.txt", max_bytes=max_bytes)
        assert (len(corpus.train[0].text), len(corpus.validation[0].text)) == sizes


def test_blank_texts_and_invalid_rows_are_counted(tmp_path):
    rows = '{"text": " "}\n{"text": null}\nnot JSON\n{"text": "good"}\n{"text": "\\ud800"}\n[]\n{"text": "caf\xe9"}\n'
    write(tmp_path, {"a.jsonl": rows.encode("latin-1")})
    pairs, left_out = read(tmp_path / "a.jsonl", skip_invalid=True)
    assert [text for _, text in pairs] == ["good"]
    assert left_out == {"blank": 1, "invalid": 5}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("not JSON", r"JSONDecodeError\('Expecting value"),
        ("[1]", r"\[1\]"),
        ('{"body": "x"}', "{'body': 'x'}"),
        ('{"text": 3}', "{'text': 3}"),
        ('{"text": "\\ud800"}', r"{'text': '\\ud800'}"),
    ],
)
def test_a_row_without_text_stops_and_is_named(tmp_path, line, message):
    write(tmp_path, {"a.jsonl": '{"text": "good"}\n' + line + "\n"})
    ending = r".*; `diff-transformer prepare` takes another field \(--field\) or skips such rows \(--skip-invalid\)"
    with pytest.raises(UserError, match=rf"a\.jsonl, row 2 has no text in 'text': {message}{ending}"):
        read(tmp_path / "a.jsonl")


def test_errors_name_what_is_wrong(tmp_path):
    cut = gzip.compress(lines_of(TEXTS * 99).encode())[:99]
    write(tmp_path, {
        "latin.txt": b"caf\xe9", "x/image.png": b"", "cut.jsonl.gz": cut, "cut.txt.gz": cut, "a.tar.gz": b"",
        "a.parquet": b"nothing",
    })  # fmt: skip
    os.mkfifo(tmp_path / "pipe.txt")
    for name, message in [
        ("latin.txt", r"latin\.txt is not UTF-8 \(byte 3: 0xe9\); convert it with `iconv"),
        ("none", "none' is no file or folder; give 'python', a text file"),
        ("https://example.org/a.txt", "is a URL: download it, and give the file"),
        ("x", "x' has no file that can be read; give"),
        ("cut.jsonl.gz", r"cut\.jsonl\.gz cannot be read after row \d+ \("),
        ("cut.txt.gz", r"cut\.txt\.gz cannot be read \("),
        ("a.tar.gz", r"a\.tar\.gz' is an archive; unpack it and give the folder"),
        ("a.parquet", r"a\.parquet cannot be read after row 0"),
        ("pipe.txt", r"pipe\.txt' has no file that can be read"),
    ]:
        with pytest.raises(UserError, match=message):
            read(tmp_path / name if "://" not in name else name)
    with pytest.raises(UserError, match="no source of text; give 'python'"):
        read()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"train/a.txt": "text", "val/b.txt": "  \n"}, "the validation side of corpus .* has no text but white space"),
        ({"train/a.txt": "", "val/b.txt": "text"}, "the train side of corpus"),
        ({"a.txt": "\n", "b.txt": ""}, "the train side of corpus"),
        ({"a.txt": "x"}, "the validation side of corpus"),
        (
            {"a.jsonl": '{"text": "x"}'},
            "held out with probability 0.1, by a hash of its text, and of 1 rows none is",
        ),
        ({"a.txt": "text" + "\n" * 40}, "the validation side of corpus"),
    ],
)
def test_a_side_without_text_is_named(tmp_path, files, message):
    with pytest.raises(UserError, match=message):
        load_corpus(write(tmp_path, files))


def test_a_cap_takes_whole_documents_and_cuts_the_last_at_a_line_end(tmp_path):
    files = {f"train/{n}.txt": f"{n:03d} is the line\n" * 10 for n in range(20)}
    files |= {f"val/{n}.txt": f"{n:03d} is the line\n" * 10 for n in range(10)}
    root = write(tmp_path, files)
    whole, capped = load_corpus(root), load_corpus(root, max_bytes=1000)
    size = sum(document.num_bytes for document in capped.train)
    assert 1000 - 16 <= size <= 1000
    assert [d.text for d in capped.train[:-1]] == [d.text for d in whole.train[: len(capped.train) - 1]]
    assert capped.train[-1].text.endswith("line\n")
    share = size / sum(document.num_bytes for document in whole.train)
    held_out = sum(d.num_bytes for d in capped.validation) / sum(d.num_bytes for d in whole.validation)
    assert abs(held_out - share) < 0.02
    assert load_corpus(root, max_bytes=10**9) == whole
    assert take_bytes([Document("é", "é" * 10)], 5)[0].text == "éé"


@pytest.fixture
def tiny_library(tmp_path, monkeypatch):
    """A standard library in miniature."""
    filler = "".join(f"value_{n} = {n}\n" for n in range(40))
    files = {
        f"mod{n}.py": f'"""Module {n} tells of things. {"word " * 50}"""\n\n\ndef f():\n'
        f'    """Do {n}."""\n    return {n}\n\n\n{filler}'
        for n in range(30)
    }
    files |= dict.fromkeys(("test/test_x.py", "site-packages/third.py", "lib2to3/grammar.py"), filler)
    write(tmp_path, files | {"latin.py": b"# caf\xe9\n" * 50, "old.py": "print 'no longer Python'\n" * 20})
    monkeypatch.setattr(python_library.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    python_library.load_python_library.cache_clear()
    yield tmp_path
    python_library.load_python_library.cache_clear()


def test_the_python_library_alternates_prose_and_code(tiny_library):
    corpus = load_corpus("python")
    assert [d.name.startswith("code/") for d in corpus.train[:20]] == [False, True] * 10
    assert {d.group for d in corpus.train}.isdisjoint(d.group for d in corpus.validation)
    texts = {document.name: document.text for document in corpus.train + corpus.validation}
    modules = {name.split("/", 1)[1] for name in texts if not name.startswith("topics/")}
    assert modules == {f"mod{n}.py" for n in range(30)}
    assert "f\n\nDo 7." in texts["docstrings/mod7.py"]
    assert "Module 7 tells" not in texts["code/mod7.py"]
    assert "    return 7\n" in texts["code/mod7.py"]
    sides = {("train", d.text) for d in corpus.train} | {("validation", d.text) for d in corpus.validation}
    assert set(read("python")[0]) == sides
