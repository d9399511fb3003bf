"""Several processes (gloo, CPU) against one: DDP, FSDP2, tensor parallel, resuming over another number of them."""

import os
from functools import cache
from pathlib import Path

import pytest
from processes import SECONDS, STRATEGIES, assert_same_training, job, logged, run_together
from transformers import AutoModelForCausalLM

from diff_transformer.lab.recipes import recipe
from diff_transformer.train.config import override
from diff_transformer.train.loop import Interrupted, train
from diff_transformer.train.training_data import load_training_data

IN_BACKGROUND = ["train.checkpoint_async=true"]
pytestmark = pytest.mark.timeout(2 * SECONDS)


@pytest.fixture(scope="module")
def base(texts):
    """Settings of every run here: 20 steps, each logged."""
    return [f"data.corpus={texts}", "data.max_bytes=null", "train.log_every=1"]


@cache
def _training_data(settings: tuple[str, ...]):
    return load_training_data(override(recipe("debug"), list(settings)))


def run_alone(folder: Path, settings: list[str], *, resume: bool = False, stop_at: int | None = None):
    def progress(step: int, values: dict):
        if step == stop_at:
            os.kill(os.getpid(), 15)

    config = override(recipe("debug"), settings)
    data = (setting for setting in settings if setting.startswith(("data.", "model.")))
    training_data = _training_data(tuple(data))
    if stop_at is None:
        train(config, folder, resume=resume, data=training_data)
        return
    with pytest.raises(Interrupted):
        train(config, folder, resume=resume, progress=progress, data=training_data)


def test_two_processes_train_like_one(base, tmp_path):
    """DDP in two passes a step, FSDP2 in four with recomputation and a chunked loss, HSDP in four, tensor parallel,
    context parallel; FSDP2 with one process; DDP stopped by SIGTERM to rank 1, resumed alone, as is FSDP2 with
    checkpoints in the background; a run begun alone and resumed under FSDP2, in passes; a stall."""
    run_alone(tmp_path / "one", base)
    run_alone(tmp_path / "begun alone", base, stop_at=10)
    memory = ["train.activation_checkpointing=full", "train.loss_chunk=100", "train.micro_batch_size=1"]
    background = [*base, *STRATEGIES["fsdp"], *IN_BACKGROUND, "train.checkpoint_every=3"]
    slow = [*base, *STRATEGIES["ddp"], "train.parallel.stall_seconds=2"]
    jobs = [
        job(tmp_path / "ddp", [*base, *STRATEGIES["ddp"], "train.micro_batch_size=2"]),
        job(tmp_path / "fsdp", [*base, *STRATEGIES["fsdp"], *memory]),
        job(tmp_path / "hsdp", [*base, *STRATEGIES["hsdp"], "train.micro_batch_size=2"]),
        job(tmp_path / "tp", [*base, *STRATEGIES["tp"]]),
        job(tmp_path / "context", [*base, *STRATEGIES["context"], "train.micro_batch_size=4"]),
        job(tmp_path / "begun by two", [*base, *STRATEGIES["ddp"]], interrupt=[1, 10]),
        job(tmp_path / "begun by fsdp", background, interrupt=[1, 10]),
        job(tmp_path / "begun alone", [*base, *STRATEGIES["fsdp"], "train.micro_batch_size=3"], resume=True),
        job(tmp_path / "slow", slow, sleep=[1, 7, 60]),
    ]
    raised, codes, printed = run_together(tmp_path, jobs)
    for of_rank in raised:
        assert [text and text[:11] for text in of_rank[:8]] == [*[None] * 5, *["Interrupted"] * 2, None], printed
    for name in ("begun by two", "begun by fsdp"):
        run_alone(tmp_path / name, base, resume=True)
    (of_one,), _, printed_by_one = run_together(
        tmp_path, [job(tmp_path / "alone", [*base, *STRATEGIES["fsdp"]])], processes=1
    )
    assert of_one == [None], printed_by_one
    for name in ("ddp", "fsdp", "hsdp", "tp", "context", "alone", "begun by two", "begun by fsdp", "begun alone"):
        assert_same_training(tmp_path / name, tmp_path / "one")
        AutoModelForCausalLM.from_pretrained(tmp_path / name / "model")
    assert 75 in codes, printed  # the other may find first that this one has ended
    assert printed.count(") is in 'data' of step 8") == 1, printed
    assert "error: no process moved for 2 s: rank 1 (" in printed


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        ["model.attention=softmax"],
        ["model.attention=diff_v2", "model.head_norm=true", "model.head_norm_init=1.0"],
        ["model.attention=diff_v3", "model.head_norm=true", "model.head_norm_init=1.0"],
        ["model.attention=gated"],
        ['model.core={"gate": "normed"}'],
        ["model.attention=grouped_diff", "model.num_attention_heads=8"],
        ["model.attention=dint"],
        [
            "model.num_attention_heads=8",
            "model.num_key_value_heads=4",
            "model.tie_word_embeddings=false",
            "data.loss=sources",
        ],
        ["data.documents=separate", "model.head_norm=no_weight", "model.head_norm_init=1.0"],
    ],
    ids=["softmax", "diff_v2", "diff_v3", "gated", "gate", "grouped_diff", "dint", "gqa, untied, sources", "documents"],
)
def test_every_attention_is_spread_right(base, settings, tmp_path):
    run_alone(tmp_path / "one", [*base, *settings])
    kinds = ["ddp", "fsdp", "tp", *([] if "model.attention=dint" in settings else ["context"])]
    jobs = [job(tmp_path / kind, [*base, *settings, *STRATEGIES[kind]]) for kind in kinds]
    run_together(tmp_path, jobs)
    for kind in kinds:
        assert_same_training(tmp_path / kind, tmp_path / "one")


