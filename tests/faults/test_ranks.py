"""One of two processes of a run is killed: the other ends in words, and one process goes on."""

import time
from collections import Counter

import pytest
from processes import STRATEGIES, assert_same_training, job, logged, run_together

from diff_transformer.lab.recipes import recipe
from diff_transformer.train.checkpoint import latest_checkpoint, read_manifest
from diff_transformer.train.config import override
from diff_transformer.train.loop import train

IN_PARTS = ["train.parallel.sharded_checkpoints=true", "train.checkpoint_async=true"]
pytestmark = pytest.mark.faults
STALL = 20  # seconds


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "tp"])
def test_a_killed_rank(texts, tmp_path, reliability, kind):
    base = [f"data.corpus={texts}", "data.max_bytes=null", "train.log_every=1", "train.checkpoint_every=3"]
    train(override(recipe("debug"), base), tmp_path / "one")
    spread = [*base, *STRATEGIES[kind], f"train.parallel.stall_seconds={STALL}"]
    outcomes, slowest = Counter(), 0.0
    for rank, step in ((0, 8), (1, 8), (0, 13), (1, 13)):
        folder = tmp_path / f"{rank} {step}"
        raised, codes, printed = run_together(tmp_path, [job(folder, spread, kill=[rank, step])])
        seconds = time.time() - folder.with_name(folder.name + ".killed").stat().st_mtime
        slowest = max(slowest, seconds)
        said = (raised[1 - rank] or [""])[0] + printed
        print(rank, step, codes, round(seconds, 1), raised, printed[-2000:])
        assert codes[rank] == -9
        assert seconds < STALL
        assert "continue with --resume" in said
        train(override(recipe("debug"), base), folder, resume=True)
        assert_same_training(folder, tmp_path / "one")
        outcomes["the other ends in words, and one process goes on with equal losses"] += 1
    names = {"ddp": "DDP", "fsdp": "FSDP2", "tp": "tensor parallel"}
    reliability("One of two processes killed", names[kind], outcomes)


def test_a_rank_killed_while_parts_are_written(texts, tmp_path, reliability):
    """Before its part of the second checkpoint, in the middle, after it; rank 0 also before and after the rename."""
    every, outcomes = 3, Counter()
    base = [f"data.corpus={texts}", "data.max_bytes=null", "train.log_every=1", f"train.checkpoint_every={every}"]
    train(override(recipe("debug"), base), tmp_path / "one")
    spread = [*base, *STRATEGIES["fsdp"], *IN_PARTS, "train.parallel.stall_seconds=600"]
    moments = [(rank, *moment) for rank in (0, 1) for moment in (("write_data", 2), ("write", 600), ("read_back", 2))]
    for rank, name, call in [*moments, *((0, name, 2) for name in ("write_manifest", "_replace", "_forget_older"))]:
        folder = tmp_path / f"{rank} {name}"
        raised, codes, printed = run_together(tmp_path, [job(folder, spread, **{"kill writing": [rank, name, call]})])
        print(rank, name, codes, raised, printed[-2000:])
        assert codes[rank] == -9
        assert "continue with --resume" in (raised[1 - rank] or [""])[0] + printed
        last = latest_checkpoint(folder)
        saved = 0 if last is None else read_manifest(last)["step"]
        assert len(logged(folder, "loss")) - saved <= 2 * every
        train(override(recipe("debug"), base), folder, resume=True)
        assert_same_training(folder, tmp_path / "one")
        outcomes["the other ends in words, and one process goes on with equal losses"] += 1
    reliability("One of two processes killed", "FSDP2, while checkpoints are written in parts", outcomes)
