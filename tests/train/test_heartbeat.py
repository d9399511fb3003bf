"""The process that holds up the others is named."""

import os
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from diff_transformer.train import heartbeat
from diff_transformer.train.heartbeat import Heartbeat


@pytest.fixture
def pair(monkeypatch):
    """Rank 0 and rank 1 in this process, over a store of their own, and a clock that stands still."""
    clock, store = [100.0], dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    fake = SimpleNamespace(monotonic=lambda: clock[0], sleep=lambda seconds: None)
    monkeypatch.setattr(heartbeat, "time", fake)
    first, second = (Heartbeat(rank, 2, 10, store) for rank in range(2))
    for rank in (first, second):
        rank._store.set(str(rank.rank), '[0, "data", 0, 0, ""]')

    def later(seconds: float, *silent: Heartbeat) -> list[dict[int, str]]:
        clock[0] += seconds
        return [rank.stalled() for rank in (second, first, second) if rank not in silent]

    return SimpleNamespace(first=first, second=second, later=later, store=store)


def test_who_is_behind_is_named_once_nobody_moves(pair):
    pair.first.at(3, "step")
    pair.second.at(3, "data")
    for _ in range(3):
        assert pair.later(3)[-1] == {}
    named = pair.later(3)[-1]
    assert list(named) == [1]
    assert named[1].endswith(") is in 'data' of step 4")
    pair.second.at(3, "step")
    assert pair.later(1)[-1] == {}
    assert list(pair.later(12)[-1]) == [0, 1]  # in one operation: neither is behind


def test_who_gives_no_sign_is_named_whatever_its_last_one_was(pair):
    pair.later(0)
    pair.first.at(3, "step")
    pair.second.at(9, "checkpoint")
    pair.later(1)
    pair.first.at(4, "step")
    assert pair.later(6, pair.second)[-1] == {}
    named = pair.later(6, pair.second)[-1]
    assert list(named) == [1]
    assert "is silent since 'checkpoint' of step 10" in named[1]


def test_a_checkpoint_may_take_any_time(pair):
    pair.first.at(3, "step")
    pair.second.at(3, "checkpoint")
    for _ in range(100):
        assert pair.later(7)[-1] == {}


def test_the_run_ends_with_one_sentence_by_who_waits(pair, monkeypatch, capsys):
    ends = []
    monkeypatch.setattr(heartbeat.os, "_exit", lambda code: ends.append(code) or pair.first.over.set())
    monkeypatch.setattr(pair.first.over, "wait", lambda seconds: pair.first.over.is_set())
    monkeypatch.setattr(pair.first, "stalled", lambda: {1: "(there) is silent"})
    pair.first.run()
    assert ends == [os.EX_TEMPFAIL]
    assert "error: no process moved for 10 s: rank 1 (there) is silent" in capsys.readouterr().err
