"""Random generators."""

from diff_transformer.data.seeding import evaluation_rng, training_rng


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
