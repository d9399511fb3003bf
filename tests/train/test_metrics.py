"""What a run writes while it trains: whole lines, grouped scalars, alarms, and numbers that are right."""

import errno
import json
import logging
import math
import mmap
import multiprocessing

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from diff_transformer import DiffTransformerForCausalLM
from diff_transformer.durable import DiskError
from diff_transformer.model.presets import preset
from diff_transformer.train.metrics import DIGEST, GROUPS, MetricsLog, read_metrics, scalars
from diff_transformer.train.telemetry import (
    by_source,
    gradient_norms,
    head_norm_gains,
    layer_lambdas,
    memory_bytes,
    part_of,
    telemetry,
)


def log_of(folder, step=0, **options):
    return MetricsLog(folder, step, **options)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return DiffTransformerForCausalLM(preset("debug", head_norm_init=0.5))


def backward(model, scale=1.0):
    ids = torch.arange(24).view(2, 12) % 7
    (model(input_ids=ids, labels=ids).loss * scale).backward()


@pytest.mark.parametrize("attention", ["diff", "diff_v2", "grouped_diff", "dint", "softmax"])
def test_no_parameter_of_any_kind_is_without_a_part(attention):
    model = DiffTransformerForCausalLM(preset("debug", attention=attention, hidden_size=64, num_attention_heads=8))
    parts = {part_of(name) for name, _ in model.named_parameters()}
    assert "other" not in parts
    assert ("lambda" in parts) == (attention != "softmax")


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


def test_norms_are_those_before_clipping(model):
    backward(model, 100.0)
    before = gradient_norms(model)
    total = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert math.hypot(*gradient_norms(model).values()) == pytest.approx(1.0, rel=1e-4)
    assert gradient_norms(model, total) == pytest.approx(before, rel=1e-4)


def test_a_gradient_of_nothing_has_norm_0():
    layer = torch.nn.Linear(2, 2)
    layer.weight.grad = torch.zeros(2, 2)
    assert gradient_norms(layer, torch.tensor(0.0)) == {"other": 0.0}


def test_gain_lambda_and_memory(model):
    with torch.no_grad():
        model.model.layers[1].self_attn.core.head_norm.weight.copy_(torch.linspace(-1, 1, 16))
    assert head_norm_gains(model) == pytest.approx([0.5, torch.linspace(-1, 1, 16).abs().mean().item()])
    values = telemetry(model, torch.device("cpu"))
    assert values["lambda"] == pytest.approx(model.lambdas().tolist())
    assert 1e8 < values["memory_bytes"] < 1e11
    assert values["peak_memory_bytes"] > 1e8
    softmax = telemetry(DiffTransformerForCausalLM(preset("debug", attention="softmax")), torch.device("cpu"))
    assert set(softmax) == {"memory_bytes", "peak_memory_bytes"}


def test_memory_follows_what_is_held():
    """New pages, written by one thread: the kernel's count is behind by some pages for every thread that wrote."""
    size = 100_000_000
    before = memory_bytes(torch.device("cpu"))["memory_bytes"]
    with mmap.mmap(-1, size) as held:
        for start in range(0, size, mmap.PAGESIZE):
            held[start] = 1
        assert memory_bytes(torch.device("cpu"))["memory_bytes"] - before == pytest.approx(size, rel=0.2)


def test_loss_by_source_is_a_mean_over_its_tokens():
    assert by_source(torch.tensor([6.0, 0.0, 4.0]), torch.tensor([3, 0, 2]), ["text", "needles", "recall"]) == {
        "text": 2.0,
        "recall": 2.0,
    }


def test_lines_and_scalars(tmp_path):
    values = {
        "loss": 2.5, "lr": 1e-3, "grad_norm": 0.5, "grad_norm_by_part": {"query": 0.3, "head_norm": 0.4},
        "lambda": [0.2, 0.4], "head_norm_gain": [0.1, 0.1], "tokens_per_second": 9e3, "mfu": 0.4, "memory_bytes": 5,
        "loss_by_source": {"text": 2.6}, "validation_loss": 2.7,
    }  # fmt: skip
    log = log_of(tmp_path)
    log.write(10, values)
    log.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 10, **values}]
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert set(board.Tags()["scalars"]) == {
        "loss/train", "loss/validation", "loss by source/text", "optimizer/lr", "grad norm/total", "grad norm/query",
        "grad norm/head norm", "lambda/layer 0", "lambda/layer 1", "head norm gain/layer 0", "head norm gain/layer 1",
        "speed/tokens per second", "speed/mfu", "memory/bytes",
    }  # fmt: skip
    (event,) = board.Scalars("grad norm/query")
    assert (event.step, event.value) == (10, pytest.approx(0.3))


def test_what_has_no_group_is_written_under_its_name():
    assert scalars({"brand_new": 1, "note": "text", "nothing": None}) == [("brand_new", 1)]


