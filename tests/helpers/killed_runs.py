"""Runs in child processes that are killed, and whether a resumed run is the same, byte for byte."""

import logging
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file

from diff_transformer.cli import main
from diff_transformer.train.checkpoint import latest_checkpoint
from diff_transformer.train.loop import train
from diff_transformer.train.metrics import read_metrics

OF_THE_MACHINE = ("tokens_per_second", "peak_memory_bytes")
FORK = multiprocessing.get_context("fork")


def history(folder: Path) -> list[dict]:
    lines = read_metrics(folder / "metrics.jsonl")
    return [{key: value for key, value in line.items() if key not in OF_THE_MACHINE} for line in lines]


def assert_same_run(folder: Path, other: Path):
    """Bit by bit: weights of the finished model, the last whole state of training, and every logged number."""
    weights = [(one / "model/model.safetensors").read_bytes() for one in (folder, other)]
    assert weights[0] == weights[1]
    (state,), (expected,) = (latest_checkpoint(run).glob("*.safetensors") for run in (folder, other))
    state, expected = load_file(state), load_file(expected)
    assert state.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in state.items())
    assert history(folder) == history(other)


def start(config, folder, training_data, steps=None) -> multiprocessing.Process:
    """Train in a child of this process, which has everything imported; go on with what is there.

    ``steps`` counts those that it has taken.
    """

    def count(step, values):
        if steps is not None:
            steps.value += 1

    def child():
        logging.disable()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        resume = (folder / "config.json").exists()
        train(config, folder, data=training_data, resume=resume, progress=count)

    process = FORK.Process(target=child)
    process.start()
    return process


def killed_and_resumed(config, folder, training_data, kills: int, a_step: float, seed: int) -> dict:
    """Kill a run -9 at ``kills`` random moments and let it finish; what the kills hit.

    Of five lives one ends at some moment of what the life before needed up to its first step; the others after 0 to 4
    steps and a random part of the next two, of about ``a_step`` seconds. So how fast the machine is does not decide
    where the kills fall.
    """
    draw, hit = random.Random(seed), {"kills": 0, "before the first step of a life": 0, "while one was written": 0}
    a_start = 0.0
    for life in range(kills):
        steps, few, born = FORK.Value("i", 0), draw.randint(0, 4), time.monotonic()
        process = start(config, folder, training_data, steps)
        if life % 5 == 1:
            end = born + draw.random() * a_start
        else:
            while steps.value == 0 and process.is_alive():
                time.sleep(0.001)
            a_start = time.monotonic() - born
            while steps.value <= few and process.is_alive():
                time.sleep(0.001)
            end = time.monotonic() + draw.random() * 3 * a_step  # the first steps of a life are slower
        while time.monotonic() < end and steps.value < few + 2:  # where the machine is faster than it was
            time.sleep(0.001)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL, f"ended by itself in life {life}"
        hit["kills"] += 1
        hit["before the first step of a life"] += steps.value == 0
        hit["while one was written"] += any((folder / "checkpoints").glob("*.tmp"))
    process = start(config, folder, training_data)
    process.join(120)
    assert process.exitcode == 0
    return hit


def pace(config, folder, training_data) -> float:
    """Train without a break; seconds of a step."""
    times = []
    train(config, folder, data=training_data, progress=lambda step, values: times.append(time.monotonic()))
    return (times[-1] - times[0]) / (len(times) - 1)


def in_child(action: Callable[[], object], said: Path | str = os.devnull) -> multiprocessing.Process:
    """Start ``action()`` in a child of this process, which has everything imported; what it says goes to a file."""

    def child():
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background ignores it
        for number in (1, 2):
            os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
        action()

    process = FORK.Process(target=child)
    process.start()
    return process


def start_command(arguments: list[str], said: Path) -> multiprocessing.Process:
    """``diff-transformer ARGUMENTS`` in such a child."""

    def command():
        sys.argv = ["diff-transformer", *arguments]
        main()

    said.write_text("")
    return in_child(command, said)


def until(condition, is_alive, seconds=250):
    """Wait for ``condition()`` while a process lives."""
    end = time.monotonic() + seconds
    while not condition():
        assert is_alive()
        assert time.monotonic() < end
        time.sleep(0.005)


def assert_words(outcome: tuple[int, str], *words: str):
    """A message that has one of ``words``, and no traceback."""
    code, said = outcome
    assert code not in (0, None), said
    assert "Traceback" not in said, said
    assert "error: " in said, said
    assert any(word in " ".join(said.split()) for word in words), said
