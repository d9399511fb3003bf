"""Loss by slice: a hand-worked case, the model's own loss, and a run that was interrupted."""

import numpy as np
import pytest
import torch
from numbers_of import mean, ratio
from tiny_models import tiny_lm

from diff_transformer.data.tokenizer import byte_tokenizer
from diff_transformer.evals.repeat_loss import evaluate_associative_recall

IDS = torch.tensor([[1, 2, 3, 1, 2, 4], [5, 6, 5, 6, 5, 6], [7, 7, 7, 7, 7, 7]])
TRAINING = np.array([6, 5, 0] * 20 + [1, 2, 3, 7, 8, 9] * 10)  # 120 tokens; the pair (6, 5) makes up a sixth of them


class Fake:
    """The loss of a token encodes its row before the decimal point and its place after it."""

    name, tokenizer, batch_size = "fake", byte_tokenizer(), 2

    def token_losses(self, rows):
        numbers = [next(i for i, known in enumerate(IDS) if torch.equal(known, row)) for row in rows]
        return torch.tensor(numbers)[:, None] + torch.arange(1, 6) / 10


def test_slices_by_hand():
    result = evaluate_associative_recall(Fake(), IDS, TRAINING, frequent_share=0.15)
    # row 0: (1, 2) again at place 4. Row 1: (5, 6) again at 3 and 5; (6, 5) is frequent. Row 2: (7, 7) again at 2 to 5.
    hits = [0.4, 1.3, 1.5, 2.2, 2.3, 2.4, 2.5]
    assert ratio(result, "ar_hit") == pytest.approx(np.mean(hits))
    assert ratio(result, "others") == pytest.approx((15 + 3 * 1.5 - sum(hits)) / 8)
    assert mean(result, "loss") == pytest.approx(1.3)
    assert [row["ar_hit_count"] for row in result.rows] == [1, 2, 4]
    assert [row["others_count"] for row in result.rows] == [4, 3, 1]
    assert result.rows[1]["loss"] == pytest.approx(1.3)
    assert (result.about["n"], result.about["frequent_above"]) == (2, 18)


def test_the_threshold_and_n_decide():
    lenient = evaluate_associative_recall(Fake(), IDS, TRAINING, frequent_share=0.2)
    assert sum(row["ar_hit_count"] for row in lenient.rows) == 8  # (6, 5), at 2 and again at 4, is no longer frequent
    triples = evaluate_associative_recall(Fake(), IDS, TRAINING, n=3, frequent_share=0.2)
    assert [row["ar_hit_count"] for row in triples.rows] == [0, 2, 3]


@pytest.mark.parametrize("family", ["diff", "gpt2"])
def test_all_tokens_together_are_the_model_s_loss(family):
    lm = tiny_lm(family, vocab_size=258)
    ids = torch.randint(0, 20, (6, 30), generator=torch.Generator().manual_seed(0))
    result = evaluate_associative_recall(lm, ids, np.arange(258), frequent_share=1.0)
    assert mean(result, "loss") == pytest.approx(lm.model(ids, labels=ids).loss.item(), abs=1e-5)


def test_ids_with_gaps_have_the_same_slices():
    far = np.arange(10) * 7919
    whole = evaluate_associative_recall(Fake(), IDS, TRAINING, frequent_share=0.15)
    fake = Fake()
    fake.token_losses = lambda rows: Fake.token_losses(fake, rows // 7919)
    spread = evaluate_associative_recall(fake, torch.from_numpy(far[IDS]), far[TRAINING], frequent_share=0.15)
    assert spread.rows == whole.rows
