import io
import os
import re
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import pytest

from diff_transformer.data import corpus as corpus_module
from diff_transformer.data import load_corpus, python_library
from diff_transformer.data.documents import Document, held_out_split, tail_split, take_bytes
from diff_transformer.errors import UserError


@pytest.fixture(autouse=True)
def _library_is_read_anew():
    """The Python library's text is cached for the process; some tests here replace it."""
    python_library.load_python_library.cache_clear()
    yield
    python_library.load_python_library.cache_clear()


def _write(root: Path, files: Mapping[str, str | bytes]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


def _archive(path: Path, files: Mapping[str, str], mode: Literal["w", "w:xz", "w:gz"] = "w:xz") -> Path:
    with tarfile.open(path, mode) as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content.encode())
            archive.addfile(member, io.BytesIO(content.encode()))
    return path


def _names(documents):
    return sorted(document.name for document in documents)


def test_a_file_keeps_its_last_tenth_for_validation_cut_at_a_line_end(tmp_path):
    lines = [f"line {index} of the play\n" for index in range(200)]
    path = _write(tmp_path, {"play.txt": "".join(lines)}) / "play.txt"
    corpus = load_corpus(path)
    train, validation = corpus.train[0].text, corpus.validation[0].text
    assert train + validation == "".join(lines)
    assert train.endswith("\n")
    assert 0.08 < len(validation) / len(train + validation) < 0.12


def test_a_file_of_one_line_is_cut_at_a_character(tmp_path):
    path = _write(tmp_path, {"line.txt": "abcdefghij" * 10}) / "line.txt"
    corpus = load_corpus(path)
    assert len(corpus.train[0].text) == 90
    assert corpus.train[0].text + corpus.validation[0].text == "abcdefghij" * 10


def test_byte_order_mark_and_crlf_are_removed(tmp_path):
    path = _write(tmp_path, {"dos.txt": b"\xef\xbb\xbfone\r\ntwo\r\n" * 1 + b"three\r\n" * 20}) / "dos.txt"
    corpus = load_corpus(path)
    assert corpus.train[0].text.startswith("one\ntwo\n")
    assert "\r" not in corpus.train[0].text + corpus.validation[0].text


@pytest.mark.parametrize("side", ["val", "valid", "validation"])
def test_train_and_validation_folders_are_the_split(tmp_path, side):
    files = {f"train/{n}.txt": f"train {n}" for n in range(3)} | {f"{side}/v.txt": "held out", "test/t.txt": "unseen"}
    corpus = load_corpus(_write(tmp_path, files | {"README.md": "about"}))
    assert _names(corpus.train) == ["train/0.txt", "train/1.txt", "train/2.txt"]
    assert _names(corpus.validation) == [f"{side}/v.txt"]
    assert side in corpus.description()


def test_a_folder_without_sides_holds_out_files_that_stay_put_when_others_come(tmp_path):
    files = {f"sub{n % 3}/{n}.md": f"text {n}" for n in range(60)}
    first = load_corpus(_write(tmp_path, files | {".git/x.txt": "hidden", "picture.png": b"\x89PNG"}))
    assert _names(first.train + first.validation) == sorted(files)
    assert 1 <= len(first.validation) <= 15
    second = load_corpus(_write(tmp_path, {f"more/{n}.md": "new" for n in range(20)}))
    assert set(_names(first.validation)) <= set(_names(second.validation))
    assert set(_names(first.train)) <= set(_names(second.train))


@pytest.mark.parametrize("count", [2, 3, 5])
def test_a_held_out_split_leaves_no_side_empty(count):
    for start in range(50):
        train, validation = held_out_split([Document(f"{start + n}", "x") for n in range(count)])
        assert train
        assert validation
        assert len(train) + len(validation) == count


def test_documents_of_a_group_stay_together():
    documents = [Document(f"{kind}/{n}", "x", group=str(n)) for n in range(100) for kind in ("code", "prose")]
    train, validation = held_out_split(documents)
    assert {document.group for document in train}.isdisjoint(document.group for document in validation)
    with pytest.raises(ValueError, match="at least 2"):
        held_out_split(documents[:2])


def test_a_folder_with_one_file_is_split_like_a_file(tmp_path):
    corpus = load_corpus(_write(tmp_path, {"only.txt": "a line\n" * 50}))
    assert corpus.train[0].text + corpus.validation[0].text == "a line\n" * 50


@pytest.mark.parametrize(("suffix", "mode"), [(".tar", "w"), (".tar.xz", "w:xz"), (".tar.gz", "w:gz")])
@pytest.mark.parametrize("prefix", ["", "./", "novels/"])
def test_archives_read_like_folders(tmp_path, suffix, mode, prefix):
    files = {f"{prefix}train/A_Novel_18{n}.txt": f"Chapter {n}\n" * 20 for n in range(4)}
    files[f"{prefix}val/B_Novel.txt"] = "Another author\n"
    corpus = load_corpus(_archive(tmp_path / f"novels{suffix}", files, mode))
    assert _names(corpus.train) == [f"train/A_Novel_18{n}.txt" for n in range(4)]
    assert [document.text for document in corpus.validation] == ["Another author\n"]