@pytest.mark.slow
def test_context_parallel_with_everything_else(base, tmp_path):
    """Over four processes: rows of four; with tensor parallel; with FSDP2, recomputation and passes, begun and resumed
    alone; packed documents and a window."""
    four, two = (["train.parallel.strategy=fsdp", f"train.parallel.context_parallel={n}"] for n in (4, 2))
    packed = [*base, "data.documents=separate", "model.sliding_window=24"]
    run_alone(tmp_path / "one", base)
    run_alone(tmp_path / "packed", packed)
    run_alone(tmp_path / "begun alone", base, stop_at=10)
    memory = ["train.activation_checkpointing=selective", "train.loss_chunk=50", "train.micro_batch_size=2"]
    jobs = [
        job(tmp_path / "four", [*base, "train.parallel.context_parallel=4"]),
        job(tmp_path / "with tp", [*base, *two, "train.parallel.tensor_parallel=2"]),
        job(tmp_path / "begun alone", [*base, *two, *memory, *IN_BACKGROUND], resume=True),
        job(tmp_path / "begun by four", [*base, *two], interrupt=[3, 10]),
        job(tmp_path / "packed by four", [*packed, *four]),
    ]
    raised, _, printed = run_together(tmp_path, jobs, processes=4)
    expected = [None, None, None, "Interrupted", None]
    for of_rank in raised:
        assert [text and text[:11] for text in of_rank] == expected, printed
    run_alone(tmp_path / "begun by four", base, resume=True)
    for name in ("four", "with tp", "begun alone", "begun by four"):
        assert_same_training(tmp_path / name, tmp_path / "one")
    assert_same_training(tmp_path / "packed by four", tmp_path / "packed")


@pytest.mark.slow
def test_a_run_goes_on_over_any_number_of_processes(base, tmp_path):
    """Begun -> resumed: by 2 under tensor parallel -> alone under FSDP2; by 2 under FSDP2 -> by 4 in a 2 x 2
    grid; by 4 in a grid -> by 2 under DDP; by 4 in two replicas -> alone; alone -> by 2 under tensor parallel."""
    run_alone(tmp_path / "one", base)
    run_alone(tmp_path / "1 to tp", base, stop_at=10)
    both, passes = STRATEGIES["fsdp and tp"], "train.micro_batch_size=2"
    run_together(
        tmp_path,
        [
            job(tmp_path / "tp to 1", [*base, *STRATEGIES["tp"]], interrupt=[0, 10]),
            job(tmp_path / "fsdp to grid", [*base, *STRATEGIES["fsdp"], *IN_BACKGROUND], interrupt=[1, 10]),
            job(tmp_path / "1 to tp", [*base, *STRATEGIES["tp"]], resume=True),
        ],
    )
    run_together(
        tmp_path,
        [
            job(tmp_path / "fsdp to grid", [*base, *both, *IN_BACKGROUND], resume=True),
            job(tmp_path / "grid to ddp", [*base, *both, *IN_BACKGROUND], interrupt=[3, 10]),
            job(tmp_path / "replicas to 1", [*base, *STRATEGIES["hsdp"], *IN_BACKGROUND, passes], interrupt=[2, 10]),
            job(tmp_path / "replicas and tp", [*base, *STRATEGIES["hsdp"], *STRATEGIES["tp"]]),
        ],
        processes=4,
    )
    run_together(tmp_path, [job(tmp_path / "tp to 1", [*base, *STRATEGIES["fsdp"]], resume=True)], processes=1)
    run_together(tmp_path, [job(tmp_path / "grid to ddp", [*base, *STRATEGIES["ddp"]], resume=True)])
    run_alone(tmp_path / "replicas to 1", base, resume=True)
    for name in ("tp to 1", "fsdp to grid", "1 to tp", "grid to ddp", "replicas to 1", "replicas and tp"):
        assert_same_training(tmp_path / name, tmp_path / "one")


@pytest.mark.slow
def test_mixed_precision_and_compilation_over_processes(base, tmp_path):
    """bf16 rounds differently where weights are gathered in bf16; the losses stay within what bf16 rounds."""
    low = [*base, "train.precision=bf16-mixed", "train.loss_chunk=100"]
    run_alone(tmp_path / "one", base)
    run_alone(tmp_path / "one low", low)
    kinds = ["ddp", "fsdp", "tp"]
    jobs = [job(tmp_path / f"{kind} low", [*low, *STRATEGIES[kind]]) for kind in kinds]
    compiled, selective = [*base, "train.compile=true"], "train.activation_checkpointing=selective"
    jobs += [
        job(tmp_path / "compiled", [*compiled, *STRATEGIES["fsdp"]]),
        job(tmp_path / "compiled replicas", [*compiled, *STRATEGIES["hsdp"]]),
        job(tmp_path / "compiled, selective", [*compiled, *STRATEGIES["fsdp"], selective]),
    ]
    raised, _, printed = run_together(tmp_path, jobs)
    assert raised == [[None] * 6] * 2, printed
    for kind in kinds:
        assert logged(tmp_path / f"{kind} low", "loss") == pytest.approx(
            logged(tmp_path / "one low", "loss"), rel=2**-8
        )
    for name in ("compiled", "compiled replicas", "compiled, selective"):
        assert logged(tmp_path / name, "loss") == pytest.approx(logged(tmp_path / "one", "loss"), abs=1e-4)
