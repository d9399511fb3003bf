import numpy as np
import pytest

from diff_transformer.data.mixture import Mixture


class Counting:
    """Row i holds i in every place; the labels are its negative."""

    def __init__(self, base, length=3):
        self.base, self.length = base, length

    def rows(self, first, count):
        ids = np.repeat(np.arange(first, first + count)[:, None] + self.base, self.length, axis=1)
        return ids, -ids


def _mixture(batch_size=10, weights=None, seed=0):
    sources = {"lm": Counting(0), "needles": Counting(10**6)}
    return Mixture(sources, weights or {"lm": 0.7, "needles": 0.3}, batch_size, seed)


def test_every_step_has_the_same_number_of_rows_of_each_source():
    mixture = _mixture()
    assert mixture.rows_per_source == {"lm": 7, "needles": 3}
    for step in range(5):
        batch = mixture.batch(step)
        assert batch["input_ids"].shape == (10, 3)
        assert np.bincount(batch["source"]).tolist() == [7, 3]
        np.testing.assert_array_equal(batch["source"], batch["input_ids"][:, 0] >= 10**6)
        np.testing.assert_array_equal(batch["labels"], -batch["input_ids"])


def test_no_row_is_repeated_or_left_out():
    mixture = _mixture()
    seen = np.concatenate([mixture.batch(step)["input_ids"][:, 0] for step in range(20)])
    np.testing.assert_array_equal(np.sort(seen), [*range(140), *range(10**6, 10**6 + 60)])


def test_a_batch_is_a_pure_function_of_the_step():
    mixture = _mixture()
    mixture.batch(0)
    for name, value in mixture.batch(7).items():
        np.testing.assert_array_equal(value, _mixture().batch(7)[name])
    orders = {tuple(_mixture(seed=seed).batch(7)["source"]) for seed in range(8)}
    assert len(orders) > 1


@pytest.mark.parametrize("processes", [1, 2, 5, 10])
def test_the_parts_of_the_processes_are_the_batch(processes):
    for step in range(3):
        parts = [_mixture().batch(step, rank, processes) for rank in range(processes)]
        for name, value in _mixture().batch(step).items():
            np.testing.assert_array_equal(np.concatenate([part[name] for part in parts]), value)


@pytest.mark.parametrize(
    ("weights", "batch_size", "expected"),
    [({"a": 1, "b": 1, "c": 1}, 10, [4, 3, 3]), ({"a": 5, "b": 3, "c": 2}, 16, [8, 5, 3]), ({"a": 2.0}, 4, [4])],
)
def test_the_largest_remainder_gets_the_odd_row(weights, batch_size, expected):
    mixture = Mixture({name: Counting(0) for name in weights}, weights, batch_size)
    assert list(mixture.rows_per_source.values()) == expected


def test_errors():
    with pytest.raises(ValueError, match=r"batch_size 4 leaves no row for needles at weights .*; give more"):
        _mixture(4, {"lm": 0.9, "needles": 0.1})
