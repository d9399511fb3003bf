"""Where may be written to."""

import os
from pathlib import Path

import pytest

from diff_transformer.durable import DiskError, require_writable


def test_a_folder_that_is_not_there_yet_is_judged_by_what_is_around_it(tmp_path, monkeypatch):
    require_writable(tmp_path / "a" / "b")
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskError, match=r"b cannot be a folder: .*file is a file; choose another --out"):
        require_writable(tmp_path / "file" / "b")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # no rights bind root
    with pytest.raises(DiskError, match=f"^{tmp_path} may not be written to; choose another --out, or change its mode"):
        require_writable(tmp_path / "a" / "b")


def test_the_working_folder_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(DiskError, match=f"^{tmp_path} may not be written to"):
        require_writable(Path("page.html").parent)
