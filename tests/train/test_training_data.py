"""Rows of a run, and batches prepared ahead."""

import threading
import time

import pytest

from diff_transformer.train.training_data import prefetched


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_batches_come_in_order(ahead):
    with prefetched(lambda step: step * step, 3, 9, ahead=ahead) as batches:
        assert list(batches) == [9, 16, 25, 36, 49, 64]


def test_the_next_batches_are_made_meanwhile_and_no_more():
    made, second = [], threading.Event()

    def prepare(step):
        made.append((step, threading.current_thread() is threading.main_thread()))
        if step == 2:
            second.set()
        return step

    with prefetched(prepare, 0, 100, ahead=2) as batches:
        assert next(batches) == 0
        assert second.wait(10)  # without being asked for
        time.sleep(0.05)
        assert len(made) <= 4  # one taken, two ready, one that waits for room
    assert not any(main for _, main in made)
    assert not any(thread.name.startswith("prefetch") for thread in threading.enumerate())


@pytest.mark.parametrize("ahead", [0, 2])
def test_an_error_is_raised_where_its_batch_is_asked_for(ahead):
    def prepare(step):
        if step == 2:
            raise OSError("shard 7 is gone")
        return step

    with prefetched(prepare, 0, 5, ahead=ahead) as batches:
        assert [next(batches), next(batches)] == [0, 1]
        with pytest.raises(OSError, match="shard 7 is gone"):
            next(batches)


def test_leaving_early_ends_the_thread():
    with prefetched(lambda step: step, 0, 1000) as batches:
        next(batches)
    assert not any(thread.name.startswith("prefetch") for thread in threading.enumerate())
