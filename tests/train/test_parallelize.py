from typing import Any

import pytest
import torch

from diff_transformer.errors import UserError
from diff_transformer.lab.recipes import recipe
from diff_transformer.model.config import DiffTransformerConfig
from diff_transformer.train import launch
from diff_transformer.train.config import override
from diff_transformer.train.launch import start_processes
from diff_transformer.train.loop import train
from diff_transformer.train.metrics import read_metrics
from diff_transformer.train.parallelize import check_split, make_fabric
from diff_transformer.train.training_data import BatchPart, load_training_data


@pytest.fixture
def torchrun(monkeypatch):
    """Pretend that torchrun started ``world`` processes, ``here`` of them on this machine."""

    def started(world: int, here: int):
        for name, value in {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": here, "TORCHELASTIC_RUN_ID": "test"}.items():
            monkeypatch.setenv(name, str(value))

    return started


def config(*settings: str):
    return override(recipe("debug"), [f"train.{setting}" for setting in settings]).validate()


def test_shares_are_the_batch():
    rows = torch.arange(12)
    assert torch.equal(torch.cat([BatchPart(rank, 4).of(rows) for rank in range(4)]), rows)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["parallel.strategy=zero"], r"train\.parallel\.strategy is 'zero'; accepted: 'auto', 'single', 'ddp', 'fsdp'"),
        (["parallel.tensor_parallel=0"], r"train\.parallel\.tensor_parallel is 0; it must be positive"),
        (["parallel.stall_seconds=-1"], r"train\.parallel\.stall_seconds is -1\.0; it must not be negative"),
        (["parallel.strategy=ddp", "parallel.sharded_checkpoints=true"], "needs strategy 'fsdp', not 'ddp'"),
        (["parallel.strategy=ddp", "parallel.replicas=2"], "replicas is 2, which needs strategy 'fsdp', not 'ddp'"),
        (["loss_chunk=-5"], r"train\.loss_chunk is -5; it must not be negative"),
    ],
)
def test_what_can_never_be(settings, message):
    with pytest.raises(ValueError, match=message):
        config(*settings)


@pytest.mark.parametrize(
    ("world", "settings", "message"),
    [
        (4, ["parallel.devices=2"], "devices is 2, but torchrun started 4; give 4, or 0 for whatever it starts"),
        (4, ["parallel.num_nodes=2"], "num_nodes is 2, but torchrun started 1"),
        (4, ["parallel.strategy=single"], "'single', but there are 4 processes; give 'ddp' or 'fsdp'"),
        (4, ["parallel.replicas=3"], r"replicas is 3, which does not divide 4, the processes"),
        (
            4,
            ["parallel.tensor_parallel=3"],
            "tensor_parallel is 3 and context_parallel 1: groups of 3, which do not divide the 4 processes; start 6",
        ),
        (2, ["parallel.strategy=ddp", "parallel.tensor_parallel=2"], "'ddp', which excludes tensor_parallel=2"),
        (3, [], r"batch_size 8 is not divisible by 3: 3 processes with rows of their own, train\.accumulate 1"),
        (4, ["accumulate=4"], "not divisible by 16: 4 processes .*accumulate 4; give a multiple of 16"),
        (2, ["precision=64-true", "parallel.strategy=fsdp"], "precision is '64-true'; .*'fsdp' accepted: '32-true'"),
    ],
)
def test_what_the_processes_do_not_allow(torchrun, world, settings, message):
    torchrun(world, world)
    with pytest.raises(ValueError, match=message):
        make_fabric(config(*settings))


