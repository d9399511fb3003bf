"""lm_eval on checkpoints of ours, from a saved folder."""

import json
import math

import pytest
import torch
from tiny_models import save_tiny_model

from diff_transformer import DiffTransformerForCausalLM

ROWS = [
    {"question": "Two and two is", "choices": ["four", "five"], "answer": 0},
    {"question": "Snow is", "choices": ["black", "white"], "answer": 1},
]


def facts(folder):
    """A task of the harness with two choices."""
    (folder / "items.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    return {
        "task": "facts", "dataset_path": "json", "output_type": "multiple_choice", "test_split": "test",
        "dataset_kwargs": {"data_files": {"test": str(folder / "items.jsonl")}, "cache_dir": str(folder / "cache")},
        "doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}],
    }  # fmt: skip


@pytest.mark.parametrize("attention", ["diff", "softmax"])
def test_the_harness_scores_a_checkpoint(attention, tmp_path):
    """Its own model class on a task of two choices; the log-likelihoods are those of the model itself."""
    lm_eval = pytest.importorskip("lm_eval", reason="the extra `harness` is not installed")
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    fields = {"attention": attention, "embedding_initializer_range": 1.0, "num_key_value_heads": 2}
    folder, task = save_tiny_model(tmp_path / "model", **fields), facts(tmp_path)
    lm = HFLM(pretrained=str(folder), tokenizer=str(folder), device="cpu", max_length=128, batch_size=2)
    assert type(lm.model) is DiffTransformerForCausalLM
    outcome = lm_eval.simple_evaluate(
        lm, tasks=[task], task_manager=TaskManager(include_defaults=False), bootstrap_iters=0, log_samples=True
    )
    right = 0
    for sample, row in zip(outcome["samples"]["facts"], ROWS, strict=True):
        expected = [_logprob(lm.model, row["question"], " " + choice) for choice in row["choices"]]
        assert [float(r[0]) for r in sample["filtered_resps"]] == pytest.approx(expected, abs=1e-3)
        right += max(range(2), key=expected.__getitem__) == row["answer"]
    assert outcome["results"]["facts"]["acc,none"] == right / 2


def _logprob(model, context: str, continuation: str) -> float:
    ids = torch.tensor([list((context + continuation).encode())])
    with torch.no_grad():
        logprobs = model(ids).logits.log_softmax(-1)[0]
    start = len(context.encode())
    return math.fsum(logprobs[place - 1, ids[0, place]].item() for place in range(start, ids.shape[1]))
