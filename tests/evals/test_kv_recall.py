"""Recall in noise: a model that looks its answers up, attention written by hand, and a real model."""

import numpy as np
import pytest
import torch
from numbers_of import mean
from tiny_models import tiny_lm

from diff_transformer.data.kv_recall_task import RecallTask, recall_vocabulary
from diff_transformer.evals.kv_recall import evaluate_recall

VOCABULARY = recall_vocabulary(np.arange(100), 20)
TASK = RecallTask(length=64, pairs=4, questions=8)


class LooksUp:
    """Answers a key with the token that followed it first, in every second row; attends by hand."""

    name = "looks up"

    def predictions(self, ids):
        guesses = torch.full((len(ids), ids.shape[1] - 1), -1)
        for row in range(0, len(ids), 2):
            tokens = ids[row].tolist()
            guesses[row] = torch.tensor([tokens[tokens.index(token) + 1] for token in tokens[:-1]])
        return guesses

    def last_row_attention(self, ids):
        tokens = ids[0].tolist()
        answer = tokens.index(tokens[-1]) + 1
        noise = next(i for i in range(1, len(tokens)) if tokens[i] in VOCABULARY.noise)
        good, bad = torch.zeros(len(tokens)), torch.zeros(len(tokens))
        good[answer], good[-1] = 1.5, 0.5
        bad[answer], bad[noise], bad[0] = 0.5, -1.0, 0.5  # half of its magnitude on the noise
        return [torch.stack([good, bad]), bad[None]]


def test_hits_and_shares_are_counted_by_row_layer_and_head():
    result = evaluate_recall(LooksUp(), VOCABULARY, TASK, rows=10)
    for times in (1, 2, 4):
        same = {"length": times * TASK.length}
        assert mean(result, "hits", **same) / mean(result, "questions", **same) == 0.5
    assert result.about == {"chance": 0.25}
    metrics = {name: mean(result, name, experiment="recall_first") for name in ("right", "answer", "noise")}
    assert metrics["right"] == 0.5
    assert metrics["answer"] == pytest.approx((0.75 + 0.25 + 0.25) / 3)
    assert metrics["noise"] == pytest.approx((0 + 0.5 + 0.5) / 3)


def test_a_distractor_is_noise():
    task = RecallTask(length=64, pairs=4, questions=8, distractors=1.0)

    class OnKeys(LooksUp):
        def last_row_attention(self, ids):
            row = torch.zeros(ids.shape[1])
            row[1:-1] = torch.from_numpy(np.isin(ids[0, 1:-1], VOCABULARY.keys)).float()
            return [row[None]]

    result = evaluate_recall(OnKeys(), VOCABULARY, task, rows=4, longer=())
    # of 44 keys in the context 4 have a value
    assert mean(result, "noise", experiment="recall_first") == pytest.approx(40 / 44, abs=0.02)


def test_rows_are_longer_by_their_noise():
    result = evaluate_recall(LooksUp(), VOCABULARY, TASK, rows=4, longer=(3,))
    rows = [row for row in result.rows if "hits" in row]
    assert [row["length"] for row in rows] == [64] * 4 + [192] * 4
    assert [row["hits"] for row in rows[4:]] == [8, 0, 8, 0]


@pytest.mark.parametrize("family", ["softmax", "diff"])
def test_a_real_model_is_measured(family):
    lm = tiny_lm(family)
    first = [row for row in evaluate_recall(lm, VOCABULARY, TASK, rows=4, longer=()).rows if "right" in row]
    assert all(row["answer"] + row["noise"] < 1 for row in first)
    with pytest.raises(ValueError, match="a row has"):
        evaluate_recall(lm, VOCABULARY, TASK, rows=4, longer=(1000,))
