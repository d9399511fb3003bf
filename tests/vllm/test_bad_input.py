"""Models that cannot be served are refused with one sentence that says what to do."""

import pytest
from engine_models import build


def test_dint(tmp_path, start_engine):
    build(tmp_path / "dint", attention="dint")
    with pytest.raises(
        ValueError, match=r"attention='dint', whose running mean .* use `diff-transformer serve --engine tr"
    ):
        start_engine(tmp_path / "dint")


def test_a_width_that_no_backend_takes(tmp_path, start_engine):
    build(tmp_path / "wide", head_dim=260, num_attention_heads=2)
    with pytest.raises(ValueError, match="needs heads of width 520 in vLLM's cache"):
        start_engine(tmp_path / "wide")
