"""One of two processes of a run is killed: the other ends, and one process goes on."""

import time
from collections import Counter

import pytest
from processes import STRATEGIES, assert_same_training, job, run_together

from diff_transformer.lab.recipes import recipe
from diff_transformer.train.config import override
from diff_transformer.train.loop import train

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
        print(rank, step, codes, round(seconds, 1), raised, printed[-2000:])
        assert codes[rank] == -9
        assert seconds < STALL
        assert codes[1 - rank] != 0 or raised[1 - rank]
        train(override(recipe("debug"), base), folder, resume=True)
        assert_same_training(folder, tmp_path / "one")
        outcomes["the other ends, and one process goes on with equal losses"] += 1
    names = {"ddp": "DDP", "fsdp": "FSDP2", "tp": "tensor parallel"}
    reliability("One of two processes killed", names[kind], outcomes)
