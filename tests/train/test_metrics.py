"""The files that a run writes while it trains: whole lines, grouped scalars, alarms, and numbers that are right."""

import json
import math
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from diff_transformer import DiffTransformerForCausalLM
from diff_transformer.lab.recipes import recipe
from diff_transformer.model.presets import preset
from diff_transformer.train import estimate
from diff_transformer.train.config import override
from diff_transformer.train.loop import train
from diff_transformer.train.metrics import DIGEST, MetricsLog, read_metrics, scalars
from diff_transformer.train.plan import resolve
from diff_transformer.train.telemetry import (
    describe,
    gradient_norms,
    head_norm_gains,
    part_of,
    telemetry,
)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return DiffTransformerForCausalLM(preset("debug", head_norm_init=0.5))


def backward(model, scale=1.0):
    ids = torch.arange(24).view(2, 12) % 7
    (model(input_ids=ids, labels=ids).loss * scale).backward()


def test_every_parameter_has_a_part(model):
    parts = {name: part_of(name) for name, _ in model.named_parameters()}
    assert "other" not in parts.values()
    layer = "model.layers.0."
    assert parts["model.embed_tokens.weight"] == "embedding"
    assert parts[f"{layer}self_attn.q_proj.weight"] == "query"
    assert parts[f"{layer}self_attn.o_proj.weight"] == "output"
    assert parts[f"{layer}self_attn.core.lam.lambda_k2"] == "lambda"
    assert parts[f"{layer}self_attn.core.head_norm.weight"] == "head_norm"
    assert parts[f"{layer}mlp.up_proj.weight"] == "feed_forward"
    assert parts[f"{layer}input_layernorm.weight"] == parts["model.norm.weight"] == "norms"
    assert part_of("lm_head.weight") == "head"
    assert part_of("_orig_mod.model.layers.3.self_attn.k_proj.weight") == "key"
    assert part_of("vision.tower.weight") == "other"


def test_norms_by_part_are_those_of_their_gradients(model):
    backward(model)
    norms = gradient_norms(model)
    query = [p.grad for name, p in model.named_parameters() if "q_proj" in name]
    assert norms["query"] == pytest.approx(torch.cat([g.flatten() for g in query]).norm().item(), rel=1e-5)
    total = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
    assert math.hypot(*norms.values()) == pytest.approx(total, rel=1e-5)
    assert next(iter(norms)) == "embedding"
    model.zero_grad()
    assert gradient_norms(model) == {}


def test_gain_and_lambda(model):
    with torch.no_grad():
        model.model.layers[1].self_attn.core.head_norm.weight.copy_(torch.linspace(-1, 1, 16))
    assert head_norm_gains(model) == pytest.approx([0.5, torch.linspace(-1, 1, 16).abs().mean().item()])
    values = telemetry(model, torch.device("cpu"))
    assert values["lambda"] == pytest.approx(model.lambdas().tolist())
    assert telemetry(DiffTransformerForCausalLM(preset("debug", attention="softmax")), torch.device("cpu")) == {}


def test_lines_and_scalars(tmp_path):
    values = {
        "loss": 2.5, "grad_norm": 0.5, "grad_norm_by_part": {"query": 0.3, "head_norm": 0.4}, "lambda": [0.2, 0.4],
        "validation_loss": 2.7,
    }  # fmt: skip
    log = MetricsLog(tmp_path, 0)
    log.write(10, values)
    log.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 10, **values}]
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert set(board.Tags()["scalars"]) == {
        "loss", "validation_loss", "grad_norm", "grad_norm_by_part/query", "grad_norm_by_part/head_norm",
        "lambda/layer 0", "lambda/layer 1",
    }  # fmt: skip
    (event,) = board.Scalars("grad_norm_by_part/query")
    assert (event.step, event.value) == (10, pytest.approx(0.3))
    assert scalars({"brand_new": 1, "rows": "text", "nothing": None}) == {"brand_new": 1}


def test_resuming_drops_what_came_after_the_checkpoint_and_what_was_cut(tmp_path):
    assert read_metrics(tmp_path / "metrics.jsonl") == []
    log = MetricsLog(tmp_path, 0)
    for step in range(1, 6):
        log.write(step, {"loss": float(step)})
    log.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5]
    log = MetricsLog(tmp_path, 3)
    log.write(4, {"loss": 40.0})
    log.close()
    kept = [(line["step"], line.get("loss")) for line in read_metrics(tmp_path / "metrics.jsonl")]
    assert kept == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)]
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in board.Scalars("loss")] == [(1, 1), (2, 2), (3, 3), (4, 40)]
    log = MetricsLog(tmp_path, 0)  # killed before its first checkpoint: it begins again
    log.write(1, {"loss": 7.0})
    log.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": 7.0}]
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in board.Scalars("loss")] == [(1, 7)]


def test_a_run_says_what_it_will_do(monkeypatch):
    monkeypatch.setattr(estimate, "peak_here", lambda: 1e9)
    config = override(recipe("debug"), ["train.steps=1000000", "data.corpus=novels"])
    lines = describe(resolve(config)).splitlines()
    assert lines[0].startswith("debug: diff, 37,")
    assert lines[1] == "1,000,000 steps of 8 rows of 96 tokens, 768,000,000 in all, of novels"
    assert lines[2] == "1 process (single), 32-true; a checkpoint every 10 steps"
    assert lines[3] == "about 6 days"
    assert describe(resolve(override(config, ["train.validation_rows=80"]))).endswith("about 12 days")
    assert all(len(line) <= 80 for line in lines)


def test_the_list_of_metrics_is_the_documented_one(texts, tmp_path):
    settings = [
        f"data.corpus={texts}",
        "data.max_bytes=null",
        "train.steps=2",
        "train.log_every=1",
    ]
    train(override(recipe("debug"), settings), tmp_path / "run")
    written = {key for line in read_metrics(tmp_path / "run" / "metrics.jsonl") for key in line}
    text = (Path(__file__).parents[2] / "docs" / "telemetry.md").read_text()
    documented = {line.split("`")[1] for line in text.splitlines() if line.startswith("| `")}
    assert documented == {*written, "peak_memory_bytes"}  # of a GPU
    assert DIGEST in documented
    assert json.loads(text.split("```json\n")[1].split("```")[0])["step"] == 200
