"""Random generators and permutations."""

import numpy as np
import pytest

from diff_transformer.data.seeding import evaluation_rng, permuted, training_rng


def _draws(rng):
    return tuple(rng.integers(1 << 62, size=4))


def test_equal_keys_give_equal_streams():
    assert _draws(training_rng(3, "needles", 7)) == _draws(training_rng(3, "needles", 7))
    assert _draws(evaluation_rng(3, 0, 2)) == _draws(evaluation_rng(3, 0, 2))


def test_every_seed_key_and_purpose_has_a_stream_of_its_own():
    seen = set()
    for make in (training_rng, evaluation_rng):
        for seed in (0, 1, 2**40):
            for key in ((), (0,), (1,), (0, 0), (1, 0), (0, 1), ("needles", 0), ("recall", 0), (2**33,)):
                seen.add(_draws(make(seed, *key)))
    assert len(seen) == 2 * 3 * 9


def rng(seed=0):
    return np.random.default_rng(seed)


@pytest.mark.parametrize("size", [*range(1, 70), 255, 256, 257, 1000, 4096, 65_537])
def test_each_thing_stands_at_one_place(size):
    order = permuted(np.arange(size), size, rng())
    np.testing.assert_array_equal(np.sort(order), np.arange(size))


def test_a_place_is_computed_by_itself():
    whole = permuted(np.arange(1000), 1000, rng(3))
    for place in (0, 1, 500, 999):
        assert permuted(np.array([place]), 1000, rng(3))[0] == whole[place]
    np.testing.assert_array_equal(permuted(np.array([[5, 6], [7, 5]]), 1000, rng(3)), whole[[[5, 6], [7, 5]]])
    assert not np.array_equal(permuted(np.arange(1000), 1000, rng(4)), whole)


def test_the_order_is_mixed():
    """The permutation looks random: rises equal falls, every place is equally likely over seeds, few items stay."""
    orders = np.stack([permuted(np.arange(64), 64, rng(seed)) for seed in range(2000)])
    rising = (np.diff(orders, axis=1) > 0).mean()
    assert abs(rising - 0.5) < 0.01
    hits = np.stack([np.bincount(orders[:, place], minlength=64) for place in range(64)])
    expected = 2000 / 64
    chi2 = ((hits - expected) ** 2 / expected).sum(axis=1) / 63  # 1 on average, standard deviation .18
    assert abs(chi2.mean() - 1) < 0.1
    assert chi2.max() < 2
    assert abs((orders == np.arange(64)).sum(axis=1).mean() - 1) < 0.15


def test_more_things_than_memory_holds():
    size = 10**13
    places = np.array([0, 1, 2, size - 1])
    order = permuted(places, size, rng())
    assert len(set(order.tolist())) == 4
    assert order.min() >= 0
    assert size // 1000 < order.max() < size
