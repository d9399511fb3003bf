"""A run lets ``auto`` time its forms of attention before the first step; the CPU stands for a GPU."""

import json

import pytest
import torch

from diff_transformer.lab.recipes import recipe
from diff_transformer.ops import api, choice, dispatch, triton
from diff_transformer.train.config import override
from diff_transformer.train.loop import train
from diff_transformer.train.loss import Objective


@pytest.fixture
def kept(monkeypatch, tmp_path):
    """The kinds of calls on which there is a kept verdict."""
    torch.use_deterministic_algorithms(False)
    monkeypatch.setenv("DIFF_TRANSFORMER_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(dispatch.SWITCH, raising=False)
    monkeypatch.setattr(api, "MEASURED", ("cpu",))
    monkeypatch.setattr(dispatch, "TURNS", (1, 1))
    monkeypatch.setattr(triton, "unsupported_reason", lambda *device: "its interpreter is slow")
    monkeypatch.setattr(choice, "_chosen", {})
    monkeypatch.setattr(dispatch, "_verdicts", {})
    return lambda: [json.loads(name) for name in dispatch._verdicts]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ([], {"shared_keys": False, "key_group": 1, "noise_group": 1}),
        (["model.attention=diff_v2", "model.num_key_value_heads=1"], {"shared_keys": True}),
        (["model.attention=grouped_diff", "model.head_norm_init=[0.1,0.2]"], {"noise_group": 3}),
        (["train.micro_batch_size=2", "train.precision=bf16-mixed"], {"dtype": "bfloat16"}),
        (["train.deterministic=true"], {"passes": choice.REPEATS}),
    ],
)
def test_a_compiled_run_measures_its_own_calls_before(kept, texts, monkeypatch, tmp_path, settings, expected):
    common = [f"data.corpus={texts}", "train.steps=2", "train.compile=true"]
    before: list[dict] = []
    monkeypatch.setattr(Objective, "compile", lambda self: before.extend(kept()))
    train(override(recipe("debug"), [*common, *settings]), tmp_path / "compiled")
    assert sorted(kind["gradients"] for kind in before) == [False, True]
    for kind in before:
        known = kind if kind["gradients"] else {**kind, "passes": expected.get("passes")}  # no backward, no passes
        assert {name: known[name] for name in expected} == expected
    compiled = [kind for kind in kept() if kind["dtype"] == before[0]["dtype"]]  # questions are asked uncompiled
    assert compiled == before


def test_measuring_draws_nothing_of_the_run(kept, texts, monkeypatch, tmp_path):
    config = override(recipe("debug"), [f"data.corpus={texts}", "train.steps=2"])
    monkeypatch.setattr(Objective, "compile", lambda self: None)
    first = train(config, tmp_path / "run")
    second = train(override(config, ["train.compile=true"]), tmp_path / "measured")
    for ours, theirs in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)
