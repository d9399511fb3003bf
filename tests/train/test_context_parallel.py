"""One sequence over several processes: pieces of a row, and exactness in fp64 (``context_worker.py``)."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from diff_transformer.data.mixture import IGNORED
from diff_transformer.train.context_parallel import SequencePart
from diff_transformer.train.training_data import model_inputs

WORKER = Path(__file__).with_name("context_worker.py")


def test_pieces_make_up_the_row_and_share_its_causal_work():
    row = torch.arange(24)[None]
    parts = [SequencePart(rank, 4).of(row) for rank in range(4)]
    assert torch.equal(torch.cat(parts, 1).sort().values, row)
    assert len({(part + 1).sum().item() for part in parts}) == 1  # a token sees as many keys as its position says
    assert SequencePart().of(row) is row


@pytest.mark.parametrize("documents", ["joined", "separate"])
def test_targets_weights_and_positions_are_cut_from_the_whole_row(documents):
    ids = torch.randint(1, 9, (2, 24))
    ids[0, 9] = end = 0
    inputs, targets, weights = model_inputs(ids, documents, end), ids[:, 1:], torch.rand(2, 23)
    found = {}
    for rank in range(3):
        context = SequencePart(rank, 3)
        mine, mine_targets, mine_weights = context.cut(inputs, targets, weights)
        at = context.of(torch.arange(24)[None])[0]
        for i, position in enumerate(at.tolist()):
            found[position] = (mine["input_ids"][:, i], mine_targets[:, i], mine_weights[:, i])
            start = 10 if documents == "separate" and position > 9 else 0
            assert mine["position_ids"][:, i].tolist() == [position - start, position]
    assert sorted(found) == list(range(24))
    for position in range(23):
        token, target, weight = found[position]
        assert torch.equal(token, ids[:, position])
        assert torch.equal(target, ids[:, position + 1])
        assert torch.equal(weight, weights[:, position])
    assert found[23][1].tolist() == [IGNORED, IGNORED]
    assert found[23][2].tolist() == [0, 0]


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_output_and_gradients_are_those_of_the_whole_row(processes, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(processes)}
    command = [sys.executable, str(WORKER), str(tmp_path)]
    started = [subprocess.Popen(command, env={**shared, "RANK": str(rank)}) for rank in range(processes)]
    assert [process.wait(250) for process in started] == [0] * processes
    for rank in range(processes):
        errors = json.loads((tmp_path / f"{rank}.json").read_text())
        assert len(errors) == 16
        assert max(errors.values()) < 1e-14, errors
