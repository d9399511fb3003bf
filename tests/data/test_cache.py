import os

import numpy as np
import pytest

from diff_transformer.data import cache


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("DIFF_TRANSFORMER_CORPORA", str(tmp_path / "kept"))
    monkeypatch.setattr(cache, "MIN_CHARACTERS", 5)
    return tmp_path / "kept"


def never():
    raise AssertionError("made again")


def test_what_is_kept_is_not_made_again(place):
    key = cache.fingerprint(["some", "text"], "tokens", "hash")
    array = np.arange(1000, dtype=np.uint16)
    np.testing.assert_array_equal(cache.kept_array(key, lambda: array), array)
    found = cache.kept_array(key, never)
    assert isinstance(found, np.memmap)
    assert found.dtype == np.uint16
    np.testing.assert_array_equal(found, array)
    assert cache.kept_text(key, lambda: "café") == cache.kept_text(key, never) == "café"
    assert len(list(place.iterdir())) == 2


def test_a_key_changes_with_every_text_and_setting(place):
    keys = [
        cache.fingerprint(["ab", "cdef"], 1),
        cache.fingerprint(["abc", "def"], 1),
        cache.fingerprint(["cdef", "ab"], 1),
        cache.fingerprint(["ab", "cdef"], 2),
        cache.fingerprint(["ab", "cdef", ""], 1),
    ]
    assert len(set(keys)) == 5
    assert cache.fingerprint(["ab", "cdef"], 1) == keys[0]
    assert cache.fingerprint(["ab"], 1) is None  # a small one is made each time
    assert cache.fingerprint(["ab"], 1, least=0) is not None
    assert cache.kept_text(None, lambda: "made") == "made"


def test_a_damaged_file_is_made_again_and_half_a_file_never_seen(place, monkeypatch):
    cache.kept_array("key", lambda: np.arange(9))
    (place / "key.npy").write_bytes(b"damaged")
    np.testing.assert_array_equal(cache.kept_array("key", lambda: np.arange(9)), np.arange(9))
    cache.kept_array("key", never)
    (place / "key.npy").write_bytes(b"")  # what a power cut may leave
    (place / "text.json").write_bytes(b"")
    np.testing.assert_array_equal(cache.kept_array("key", lambda: np.arange(9)), np.arange(9))
    assert cache.kept_text("text", lambda: "whole") == cache.kept_text("text", never) == "whole"
    (place / "text.json").unlink()

    def full(source, target):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", full)
    np.testing.assert_array_equal(cache.kept_array("other", lambda: np.arange(4)), np.arange(4))
    assert [path.name for path in place.iterdir()] == ["key.npy"]


def test_the_least_recently_used_goes_first(place, monkeypatch):
    monkeypatch.setattr(cache, "MAX_BYTES", 3000)
    for age, key in enumerate(["a", "b"]):
        cache.kept_text(key, lambda: "x" * 1000)
        os.utime(place / f"{key}.json", (1000 + age, 1000 + age))
    cache.kept_text("a", never)  # used now
    cache.kept_text("c", lambda: "x" * 1500)
    assert sorted(path.stem for path in place.iterdir()) == ["a", "c"]


def test_where_things_are_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("DIFF_TRANSFORMER_CORPORA", "")
    assert cache.folder() is None
    assert cache.kept_text("key", lambda: "made") == "made"
    monkeypatch.delenv("DIFF_TRANSFORMER_CORPORA")
    monkeypatch.setenv("DIFF_TRANSFORMER_CACHE", str(tmp_path / "mine"))
    assert cache.folder() == tmp_path / "mine" / "corpora"
    monkeypatch.delenv("DIFF_TRANSFORMER_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.folder() == tmp_path / "diff_transformer" / "corpora"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache.folder() == tmp_path / "home" / ".cache" / "diff_transformer" / "corpora"