def test_one_process_where_several_are_asked_for(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    several = config("parallel.devices=2", "parallel.num_nodes=4")
    line = r"8 processes, this is one alone; .*torchrun .*--nnodes=4 --nproc-per-node=2 -m diff_transformer train"
    with pytest.raises(ValueError, match=line):
        train(several, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_command_line_becomes_torchrun(monkeypatch, tmp_path):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    became = []
    monkeypatch.setattr(launch.os, "execv", lambda program, arguments: became.append(arguments[1:]))
    monkeypatch.setattr(launch.sys, "argv", ["diff-transformer", "train", "--out", "runs/a b"])
    start_processes(config("parallel.devices=2"), tmp_path)
    assert became == [
        [
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
            "-m",
            "diff_transformer",
            "train",
            "--out",
            "runs/a b",
        ]
    ]
    for settings in ([], ["parallel.devices=1"], ["parallel.devices=2", "parallel.num_nodes=2"]):
        start_processes(config(*settings), tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "test")
    start_processes(config("parallel.devices=2"), tmp_path)
    assert len(became) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["parallel.devices=3"], "batch_size 8 is not divisible by 3: 3 processes with rows of their own"),
        (["parallel.devices=2", "parallel.strategy=single"], "'single', but there are 2 processes"),
        (["parallel.devices=2", "parallel.strategy=fsdp", "precision=64-true"], "precision is '64-true'"),
        (["parallel.devices=2", "batch_size=-8"], "batch_size is -8"),
        (["parallel.devices=2", "initial_model=/nowhere"], "/nowhere, which holds no model"),
    ],
)
def test_what_each_process_would_refuse_is_refused_before_there_are_several(monkeypatch, tmp_path, settings, message):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setattr(launch.os, "execv", lambda *_: pytest.fail("the processes were started"))
    asked = override(recipe("debug"), [f"train.{setting}" for setting in settings])
    with pytest.raises(UserError, match=message):
        start_processes(asked, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_folder_that_is_taken_is_refused_before_there_are_several(monkeypatch, tmp_path):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    started = []
    monkeypatch.setattr(launch.os, "execv", lambda *_: started.append(1))
    config("parallel.devices=2").save(tmp_path / "config.json")
    with pytest.raises(UserError, match=r"holds a run already; resume it \(--resume\)"):
        start_processes(config("parallel.devices=2"), tmp_path)
    assert not started
    start_processes(config("parallel.devices=2"), tmp_path, resume=True)
    assert started


@pytest.mark.parametrize(
    ("fields", "ways", "message"),
    [
        ({}, 4, "tensor_parallel is 4, which does not divide 2 output heads, 2 value heads of this model; a head"),
        ({"attention": "softmax"}, 8, "does not divide 4 output heads, 4 value heads, 4 key heads of this model"),
        ({"num_attention_heads": 8, "num_key_value_heads": 2}, 2, "does not divide 1 value heads"),
        (
            {"attention": "grouped_diff", "num_attention_heads": 12},
            2,
            "does not divide 9 output heads, 3 value heads, 3 noise",
        ),
        ({"vocab_size": 511}, 2, "does not divide 511 words of vocab_size"),
        ({"hidden_act": "poly_norm"}, 2, "norm over the whole feed-forward width, which tensor_parallel=2 splits"),
    ],
)
def test_what_tensor_parallel_cannot_split(fields, ways, message):
    own: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        **fields,
    }
    with pytest.raises(ValueError, match=message):
        check_split(DiffTransformerConfig(**own), ways)
    check_split(DiffTransformerConfig(**own), 1)


def test_settings_that_change_no_loss(tmp_path):
    short, runs = ["steps=4", "log_every=1"], {}
    training_data = load_training_data(config(*short))
    for settings in ([], ["prefetch=0"], ["loss_chunk=50", "activation_checkpointing=true"]):
        folder = tmp_path / " ".join(["run", *settings])
        train(config(*short, *settings), folder, data=training_data)
        runs[folder] = [
            line for line in read_metrics(folder / "metrics.jsonl") if "validation_loss" in line or "loss" in line
        ]
        assert all(line["mfu"] > 0 for line in runs[folder][1:])
    plain, *others = ([(line.get("loss"), line.get("validation_loss")) for line in lines] for lines in runs.values())
    assert others[0] == plain  # what runs ahead changes nothing
    losses, expected = ([loss for pair in pairs for loss in pair if loss is not None] for pairs in (others[1], plain))
    assert losses == pytest.approx(expected, rel=1e-6)
