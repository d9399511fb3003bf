"""Atomic replacement of files and folders, and the check that a folder can be written to."""

import errno
import os
from contextlib import suppress
from pathlib import Path

import pytest

from diff_transformer.durable import replacing, require_writable, write_whole
from diff_transformer.errors import UserError


def test_a_folder_that_is_not_there_yet_is_judged_by_what_is_around_it(tmp_path, monkeypatch):
    require_writable(tmp_path / "a" / "b")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"b cannot be a folder: .*file is a file; choose another --out"):
        require_writable(tmp_path / "file" / "b")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # no rights bind root
    with pytest.raises(UserError, match=f"^{tmp_path} may not be written to; choose another --out, or change its mode"):
        require_writable(tmp_path / "a" / "b")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=f"^{tmp_path} may not be written to"):
        require_writable(Path("page.html").parent)


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a.json"
    write_whole(path, "café")
    with suppress(KeyError), replacing(path) as partial:
        partial.write_text("half of it")
        assert path.read_text(encoding="utf-8") == "café"
        raise KeyError
    assert path.read_text(encoding="utf-8") == "café"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_is_made_as_a_whole_or_not_at_all(tmp_path):
    with suppress(KeyError), replacing(tmp_path / "model") as partial:
        partial.mkdir()
        raise KeyError
    assert [*tmp_path.iterdir()] == []
    with replacing(tmp_path / "model") as partial:
        partial.mkdir()
        (partial / "weights").write_text("1")
    assert [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*"))] == ["model", "model/weights"]


def test_several_processes_may_write_one_file(tmp_path):
    with replacing(tmp_path / "a") as first, replacing(tmp_path / "a") as second:
        first.write_text("1")
        second.write_text("2")
    assert (tmp_path / "a").read_text() == "1"  # the outer block ends last


def test_a_full_disk_is_an_error_of_the_disk_in_every_library(tmp_path):
    with pytest.raises(OSError, match="No space left on device") as raised, replacing(tmp_path / "file"):
        raise Exception("I/O error: No space left on device (os error 28)")  # as safetensors and tokenizers say it
    assert raised.value.errno == errno.ENOSPC
