"""One of several training processes: ``python parallel_worker.py jobs.json``, with torchrun's variables set.

A job is {"folder", "set": assignments, "resume", "interrupt": [rank, step], "kill": [rank, step],
"sleep": [rank, step, seconds]}; what it raised is written to jobs.json.RANK,
and FOLDER.killed when a rank was killed.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from diff_transformer.durable import write_whole
from diff_transformer.lab.recipes import recipe
from diff_transformer.train.config import RunConfig, override
from diff_transformer.train.loop import train
from diff_transformer.train.training_data import load_training_data


class Mixture:
    """A mixture before whose batch of one step something happens."""

    def __init__(self, mixture, step: int, happens: Callable[[], None]):
        self.mixture, self.step, self.happens = mixture, step, happens

    def batch(self, step: int, *share: int):
        if step == self.step:
            self.happens()
        return self.mixture.batch(step, *share)


def kill_this_process(mark: Path) -> None:
    mark.touch()
    os.kill(os.getpid(), signal.SIGKILL)


_made: dict[str, Any] = {}


def shared_training_data(config: RunConfig) -> Any:
    """``load_training_data(config)``, once for all jobs with the same data."""
    values = config.to_dict()
    key = json.dumps([values["data"], values["model"], config.train.batch_size])
    if key not in _made:
        _made[key] = load_training_data(config)
    return _made[key]


def run(job: dict, rank: int) -> str | None:
    config = override(recipe("debug"), job["set"])
    training_data = shared_training_data(config)
    if job.get("sleep", [None])[0] == rank:
        _, step, seconds = job["sleep"]
        training_data = replace(
            training_data, mixture=Mixture(training_data.mixture, step, lambda: time.sleep(seconds))
        )
    if job.get("interrupt", [None])[0] == rank:
        stop = partial(os.kill, os.getpid(), signal.SIGTERM)
        training_data = replace(training_data, mixture=Mixture(training_data.mixture, job["interrupt"][1], stop))
    if job.get("kill", [None])[0] == rank:
        die = partial(kill_this_process, Path(job["folder"] + ".killed"))
        training_data = replace(training_data, mixture=Mixture(training_data.mixture, job["kill"][1], die))
    try:
        train(config, Path(job["folder"]), resume=job.get("resume", False), data=training_data)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return None


def main() -> None:
    torch.set_num_threads(1)
    path, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    outcomes = []
    for job in json.loads(path.read_text()):
        outcomes.append(run(job, rank))
        write_whole(Path(f"{path}.{rank}"), json.dumps(outcomes))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
