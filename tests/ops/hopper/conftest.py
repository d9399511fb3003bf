import pytest


@pytest.fixture
def small_gate(monkeypatch):
    """The check of the Hopper kernels (tests/helpers/hopper_check.py) on one small problem and on the CPU."""
    import hopper_check

    monkeypatch.setattr(hopper_check, "PROBLEMS", ({"T": 70, "S": 63},))
    monkeypatch.setattr(hopper_check, "EMULATED", True)
    monkeypatch.setattr(hopper_check, "wait", lambda device: None)