def test_archives_are_never_extracted_and_links_are_not_followed(tmp_path, monkeypatch):
    (tmp_path / "secret.txt").write_text("secret")
    monkeypatch.chdir(tmp_path)
    with tarfile.open("sly.tar", "w") as archive:
        for name, target in (("link.txt", "secret.txt"), ("up.txt", "../secret.txt")):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, target
            archive.addfile(member)
        for name in ("../outside.txt", "/abs/inside.txt"):
            member = tarfile.TarInfo(name)
            member.size = 4
            archive.addfile(member, io.BytesIO(b"text"))
    corpus = load_corpus("sly.tar")
    assert "secret" not in "".join(document.text for document in corpus.train + corpus.validation)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["secret.txt", "sly.tar"]


def test_an_archive_too_large_for_memory_is_refused(tmp_path, monkeypatch):
    path = _archive(tmp_path / "big.tar", {"a.txt": "x" * 100, "b.txt": "y" * 100}, "w")
    monkeypatch.setattr(corpus_module, "MAX_ARCHIVE_BYTES", 150)
    with pytest.raises(ValueError, match="unpack it"):
        load_corpus(path)


def test_a_cap_takes_whole_documents_and_cuts_the_last_at_a_line_end(tmp_path):
    files = {f"train/{n}.txt": f"{n:03d} is the line\n" * 10 for n in range(20)}
    files |= {f"val/{n}.txt": f"{n:03d} is the line\n" * 10 for n in range(10)}
    root = _write(tmp_path, files)
    whole, capped = load_corpus(root), load_corpus(root, max_bytes=1000)
    size = sum(document.num_bytes for document in capped.train)
    assert 1000 - 16 <= size <= 1000
    assert [d.text for d in capped.train[:-1]] == [d.text for d in whole.train[: len(capped.train) - 1]]
    assert capped.train[-1].text.endswith("line\n")
    share = size / sum(document.num_bytes for document in whole.train)
    held_out = sum(d.num_bytes for d in capped.validation) / sum(d.num_bytes for d in whole.validation)
    assert abs(held_out - share) < 0.02
    assert load_corpus(root, max_bytes=10**9) == whole


def test_a_cap_does_not_split_characters():
    taken = take_bytes([Document("é", "é" * 10)], 5)
    assert taken[0].text == "éé"
    with pytest.raises(ValueError, match="max_bytes"):
        take_bytes(taken, 0)


def test_the_order_of_a_capped_folder_is_mixed_and_repeatable(tmp_path):
    root = _write(tmp_path, {f"train/{n:02d}.txt": "text\n" for n in range(30)} | {"val/v.txt": "text"})
    names = [document.name for document in load_corpus(root).train]
    assert names == [document.name for document in load_corpus(root).train]
    assert names != sorted(names)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"data.jsonl": '{"text": "a"}'}, r"holds no text files; give a UTF-8 text file"),
        ({"train/a.txt": "text", "val/b.txt": "  \n"}, "folder val/ is empty"),
        ({"train/a.txt": "", "val/b.txt": "text"}, "folder train/ is empty"),
        ({"train/a.bin": "text", "val/b.txt": "text", "train/c.txt": ""}, "folder train/ is empty"),
        ({"a.txt": "\n", "b.txt": ""}, "is empty"),
        ({"a.txt": "fine", "b.txt": b"caf\xe9"}, r"b\.txt in .* is not UTF-8 \(byte 3: 0xe9\).*iconv"),
        ({"a.txt": "x"}, "too short to split"),
    ],
)
def test_folder_errors_name_the_trouble(tmp_path, files, message):
    with pytest.raises(ValueError, match=message):
        load_corpus(_write(tmp_path, files))


def test_path_errors_name_the_trouble(tmp_path):
    pipes = tmp_path / "pipes"
    pipes.mkdir()
    os.mkfifo(pipes / "pipe.txt")
    for pipe in (pipes / "pipe.txt", pipes, "/dev/zero"):
        with pytest.raises(ValueError, match=r"(pipe.txt|/dev/zero) is a pipe, a socket or a device"):
            load_corpus(str(pipe))
    with pytest.raises(UserError, match=r"nowhere.*does not exist; give 'python' or"):
        load_corpus(tmp_path / "nowhere")
    _write(
        tmp_path, {"rows.parquet": b"PAR1", "empty.txt": "", "latin.txt": b"\xff\xfe", "broken.tar.xz": b"no archive"}
    )
    with pytest.raises(ValueError, match=r"suffix '.parquet'.*give a UTF-8 text file"):
        load_corpus(tmp_path / "rows.parquet")
    with pytest.raises(ValueError, match="is empty"):
        load_corpus(tmp_path / "empty.txt")
    with pytest.raises(ValueError, match="is not UTF-8"):
        load_corpus(tmp_path / "latin.txt")
    with pytest.raises(ValueError, match="cannot be read as a tar archive"):
        load_corpus(tmp_path / "broken.tar.xz")
    (tmp_path / "void").mkdir()
    with pytest.raises(ValueError, match="holds no text files"):
        load_corpus(tmp_path / "void")


