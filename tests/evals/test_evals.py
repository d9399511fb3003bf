"""Loss slices on a fake whose losses are known, and the form that results have."""

import numpy as np
import pytest
import torch

from diff_transformer.evals.repeat_loss import evaluate_associative_recall


def test_loss_slices_against_a_loop():
    ids = torch.tensor([[1, 2, 3, 1, 2, 4], [5, 6, 5, 6, 5, 6]])
    losses = torch.arange(10, dtype=torch.float32).view(2, 5)

    class Fake:
        name, tokenizer = "fake", None

        def token_losses(self, rows):
            return losses

    training = np.array([6, 5, 0] * 20 + [1, 2, 3, 7, 8, 9] * 10)  # the pair (6, 5) is known by heart
    result = evaluate_associative_recall(Fake(), ids, training, frequent_share=0.15)
    hits = [losses[0, 3].item(), losses[1, 2].item(), losses[1, 4].item()]  # (1, 2) again; (5, 6) twice again
    assert result.metrics["ar_hit"] == pytest.approx(np.mean(hits))
    assert result.metrics["ar_hit_share"] == pytest.approx(0.3)
    assert result.metrics["others"] == pytest.approx((45 - sum(hits)) / 7)
    assert result.metrics["validation"] == pytest.approx(4.5)
    counted = sum(row["ar_hit_count"] + row["others_count"] for row in result.rows)
    assert counted == 10
