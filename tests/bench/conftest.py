import pytest

from diff_transformer.bench import caches, ceilings


@pytest.fixture(autouse=True)
def _small_ceilings(monkeypatch):
    """The ceilings of a matrix product and a copy that take no time."""
    monkeypatch.setitem(ceilings.MATRIX, "cpu", 32)
    monkeypatch.setitem(ceilings.COPY_BYTES, "cpu", 2**14)
    monkeypatch.setattr(caches, "ROTATED_BYTES", 2**14)