def test_resuming_drops_what_came_after_the_checkpoint_and_what_was_cut(tmp_path):
    log = log_of(tmp_path)
    for step in range(1, 6):
        log.write(step, {"loss": float(step)})
    log.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5]
    log = log_of(tmp_path, 3)
    log.note(3, "resumed")
    log.write(4, {"loss": 40.0})
    log.close()
    kept = [(line["step"], line.get("loss")) for line in read_metrics(tmp_path / "metrics.jsonl")]
    assert kept == [(1, 1.0), (2, 2.0), (3, 3.0), (3, None), (4, 40.0)]
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in board.Scalars("loss/train")] == [(1, 1), (2, 2), (3, 3), (4, 40)]


def test_a_run_that_begins_again_begins_with_an_empty_file(tmp_path):
    """A run killed before its first checkpoint must not log step 0 twice."""
    for _ in range(2):
        log = log_of(tmp_path)
        log.write(0, {"validation_loss": 6.0})
        log.write(1, {"loss": 6.0})
        log.close()
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1]


def test_a_line_that_is_no_line_ends_the_reading(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n\xff\xfe\x00garbage\n{"step": 3}\n')
    assert read_metrics(path) == [{"step": 1}]
    path.write_text('{"step": 1}\n[1]\n{"step": 3}\n')
    assert read_metrics(path) == [{"step": 1}]
    assert read_metrics(tmp_path / "nothing") == []


def test_each_layer_raises_one_alarm_also_after_a_resume(tmp_path, caplog):
    log = log_of(tmp_path)
    with caplog.at_level(logging.WARNING):
        log.write(1, {"lambda": [0.5, 1.2, 0.3]})
        log.write(2, {"lambda": [0.5, 1.3, -0.1]})
        log.close()
        again = log_of(tmp_path, 2)
        again.write(3, {"lambda": [1.5, 1.3, -0.1]})
        again.close()
    assert [record.getMessage() for record in caplog.records] == [
        "step 1: lambda of layer 1 is 1.200, outside 0 to 1",
        "step 2: lambda of layer 2 is -0.100, outside 0 to 1",
        "step 3: lambda of layer 0 is 1.500, outside 0 to 1",
    ]


def test_other_ranks_write_nothing(tmp_path):
    log = log_of(tmp_path, active=False)
    log.write(1, {"loss": 1.0})
    log.note(1, "text")
    log.flush()
    log.close()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_names_the_folder(tmp_path):
    class Full:
        def write(self, text):
            raise OSError(errno.ENOSPC, "No space left on device")

        def close(self):
            pass

    log = log_of(tmp_path)
    log._file.close()
    log._file = Full()
    with pytest.raises(DiskError, match=rf"metrics\.jsonl at step 7 could not be written in {tmp_path}: the disk or"):
        log.write(7, {"loss": 1.0})
    log.close()


def test_the_rewrite_at_a_resume_is_whole_or_not_there(tmp_path, monkeypatch):
    log = log_of(tmp_path)
    log.write(1, {"loss": 1.0})
    log.close()

    def crash(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("os.replace", crash)
    with pytest.raises(OSError, match="Input/output error"):
        log_of(tmp_path, 1)
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": 1.0}]


def test_the_list_of_metrics_is_the_documented_one():
    from pathlib import Path

    text = (Path(__file__).parents[2] / "docs" / "telemetry.md").read_text()
    documented = {line.split("`")[1] for line in text.splitlines() if line.startswith("| `")}
    assert documented == {"step", "note", DIGEST, *GROUPS}
    assert json.loads(text.split("```json\n")[1].split("```")[0])["step"] == 200


def sharded_numbers(rank, way, folder):
    """One of two processes: the numbers of the ``model`` fixture when it is sharded over both."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = DiffTransformerForCausalLM(preset("debug", head_norm_init=0.5))
    mesh = init_device_mesh("cpu", (2,))
    if way == "fsdp":
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:  # tensors whole on each process beside tensors that are split
        plan = {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
        parallelize_module(model, mesh, {f"model.layers.*.mlp.{name}": style for name, style in plan.items()})
    backward(model)
    numbers = {"norms": gradient_norms(model), "gains": head_norm_gains(model), "lambda": layer_lambdas(model)}
    (folder / f"{rank}.json").write_text(json.dumps(numbers))
    dist.destroy_process_group()


@pytest.mark.parametrize("way", ["fsdp", "tensor parallel"])
def test_numbers_of_a_sharded_model_are_those_of_the_whole_on_every_rank(model, way, tmp_path):
    backward(model)
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=sharded_numbers, args=(rank, way, tmp_path)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    for rank in range(2):
        numbers = json.loads((tmp_path / f"{rank}.json").read_text())
        assert numbers["norms"] == pytest.approx(gradient_norms(model), rel=1e-4)
        assert numbers["gains"] == pytest.approx(head_norm_gains(model))
        assert numbers["lambda"] == pytest.approx(layer_lambdas(model))
