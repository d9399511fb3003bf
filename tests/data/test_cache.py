import os

import numpy as np
import pytest

from diff_transformer.data import cache


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("DIFF_TRANSFORMER_CACHE", str(tmp_path))
    return tmp_path / "corpora"


def never():
    raise AssertionError("made again")


def test_what_is_kept_is_not_made_again(place):
    array = np.arange(1000, dtype=np.uint16)
    np.testing.assert_array_equal(cache.cached("key", lambda: array), array)
    kept = cache.cached("key", never)
    assert isinstance(kept, np.memmap)
    assert kept.dtype == np.uint16
    np.testing.assert_array_equal(kept, array)


def test_a_key_changes_with_every_text_and_setting():
    given = [
        (["ab", "cdef"], 1),
        (["abc", "def"], 1),
        (["cdef", "ab"], 1),
        (["ab", "cdef"], 2),
        (["ab", "cdef", ""], 1),
    ]
    keys = [cache.fingerprint(*values) for values in given]
    assert len({*keys}) == 5
    assert cache.fingerprint(*given[0]) == keys[0]


def test_a_damaged_file_is_made_again_and_half_a_file_never_seen(place, monkeypatch):
    for content in (None, b"damaged", b""):
        if content is not None:
            (place / "key.npy").write_bytes(content)
        np.testing.assert_array_equal(cache.cached("key", lambda: np.arange(9)), np.arange(9))
        cache.cached("key", never)

    def full(source, target):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", full)
    np.testing.assert_array_equal(cache.cached("other", lambda: np.arange(4)), np.arange(4))
    assert [path.name for path in place.iterdir()] == ["key.npy"]
