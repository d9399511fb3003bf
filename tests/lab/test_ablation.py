"""The seven rows of Table 6: what they share, what sets them apart, and one small run of all."""

import signal
import time
from pathlib import Path

import pytest
import torch

from diff_transformer.checks import differences
from diff_transformer.errors import UserError
from diff_transformer.evals.samples import Samples
from diff_transformer.lab import ablation, record, worker
from diff_transformer.lab.ablation import QUICK, Settings, evaluate_ablation, run, table
from diff_transformer.lab.pool import LocalProcesses
from diff_transformer.lab.processes import read_status
from diff_transformer.lab.recipes import recipe
from diff_transformer.lab.recipes.ablation import ROWS, ablation_rows
from diff_transformer.lab.spec import RunSpec
from diff_transformer.model.config import DiffTransformerConfig
from diff_transformer.model.cost import model_cost
from diff_transformer.train.config import override
from diff_transformer.train.initial_model import build_model


@pytest.fixture(scope="module")
def base(texts):
    return override(recipe("debug"), [
        f"data.corpus={texts}", "data.max_bytes=null", "model.vocab_size=384", "data.mixture.needles=0",
        "data.mixture.recall=0", "data.length=48", "train.steps=4", "train.batch_size=2", "evaluation.loss_rows=8",
    ])  # fmt: skip


def test_the_table_s_rows_at_the_demo_s_scale():
    made = {name: DiffTransformerConfig(**row.model) for name, row in ablation_rows(recipe("demo")).items()}
    described = {
        name: (
            c.attention, c.num_diff_heads if c.attention == "diff" else c.num_attention_heads, c.head_dim,
            c.head_norm if c.attention == "diff" else c.softmax_head_norm, c.lambda_init,
        )
        for name, c in made.items()
    }  # fmt: skip
    assert described == {
        "transformer": ("softmax", 8, 16, False, "depth"),
        "transformer_wide": ("softmax", 4, 32, False, "depth"),
        "transformer_wide_norm": ("softmax", 4, 32, True, "depth"),
        "diff": ("diff", 4, 16, True, "depth"),
        "diff_no_norm": ("diff", 4, 16, False, "depth"),
        "diff_lambda_0.8": ("diff", 4, 16, True, 0.8),
        "diff_lambda_0.5": ("diff", 4, 16, True, 0.5),
    }


def test_rows_at_the_paper_s_scale_have_its_heads_and_equal_cost():
    base = recipe("demo")
    base.model = {
        "attention": "softmax", "vocab_size": 100_288, "hidden_size": 2048, "num_hidden_layers": 24,
        "num_attention_heads": 16, "max_position_embeddings": 2048,
    }  # fmt: skip
    made = {name: DiffTransformerConfig(**row.model) for name, row in ablation_rows(base).items()}
    assert (made["transformer_wide"].num_attention_heads, made["transformer_wide"].head_dim) == (8, 256)
    assert (made["diff"].num_diff_heads, made["diff"].head_dim) == (8, 128)
    costs = [model_cost(config) for config in made.values()]
    for cost in costs:
        assert cost.total_parameters == pytest.approx(costs[0].total_parameters, rel=1e-3)
        assert cost.flops_per_token == pytest.approx(costs[0].flops_per_token, rel=1e-2)


def test_rows_differ_from_their_base_in_attention_alone():
    base = override(recipe("demo"), ["model.lambda_init=0.3", "model.head_norm=no_weight", "model.head_norm_init=1.0"])
    allowed = {"attention", "head_norm", "softmax_head_norm", "head_norm_init", "lambda_init", "head_dim"}
    allowed |= {"num_attention_heads", "num_key_value_heads"}
    for row in ablation_rows(base).values():
        changed = {line.split(":")[0] for line in differences(base.to_dict(), row.to_dict())}
        assert changed <= {"name", *(f"model.{field}" for field in allowed)}
    assert ablation_rows(base)["diff"].model["lambda_init"] == "depth"
    assert base.model["lambda_init"] == 0.3


def test_rows_start_from_the_same_matrices(base):
    class Tokenizer:
        pad_token_id = bos_token_id = eos_token_id = 0

    models = [build_model(row, Tokenizer()) for row in ablation_rows(base).values()]
    for name in ("model.layers.1.self_attn.q_proj.weight", "model.layers.0.mlp.up_proj.weight"):
        for model in models[1:]:
            assert torch.equal(model.state_dict()[name], models[0].state_dict()[name])


def test_grouped_heads_are_halved_too():
    base = override(recipe("demo"), ["model.num_key_value_heads=4"])
    wide = DiffTransformerConfig(**ablation_rows(base)["transformer_wide"].model)
    assert (wide.num_attention_heads, wide.num_key_value_heads, wide.head_dim) == (4, 2, 32)


def test_a_base_that_cannot_be_paired_is_refused():
    with pytest.raises(ValueError, match="do not make pairs"):
        ablation_rows(override(recipe("demo"), ["model.num_attention_heads=1"]))


