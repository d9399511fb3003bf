"""Negative log-likelihood by position: hand-worked bins, one forward pass as the judge, books by themselves."""

import pytest
import torch
from numbers_of import measured
from tiny_models import tiny_lm

from diff_transformer import DiffTransformerForCausalLM
from diff_transformer.data.documents import Document
from diff_transformer.data.tokenizer import byte_tokenizer
from diff_transformer.evals.lm import CausalLM
from diff_transformer.evals.long_nll import Settings, bin_edges, evaluate_long_nll
from diff_transformer.lab.evaluate import settings_of
from diff_transformer.lab.quantities import Quantity, loss_up_to
from diff_transformer.lab.rows import Rows, rows_of
from diff_transformer.model.presets import preset

BOOKS = [
    Document("first", "In the first book nothing happens for a long while, and then the harbour freezes. " * 3),
    Document("leaflet", "Too short."),
    Document("second", "The second one opens with a letter that nobody in the village is able to read aloud. " * 3),
    Document("third", "A third begins: all the clocks of the house had been stopped at the same hour, by whom? " * 3),
]


def make_lm(model=None) -> CausalLM:
    torch.manual_seed(0)
    model = model or DiffTransformerForCausalLM(preset("debug", vocab_size=258, max_position_embeddings=200))
    return CausalLM(model, byte_tokenizer(), "tiny")


def test_bins_hold_every_position_once():
    assert bin_edges(1) == [0, 1]
    assert bin_edges(10) == [0, 1, 2, 3, 4, 5, 6, 7, 8, 10]
    edges = bin_edges(65536)
    assert {2**i for i in range(17)} <= set(edges)
    assert edges[-1] == 65536
    assert len(edges) < 70


def test_metrics_are_the_means_of_one_forward_pass():
    lm = make_lm()
    result = evaluate_long_nll(lm, BOOKS, Settings(length=150))
    by_book = books_of(result)
    assert [*by_book] == ["first", "second", "third"]
    losses = []
    for book in (BOOKS[0], BOOKS[2], BOOKS[3]):
        ids = torch.tensor([list(book.text.encode())[:151]])
        with torch.inference_mode():
            logits = lm.model(ids, use_cache=False).logits[0, :-1]
        losses.append(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none"))
    expected = torch.stack(losses).double()
    rows = Rows(rows_of("long_nll", result.rows, {}, "m"))
    for n in (1, 2, 16, 128, 150):
        (found,) = Quantity("x", "x", "", "", "long_nll", ("loss",), of=loss_up_to(n)).values(rows, "m").values()
        assert found == pytest.approx(expected[:, :n].mean().item(), abs=1e-5)
    assert result.about["books"] == 3
    assert sum(row["count"] for row in by_book["first"]) == 150


def books_of(result):
    by_book = {}
    for row in result.rows:
        by_book.setdefault(row["example"], []).append(row)
    return by_book


def test_a_book_is_read_by_itself():
    lm = make_lm()
    together = evaluate_long_nll(lm, BOOKS, Settings(length=100))
    for index, book in enumerate((BOOKS[0], BOOKS[2], BOOKS[3])):
        assert evaluate_long_nll(lm, [book], Settings(length=100)).rows == [*books_of(together).values()][index]
    assert len(books_of(evaluate_long_nll(lm, BOOKS, Settings(length=100, samples=2)))) == 2


def test_a_book_needs_one_token_more_than_positions():
    books = [Document("just short", "x" * 20), Document("just enough", "y" * 21)]
    result = evaluate_long_nll(make_lm(), books, Settings(length=20))
    assert [*books_of(result)] == ["just enough"]
    assert sum(row["count"] for row in result.rows) == 20


@pytest.mark.parametrize(
    ("family", "split", "books"),
    [("diff", None, 2), ("llama", None, 20), ("diff", "all", 20), ("llama", "held-out", 2)],
)
def test_all_books_are_read_by_a_model_that_was_not_trained_on_them(family, split, books, tmp_path):
    for i in range(20):
        (tmp_path / f"{i}.txt").write_text(f"Book {i} tells of the weather, day by day. " * 5)
    settings = settings_of("long_nll", {"corpus": str(tmp_path), "length": 100, "split": split})
    result = measured("long_nll", tiny_lm(family), settings, tmp_path / "out.jsonl.gz")
    assert (len(books_of(result)), result.about["documents"]) == (books, books)
    assert result.about["part"] == ("all" if books == 20 else "validation")


def test_texts_that_are_too_short_are_named():
    with pytest.raises(ValueError, match=r"none of the 1 documents has 101 tokens .* longest 10"):
        evaluate_long_nll(make_lm(), BOOKS[1:2], Settings(length=100))
