"""Tensor and pipeline parallel on two processes of this machine, through vLLM's own executor."""

import pytest
import torch
from engine_models import expected, prompts, run_parallel
from motif import write_motif

from diff_transformer.data.tokenizer import byte_tokenizer

CASES = {
    "diff": {"attention": "diff", "num_key_value_heads": 4},
    "diff, keys repeated": {"attention": "diff"},
    "softmax": {"attention": "softmax"},
    "diff_v2": {"attention": "diff_v2"},
    "grouped_diff": {"attention": "grouped_diff", "num_attention_heads": 8, "num_key_value_heads": 4},
    "poly norm": {"attention": "diff", "hidden_act": "poly_norm"},
}
PUBLISHED = {"attention": "diff", "num_key_value_heads": 4, "lambda_depth_offset": -1, "hidden_act": "poly_norm"}


ROWS, ROW = prompts(1, 33, 90), prompts(40)
TENSOR, PIPELINE = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}
VARIANTS = ("diff", "softmax", "diff_v2", "grouped_diff")


@pytest.fixture(scope="module")
def found(save_model, tmp_path_factory):
    """The results of the engines, by case and size: one process starts all, for each takes seconds to import vLLM."""
    scratch, folders = tmp_path_factory.mktemp("parallel"), {case: save_model(**CASES[case])[1] for case in CASES}
    write_motif(save_model(**PUBLISHED)[0], scratch / "motif")
    byte_tokenizer().save_pretrained(scratch / "motif")
    requests = {
        (case, "tensor"): (folder, TENSOR, ROWS) for case, folder in (*folders.items(), ("motif", scratch / "motif"))
    }
    requests |= {(case, "pipeline"): (folders[case], PIPELINE, ROW) for case in VARIANTS}
    asked = [{"folder": str(folder), "options": options, "rows": rows} for folder, options, rows in requests.values()]
    return dict(zip(requests, run_parallel(scratch, asked), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_tensor_parallel(case, save_model, found):
    """Each process has half of the heads, and the answers are those of one."""
    model, answer = save_model(**CASES[case])[0], found[case, "tensor"]
    assert answer["answers"] == expected(model, ROWS)
    heads, d = model.config.heads, model.config.head_dim
    keys = max(1, heads.values // 2) * (d * heads.keys // heads.values + heads.value_dim)
    assert answer["shares"] == [[2, heads.queries * d // 2 + keys, heads.outputs * heads.value_dim // 2]] * 2


def test_a_published_model_in_tensor_parallel(save_model, found):
    assert found["motif", "tensor"]["answers"] == expected(save_model(**PUBLISHED)[0], ROWS)


@pytest.mark.parametrize("attention", VARIANTS)
def test_pipeline_parallel(attention, save_model, found):
    """Each process loads its stage; the hidden states handed on and the logits are the whole model's.

    The stages run without the engine: vLLM 0.32 does not generate with two stages on a CPU, and its own Llama hangs.
    """
    model, answer = save_model(**CASES[attention])[0], found[attention, "pipeline"]
    assert [layers for layers, *_ in answer["shares"]] == [1, 1]
    with torch.no_grad():
        wanted = model(torch.tensor(ROW), output_hidden_states=True)
    handed, logits = (torch.tensor(answer["stages"][i][name]) for i, name in enumerate(("handed", "logits")))
    torch.testing.assert_close(handed, wanted.hidden_states[1][0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(logits[:, : model.config.vocab_size], wanted.logits[0], atol=1e-4, rtol=1e-4)
