import re
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from diff_transformer.train import heartbeat
from diff_transformer.train.heartbeat import PHASES, Heartbeat, PeerLost, Sign, describe, lost_peers_explained, stalled

DATA, STEP = PHASES[0], PHASES[1]


def test_who_is_behind_is_named():
    signs = {0: Sign(12, STEP, 11, 0.1), 1: Sign(12, DATA, 11, 0.1, " (node7, process 42)"), 2: Sign(12, STEP, 11, 0.1)}
    assert stalled(signs, 10) == [1]
    assert describe(signs, [1], 10) == (
        "rank 1 (node7, process 42) stalled in 'waiting for data' of step 13 for 11 s; waiting for it: rank 0, 2"
    )


def test_an_earlier_step_is_further_behind_than_an_earlier_phase():
    assert stalled({0: Sign(5, DATA, 20, 0), 1: Sign(4, PHASES[-1], 20, 0)}, 10) == [1]


def test_nobody_is_named_while_anyone_moves():
    assert stalled({0: Sign(5, STEP, 99, 0), 1: Sign(6, DATA, 9, 0)}, 10) == []


def test_who_is_silent_is_named_whatever_it_said_last():
    signs = {0: Sign(5, DATA, 12, 0), 1: Sign(5, PHASES[-1], 30, 30)}
    assert stalled(signs, 10) == [1]
    assert "rank 1 stalled in 'checkpoint' of step 6 for 30 s; no sign of life for 30 s" in describe(signs, [1], 10)


def test_where_all_are_in_the_same_operation_none_is_blamed():
    signs = {rank: Sign(5, STEP, 12, 0) for rank in range(3)}
    assert stalled(signs, 10) == [0, 1, 2]
    assert "all 3 are in 'forward and backward' of step 6, so an operation between them" in describe(
        signs, [0, 1, 2], 10
    )


@pytest.fixture
def pair(monkeypatch):
    """Rank 0 and rank 1 in this process, over a store of their own; the clock stands still, ending is recorded."""
    clock, ends, said, port = [100.0], [], [], []
    fake = SimpleNamespace(monotonic=lambda: clock[0], sleep=lambda seconds: None)
    monkeypatch.setattr(heartbeat, "time", fake)
    monkeypatch.setattr(heartbeat.os, "_exit", ends.append)
    first = Heartbeat(0, 2, 10, lambda value: port.append(value) or value, said.append)
    second = Heartbeat(1, 2, 10, lambda value: port[0], said.append)
    return SimpleNamespace(first=first, second=second, clock=clock, ends=ends, said=said)


def test_who_stops_moving_is_named_by_who_waits(pair):
    pair.first.at(3, STEP)
    pair.second.at(3, DATA)
    for count in range(1, 5):
        pair.clock[0] += 3
        signs = [beat.exchange(count) for beat in (pair.second, pair.first)][-1]
        assert stalled(signs, 10) == ([1] if count == 4 else [])
    pair.first.end(signs, [1])
    pair.second.exchange(5)  # hears that the run is over, and says nothing
    assert pair.ends == [heartbeat.EXIT_CODE] * 2
    (said,) = pair.said
    assert re.fullmatch(
        r"rank 1 \(.+, process \d+\) stalled in 'waiting for data' of step 4 for 12 s; waiting for it: rank 0; "
        r"the last checkpoint is intact, continue with --resume",
        said,
    )


def test_who_gives_no_sign_is_named_after_as_long(pair):
    pair.second.exchange(1)
    for count in range(1, 4):
        pair.first.at(count, STEP)
        assert stalled(pair.first.exchange(count), 10) == []
        pair.clock[0] += 3
    pair.clock[0] += 10
    assert stalled(pair.first.exchange(4), 10) == [1]


def test_nothing_is_watched_for_0_seconds():
    before = threading.active_count()
    with Heartbeat(0, 1, 0, lambda value: value) as at:
        at(0, DATA)
        assert threading.active_count() == before


def test_after_an_error_nobody_waits_for_a_store_that_does_not_answer(pair, monkeypatch):
    """A process whose peer was killed ends at once, not after the whole stall time."""
    asked, may_answer = threading.Event(), threading.Event()

    def exchange(count):
        asked.set()
        may_answer.wait(60)
        return {0: Sign(0, STEP, 0.0, 0.0)}

    monkeypatch.setattr(pair.first, "exchange", exchange)
    monkeypatch.setattr(pair.first, "_pause", 0.0)
    pair.first.__enter__()
    assert asked.wait(60)
    began = time.monotonic()
    pair.first.__exit__(RuntimeError, RuntimeError("closed by peer"), None)
    assert time.monotonic() - began < 5
    may_answer.set()


def test_a_lost_connection_says_what_to_do():
    said = r"in runs/a, which was probably killed .*with --resume.*Connection closed"
    with pytest.raises(PeerLost, match=said), lost_peers_explained("runs/a"):
        raise RuntimeError("[/x/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:5")
    with pytest.raises(PeerLost), lost_peers_explained("runs/a"):
        raise torch.distributed.DistNetworkError("the store has gone")
    with pytest.raises(RuntimeError, match=r"^another$"), lost_peers_explained("runs/a"):
        raise RuntimeError("another")
