import pytest
import torch


@pytest.fixture
def small_gate(monkeypatch):
    """The check of the Hopper kernels (gluon/verify.py), nothing verified yet, on one small problem and on the CPU."""
    from diff_transformer.ops.triton.gluon import verify

    monkeypatch.setattr(verify, "PROBLEMS", ({"T": 70, "S": 63},))
    monkeypatch.setattr(verify, "wait", lambda device: None)
    monkeypatch.setattr(verify, "_verdicts", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