@pytest.mark.timeout(120)
def test_an_archive_that_promises_terabytes_is_an_error_at_once(tmp_path):
    promise = tarfile.TarInfo("big.bin")
    promise.size = 5 << 40
    path = _archive(tmp_path / "promise.tar", {"a.txt": "some words"}, "w")
    path.write_bytes(path.read_bytes()[:1024] + promise.tobuf(tarfile.GNU_FORMAT))  # a header and a block of data
    with pytest.raises(ValueError, match=r"tar archive \(big.bin ends 5,497,558,138,880 bytes early"):
        load_corpus(path)


def test_a_truncated_archive_is_an_error(tmp_path):
    path = _archive(tmp_path / "novels.tar.xz", {f"{n}.txt": f"{n} words " * 5000 for n in range(3)})
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(ValueError, match="cannot be read as a tar archive"):
        load_corpus(path)


def test_tail_split_refuses_a_blank_tail():
    with pytest.raises(ValueError, match="too short"):
        tail_split(Document("d", "text" + "\n" * 40))


@pytest.fixture
def tiny_library(tmp_path, monkeypatch):
    """A standard library in miniature."""
    filler = "".join(f"value_{n} = {n}\n" for n in range(40))
    files = {
        f"mod{n}.py": f'"""Module {n} tells of things. {"word " * 50}"""\n\n\ndef f():\n'
        f'    """Do {n}."""\n    return {n}\n\n\n{filler}'
        for n in range(30)
    }
    others = {
        "test/test_x.py": filler,
        "site-packages/third.py": filler,
        "lib2to3/grammar.py": filler,
        "latin.py": b"# caf\xe9\n" * 50,
        "old.py": "print 'no longer Python'\n" * 20,
    }
    _write(tmp_path, files | others)
    monkeypatch.setattr(python_library.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    return tmp_path


def test_the_python_library_alternates_prose_and_code(tiny_library):
    corpus = load_corpus("python")
    names = [document.name for document in corpus.train]
    assert [name.startswith("code/") for name in names[:20]] == [False, True] * 10
    texts = {document.name: document.text for document in corpus.train + corpus.validation}
    modules = {name.split("/", 1)[1] for name in texts if not name.startswith("topics/")}
    assert modules == {f"mod{n}.py" for n in range(30)}
    assert "Module 7 tells" in texts["docstrings/mod7.py"]
    assert "f\n\nDo 7." in texts["docstrings/mod7.py"]
    assert "Module 7 tells" not in texts["code/mod7.py"]
    assert "    return 7\n" in texts["code/mod7.py"]


def test_no_module_of_the_python_library_is_on_both_sides(tiny_library):
    corpus = load_corpus("python")
    assert {d.group for d in corpus.train}.isdisjoint(d.group for d in corpus.validation)
    assert load_corpus("python") == corpus


def test_a_python_without_topics_or_sources(tiny_library, monkeypatch):
    monkeypatch.setattr(python_library, "_topics", list)
    assert all(not d.name.startswith("topics/") for d in load_corpus("python").train)
    monkeypatch.setattr(python_library.sysconfig, "get_paths", lambda: {"stdlib": str(tiny_library / "test")})
    (tiny_library / "test" / "test_x.py").unlink()
    python_library.load_python_library.cache_clear()
    with pytest.raises(ValueError, match="no Python sources"):
        load_corpus("python")


def test_the_real_library_is_prose_and_code_within_the_default_cap():
    corpus = load_corpus("python")
    assert corpus.description().startswith("python: train ")
    size = sum(document.num_bytes for document in corpus.train)
    assert 1_000_000 < size <= corpus_module.PYTHON_BYTES
    assert {"docstrings/argparse.py", "code/argparse.py"} <= {d.name for d in corpus.train + corpus.validation}
    assert not any("/test/" in d.name or "site-packages" in d.name for d in corpus.train)


def test_what_prepare_reads_is_refused_with_its_command(tmp_path):
    (tmp_path / "rows").mkdir()
    for name in ("rows/a.jsonl.gz", "b.jsonl", "c.parquet"):
        (tmp_path / name).write_bytes(b"")
    for path in (tmp_path / "rows", tmp_path / "b.jsonl", tmp_path / "c.parquet"):
        with pytest.raises(ValueError, match=re.escape(f"`diff-transformer prepare {path} --out FOLDER`")):
            load_corpus(path)
    with pytest.raises(UserError, match=r"or prepare it: `diff-transformer prepare SOURCE\.\.\. --out corpus`"):
        load_corpus("corpus")
    (tmp_path / "picture.png").write_bytes(b"")
    with pytest.raises(ValueError, match=r"suffix '\.png', which is not read") as caught:
        load_corpus(tmp_path / "picture.png")
    assert "diff-transformer prepare" not in str(caught.value)
