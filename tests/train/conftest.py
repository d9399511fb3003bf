"""Fixtures that several files of tests of training share."""

import pytest


@pytest.fixture(scope="session")
def texts(tmp_path_factory):
    """A folder of twelve small text files: a corpus on which a tiny model trains in seconds."""
    folder = tmp_path_factory.mktemp("texts")
    for i in range(12):
        words = " ".join(f"the {a} fox {b} jumps over dog number {i}." for a in ("red", "old") for b in range(40))
        (folder / f"{i}.txt").write_text(words)
    return folder
