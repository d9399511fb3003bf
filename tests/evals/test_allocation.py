"""Attention allocation: rows of attention written by hand, and real models read whole or in chunks."""

import pytest
import torch
from numbers_of import mean
from tiny_models import tiny_lm

from diff_transformer.data.documents import Document
from diff_transformer.data.filler import Filler
from diff_transformer.data.tokenizer import byte_tokenizer, token_spans
from diff_transformer.evals.allocation import Settings, attention_shares, evaluate_allocation
from diff_transformer.testing import peak_memory


@pytest.fixture(scope="module")
def filler():
    return Filler([Document("prose", "It was a quiet street, and nobody had come by since the morning. " * 60)])


class Fake:
    """Two layers of one and two heads: .2 on the answer, .1 on the noise; the second layer's second head has .6, .3."""

    name, tokenizer = "fake", byte_tokenizer()

    def __init__(self):
        self.calls = 0

    def last_row_attention(self, ids):
        self.calls += 1
        text = self.tokenizer.decode(ids[0])
        start = text.index("The magic number")
        stop = text.index(".", start) + 1
        question = text.rindex("\nQuestion")
        spans = token_spans(self.tokenizer, text, [(start, stop), (question, len(text))])
        row, other = torch.zeros(len(ids[0])), torch.zeros(len(ids[0]))
        row[0] = 0.5  # the first token counts for neither
        row[slice(*spans[0])] = 0.2 / (spans[0][1] - spans[0][0])
        row[spans[0][0] - 2] = -0.1  # noise, negative
        row[slice(*spans[1])] = 0.2 / (spans[1][1] - spans[1][0])
        other[spans[0][0]], other[spans[0][1]], other[-1] = 1.2, -0.6, 0.2  # twice as much in all
        return [row[None], torch.stack([row, other])]


def test_the_right_tokens_are_counted_by_depth_layer_and_head(filler):
    result = evaluate_allocation(Fake(), filler, Settings(length=300, samples=2, depths=(0.25, 0.75)))
    heads = {"experiment": "allocation_heads"}
    assert mean(result, "answer", depth=0.25) == pytest.approx((0.2 + 0.2 + 0.6) / 3, abs=1e-6)
    assert mean(result, "answer") == pytest.approx((0.2 + 0.2 + 0.6) / 3, abs=1e-6)
    assert mean(result, "noise", depth=0.75) == pytest.approx((0.1 + 0.1 + 0.3) / 3, abs=1e-6)
    for layer, (answer, noise) in enumerate(((0.2, 0.1), (0.4, 0.2))):
        assert mean(result, "answer", layer=layer, **heads) == pytest.approx(answer, abs=1e-6)
        assert mean(result, "noise", layer=layer, **heads) == pytest.approx(noise, abs=1e-6)
    of_heads = [row for row in result.rows if row.get("experiment") == "allocation_heads"]
    shares = [(row["answer"], row["noise"]) for row in of_heads if row["example"] == 3]
    assert shares == [(0.2, 0.1), (0.2, 0.1), (0.6, 0.3)]


def test_shares_by_hand():
    row = torch.tensor([[4.0, -1.0, 2.0, 1.0, 0.0, 2.0], [0.0, 0.0, 5.0, 0.0, 0.0, 0.0]])
    answer, noise = (torch.tensor([place in places for place in range(6)]) for places in ((2, 3), (1, 4)))
    shares, (heads,) = attention_shares([row], answer, noise)
    assert heads.tolist() == [pytest.approx([0.3, 1.0]), pytest.approx([0.1, 0.0])]
    assert shares == {"answer": pytest.approx(0.65), "noise": pytest.approx(0.05)}


def make(kind, positions=512):
    return tiny_lm(kind, positions=positions)


@pytest.mark.parametrize("kind", ["diff", "softmax", "gpt2"])
def test_memory_grows_with_the_length_and_not_with_its_square(kind, monkeypatch):
    monkeypatch.setattr("diff_transformer.evals.lm.CHUNK", 128)
    lm = make(kind, positions=4096)
    peaks = [peak_memory(lambda n=n: lm.last_row_attention(torch.zeros(1, n, dtype=torch.long))) for n in (1024, 4096)]
    assert peaks[1] < 5 * peaks[0]
    assert peaks[1] < 4096 * 4096  # bytes: less than a quarter of one head's map
