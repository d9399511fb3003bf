"""``tp_plan="auto"`` in two processes gives the logits and the text of one, for every variant."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tensor_parallel_worker import outputs

from diff_transformer import DiffTransformerForCausalLM
from diff_transformer.model.config import ATTENTIONS
from diff_transformer.model.presets import preset

WORKER = Path(__file__).parents[1] / "helpers" / "tensor_parallel_worker.py"
SIZES = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4, "embedding_initializer_range": 1.0}


def together(*folders: Path) -> tuple[list[int], str]:
    """Exit codes of two processes that load every folder, and what they printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    started = [
        subprocess.Popen(
            [sys.executable, str(WORKER), *map(str, folders)], text=True,
            env={**os.environ, **shared, "CUDA_VISIBLE_DEVICES": "", "RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        ) for rank in "01"
    ]  # fmt: skip
    printed = [process.communicate(timeout=500)[0] for process in started]
    return [process.returncode for process in started], "\n".join(printed)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_processes_give_the_logits_and_the_text_of_one(tmp_path):
    models = {}
    for attention in ATTENTIONS:
        torch.manual_seed(0)
        models[attention] = DiffTransformerForCausalLM(preset("debug", attention=attention, **SIZES)).eval()
        models[attention].save_pretrained(tmp_path / attention)
    codes, printed = together(*(tmp_path / attention for attention in models))
    assert codes == [0, 0], printed
    for attention, model in models.items():
        found, expected = torch.load(tmp_path / attention / "outputs.pt", weights_only=True), outputs(model)
        torch.testing.assert_close(found["logits"], expected["logits"], rtol=1e-5, atol=1e-4, msg=attention)
        assert torch.equal(found["tokens"], expected["tokens"])
        assert 2 * found["share"] == model.model.layers[0].self_attn.q_proj.out_features


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_processes_that_would_share_a_head_are_refused(tmp_path):
    config = preset("debug", num_key_value_heads=2)  # one pair
    DiffTransformerForCausalLM(config).save_pretrained(tmp_path / "model")
    codes, printed = together(tmp_path / "model")
    assert 0 not in codes
    assert "8 channels, which are no whole heads of width 16: tensor parallel has split a head" in printed