@pytest.fixture(scope="module")
def finished(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ablation")
    rows = {name: row for name, row in ablation_rows(base).items() if name in ("transformer_wide_norm", "diff_no_norm")}
    shown = []
    result = evaluate_ablation(rows, folder, jobs=1, samples=Samples(bar=lambda *seen: shown.append(seen)))
    return folder, rows, result, shown


@pytest.mark.slow
def test_rows_are_trained_and_measured(finished):
    folder, rows, result, shown = finished
    assert [row["row"] for row in result.rows] == list(rows)
    for row in result.rows:
        assert row["validation"] == result.metrics[f"{row['row']}_validation"]
        assert row["ar_hit"] < row["validation"] < row["others"] or row["others"] < row["validation"] < row["ar_hit"]
        share = row["ar_hit_share"]
        assert share * row["ar_hit"] + (1 - share) * row["others"] == pytest.approx(row["validation"])
        assert (folder / f"{row['row']}-seed0" / "run" / "model" / "model.safetensors").exists()
    norm, no_norm = result.rows
    assert (norm["heads"], norm["head_dim"], norm["head_norm"], norm["lambda_init"]) == (2, 16, True, None)
    assert (no_norm["heads"], no_norm["head_dim"], no_norm["head_norm"], no_norm["lambda_init"]) == (
        2,
        8,
        False,
        "depth",
    )
    assert shown[-1] == ("rows", 2, 2)
    assert ("diff_no_norm-seed0", 4, 4) in shown


@pytest.mark.slow
def test_what_is_finished_is_not_done_again(finished):
    folder, rows, result, _ = finished
    model = folder / "diff_no_norm-seed0" / "run" / "model" / "model.safetensors"
    before = model.stat().st_mtime_ns
    again = evaluate_ablation(rows, folder, jobs=1)
    assert (again.metrics, again.rows) == (result.metrics, result.rows)
    assert model.stat().st_mtime_ns == before


@pytest.mark.slow
def test_a_failing_row_is_reported_with_its_log(base, tmp_path):
    broken = override(base, ["optim.lr=1e30", "optim.warmup_steps=0", "optim.grad_clip=0"])
    with pytest.raises(UserError, match=r"ablation/diff-seed0 failed with exit code 1(.|\n)*FloatingPointError"):
        evaluate_ablation({"diff": ablation_rows(broken)["diff"]}, tmp_path)


@pytest.mark.slow
def test_an_interrupted_row_goes_on_and_ends_as_if_it_had_not_been(base, tmp_path):
    row = override(ablation_rows(base)["diff"], ["train.steps=400", "train.checkpoint_every=1000"])
    spec = RunSpec("ablation", "diff", 0, row, ("associative_recall",))
    for name in ("whole", "stopped"):
        spec.save(tmp_path / name)
    place = tmp_path / "stopped"
    process = LocalProcesses().start(place)
    while process.poll() is None and read_status(place)["step"] < 5:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 143
    assert not record.finished(place)
    ended = [worker.run(tmp_path / name) for name in ("stopped", "whole")]
    assert ended[0].metrics == ended[1].metrics
    assert ended[0].rows == ended[1].rows


def test_the_table_is_the_paper_s(base, tmp_path):
    rows = ablation_rows(base)
    for name in rows:
        spec = RunSpec("ablation", name, 0, rows[name], ("associative_recall",))
        spec.save(tmp_path / spec.name)
        metrics = {
            "associative_recall": {"validation": 3.0871, "ar_hit": 0.8984, "others": 3.2}, "model": {"parameters": 10}
        }  # fmt: skip
        about = {"training": {"commit": "0123"}}
        made = record.Record("ablation", name, 0, rows[name].to_dict(), metrics, provenance=about)
        made.save(tmp_path / spec.name / "record.json")
    result = evaluate_ablation(rows, tmp_path)
    shown = table(result)
    assert shown.row_count == 7
    assert list(shown.columns[0].cells) == [label for label, _, _ in ROWS.values()]
    assert {cell for column in shown.columns[4:6] for cell in column.cells} == {"3.087", "0.898"}
    assert result.metrics["diff_lambda_0.8_ar_hit"] == 0.8984
    assert result.model == "debug"
    assert "4 steps of training show that every row runs" in shown.caption
    result.provenance["steps"] = 1600
    assert table(result).caption is None
    other = {name: override(row, ["optim.lr=0.5"]) for name, row in rows.items()}
    with pytest.raises(ValueError, match=r"other settings(.|\n)*optim\.lr: 0\.003 against 0\.5(.|\n)*another folder"):
        evaluate_ablation(other, tmp_path)


def test_settings_are_checked(tmp_path):
    with pytest.raises(ValueError, match="no row mamba; there are: transformer, transformer_wide"):
        run(None, Settings(rows=("mamba",), folder=str(tmp_path)), Samples())
    with pytest.raises(ValueError, match="steps is 0"):
        run(None, Settings(steps=0, folder=str(tmp_path)), Samples())
    with pytest.raises(ValueError, match="no recipe 'dmeo'"):
        run(None, Settings(recipe="dmeo", folder=str(tmp_path)), Samples())
    assert not list(tmp_path.iterdir())
    assert Settings(**QUICK).steps < 100


def test_runs_live_beside_the_result(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(ablation, "evaluate_ablation", lambda rows, folder, **_: asked.append((list(rows), folder)))
    run(None, Settings(), Samples(tmp_path / "new" / "result.json.samples.jsonl"))
    run(None, Settings(folder="mine", rows=("diff", "transformer")), Samples())
    assert asked == [(list(ROWS), tmp_path / "new" / "result-runs"), (["transformer", "diff"], Path("mine"))]


def test_saved_models_are_not_compared():
    with pytest.raises(ValueError, match="models that are compared start from random weights"):
        run(None, Settings(recipe="debug", set=("train.initial_model=m",)), Samples())
