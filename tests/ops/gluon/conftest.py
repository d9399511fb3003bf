import pytest


@pytest.fixture
def small_gate(monkeypatch):
    """The check of the Hopper kernels (gluon/verify.py) on one small problem and on the CPU."""
    from diff_transformer.ops.gluon import verify

    monkeypatch.setattr(verify, "PROBLEMS", ({"T": 70, "S": 63},))
    monkeypatch.setattr(verify, "wait", lambda device: None)
