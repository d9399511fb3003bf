import pytest

from diff_transformer.bench import decode, timing


@pytest.fixture(autouse=True)
def _small_ceilings(monkeypatch):
    """Measure the peak rates with a matrix product and a copy that take no time."""
    monkeypatch.setitem(timing.MATRIX, "cpu", 32)
    monkeypatch.setitem(timing.COPY_BYTES, "cpu", 2**14)
    monkeypatch.setattr(decode, "ROTATED_BYTES", 2**14)


@pytest.fixture
def kept_times(monkeypatch):
    """A function that makes a module keep the Times of its runs, in the dictionary that it returns."""

    def keep(module):
        seen, measure = {}, module.interleaved_times

        def measured(*args, **options):
            times = measure(*args, **options)
            seen.update(times)
            return times

        monkeypatch.setattr(module, "interleaved_times", measured)
        return seen

    return keep
