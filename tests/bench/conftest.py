import pytest

from diff_transformer.bench import decode, timing


@pytest.fixture(autouse=True)
def _small_ceilings(monkeypatch):
    """Measure the peak rates with a matrix product and a copy that take no time."""
    monkeypatch.setitem(timing.MATRIX, "cpu", 32)
    monkeypatch.setitem(timing.COPY_BYTES, "cpu", 2**14)
    monkeypatch.setattr(decode, "ROTATED_BYTES", 2**14)
