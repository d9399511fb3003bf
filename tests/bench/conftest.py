import pytest

from diff_transformer.bench import decode, record, timing


@pytest.fixture(autouse=True)
def _small_copies(monkeypatch):
    """Measure the peak rate with a copy that takes no time."""
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
