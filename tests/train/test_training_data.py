"""Rows of a run, and batches prepared ahead."""

import threading
import time

import pytest

from diff_transformer.train.training_data import prefetched


def test_batches_come_in_order_and_no_more_are_made_meanwhile():
    made, second = [], threading.Event()

    def prepare(step):
        made.append((step, threading.current_thread() is threading.main_thread()))
        if step == 5:
            second.set()
        return step

    with prefetched(prepare, 3, 100) as batches:
        assert next(batches) == 3
        assert second.wait(10)  # without being asked for
        time.sleep(0.05)
        assert len(made) <= 4  # one taken, two ready, one that waits for room
        assert [next(batches) for _ in range(3)] == [4, 5, 6]
    assert not any(main for _, main in made)
    assert not any(thread.name.startswith("prefetch") for thread in threading.enumerate())


def test_an_error_is_raised_where_its_batch_is_asked_for():
    def prepare(step):
        if step == 2:
            raise OSError("shard 7 is gone")
        return step

    with prefetched(prepare, 0, 5) as batches:
        assert [next(batches), next(batches)] == [0, 1]
        with pytest.raises(OSError, match="shard 7 is gone"):
            next(batches)
