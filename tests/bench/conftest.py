import pytest

from diff_transformer.bench import decode, record, timing


@pytest.fixture(autouse=True)
def _small_ceilings(monkeypatch):
    """Measure the peak rates with a matrix product and a copy that take no time."""
    monkeypatch.setitem(timing.MATRIX, "cpu", 32)
    monkeypatch.setitem(timing.COPY_BYTES, "cpu", 2**14)
    monkeypatch.setattr(decode, "ROTATED_BYTES", 2**14)


@pytest.fixture
def kept_times(monkeypatch):
    """A function that returns a dictionary, which later gets the Times of all runs."""

    def keep():
        seen, measure = {}, record.interleaved_times

        def measured(*args, **options):
            times = measure(*args, **options)
            seen.update(times)
            return times

        monkeypatch.setattr(record, "interleaved_times", measured)
        return seen

    return keep
