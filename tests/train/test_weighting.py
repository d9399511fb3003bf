import pytest
import torch

from diff_transformer.train.loss import count_by_source, token_weights

LABELS = torch.tensor([[1, 2, 3, 4, 5], [-100, 2, 3, 4, 5], [-100, -100, -100, -100, 7]])
SOURCE = torch.tensor([0, 0, 1])
SHARES = [3.0, 1.0]


def test_counts():
    assert count_by_source(LABELS, SOURCE, 3).tolist() == [8, 1, 0]


def test_tokens_weigh_the_same():
    weights = token_weights(LABELS, SOURCE, torch.tensor([8.0, 1.0]), SHARES, "tokens")
    assert weights.shape == (3, 4)
    assert weights.sum().item() == pytest.approx(1)
    assert weights[weights > 0].tolist() == pytest.approx([1 / 9] * 9)
    assert (weights[2] > 0).tolist() == [False, False, False, True]


def test_sources_weigh_their_share():
    weights = token_weights(LABELS, SOURCE, torch.tensor([8.0, 1.0]), SHARES, "sources")
    assert weights[:2].sum().item() == pytest.approx(0.75)
    assert weights[2].tolist() == pytest.approx([0, 0, 0, 0.25])


@pytest.mark.parametrize("loss", ["tokens", "sources"])
def test_parts_of_a_batch_weigh_what_they_weigh_in_the_whole(loss):
    counts = count_by_source(LABELS, SOURCE, 2)
    whole = token_weights(LABELS, SOURCE, counts, SHARES, loss)
    parts = [token_weights(LABELS[i:j], SOURCE[i:j], counts, SHARES, loss) for i, j in ((0, 1), (1, 3))]
    assert torch.equal(torch.cat(parts), whole)
