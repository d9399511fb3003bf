import numpy as np
import pytest
import torch

from diff_transformer.data.packing import PackedCorpus
from diff_transformer.train.materials import loss_weights, spread_rows

BATCH = {
    "input_ids": np.zeros((3, 5), np.int64),
    "labels": np.array([[1, 2, 3, 4, 5], [-100, 2, 3, 4, 5], [-100, -100, -100, -100, 7]]),
    "source": np.array([0, 0, 1]),
}


def test_tokens_weigh_the_same():
    weights = loss_weights(BATCH, {"text": 3.0, "recall": 1.0}, "tokens")
    assert weights.shape == (3, 4)
    assert weights.sum() == pytest.approx(1)
    assert np.unique(weights[weights > 0]) == pytest.approx([1 / 9])
    assert (weights[2] > 0).tolist() == [False, False, False, True]


def test_sources_weigh_their_share():
    weights = loss_weights(BATCH, {"text": 3.0, "recall": 1.0}, "sources")
    assert weights[:2].sum() == pytest.approx(0.75)
    assert weights[2].tolist() == pytest.approx([0, 0, 0, 0.25])


def test_rows_are_spread_over_the_corpus():
    packed = PackedCorpus(np.arange(100, dtype=np.uint16), 10, shuffle=False)
    assert torch.equal(spread_rows(packed, 5)[:, 0], torch.tensor([0, 20, 40, 60, 80]))
