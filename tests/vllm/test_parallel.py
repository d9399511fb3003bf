"""Tensor and pipeline parallel on two processes of this machine, through vLLM's own executor."""

import pytest
import torch
from engine_models import expected, prompts, run_parallel

from diff_transformer.model.convert import convert_folder

CASES = {
    "diff": {"attention": "diff", "num_key_value_heads": 4},
    "diff, keys repeated": {"attention": "diff"},
    "softmax": {"attention": "softmax"},
    "diff_v2": {"attention": "diff_v2"},
    "grouped_diff": {"attention": "grouped_diff", "num_attention_heads": 8, "num_key_value_heads": 4},
    "poly norm": {"attention": "diff", "hidden_act": "poly_norm"},
}


@pytest.mark.parametrize("case", CASES)
def test_tensor_parallel(case, save_model, tmp_path):
    """Each process has half of the heads, and the answers are those of one."""
    model, folder = save_model(**CASES[case])
    rows = prompts(1, 33, 90)
    found = run_parallel(folder, tmp_path, rows, tensor_parallel_size=2)
    assert found["answers"] == expected(model, rows)
    heads, d = model.config.heads, model.config.head_dim
    keys = max(1, heads.values // 2) * (d * heads.keys // heads.values + heads.value_dim)
    assert found["shares"] == [[2, heads.queries * d // 2 + keys, heads.outputs * heads.value_dim // 2]] * 2


def test_a_published_model_in_tensor_parallel(save_model, tmp_path):
    model, folder = save_model(attention="diff", num_key_value_heads=4, lambda_depth_offset=-1, hidden_act="poly_norm")
    convert_folder(folder, tmp_path / "motif", target="motif")
    rows = prompts(1, 33, 90)
    assert run_parallel(tmp_path / "motif", tmp_path, rows, tensor_parallel_size=2)["answers"] == expected(model, rows)


@pytest.mark.parametrize("attention", ["diff", "softmax", "diff_v2", "grouped_diff"])
def test_pipeline_parallel(attention, save_model, tmp_path):
    """Each process loads its stage; the hidden states handed on and the logits are the whole model's.

    The stages run without the engine: vLLM 0.32 does not generate with two stages on a CPU, and its own Llama hangs.
    """
    model, folder = save_model(**CASES[attention])
    rows = prompts(40)
    found = run_parallel(folder, tmp_path, rows, pipeline_parallel_size=2)
    assert [layers for layers, *_ in found["shares"]] == [1, 1]
    with torch.no_grad():
        wanted = model(torch.tensor(rows), output_hidden_states=True)
    handed, logits = (torch.tensor(found["stages"][i][name]) for i, name in enumerate(("handed", "logits")))
    torch.testing.assert_close(handed, wanted.hidden_states[1][0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(logits[:, : model.config.vocab_size], wanted.logits[0], atol=1e-4, rtol=1e-4)
