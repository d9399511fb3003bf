import numpy as np
import pytest

from diff_transformer.data import Document, Filler, byte_tokenizer
from diff_transformer.data.curriculum import WORDINGS, CopySource, FactSource


@pytest.fixture(scope="module")
def filler():
    words = np.random.default_rng(0).choice(["river", "stone", "a", "wind", "of", "cold", "harbour"], 4000)
    return Filler([Document("text", " ".join(words))])


def facts(wording="pairs", **options):
    return FactSource(
        wording, byte_tokenizer(), **{"length": 200, "needles": (2, 4), "answer_loss_only": True, **options}
    )


def test_a_copied_stretch_stands_at_the_end_and_once_before(filler):
    ids, labels = CopySource(filler, byte_tokenizer(), length=60, copies_only=True).rows(0, 40)
    sizes = (labels != -100).sum(1) + 1  # the first token of the copy has no loss
    assert sizes.min() >= 10
    assert sizes.max() < 30
    assert len(set(sizes)) > 5
    for row, label, size in zip(ids, labels, sizes, strict=True):
        np.testing.assert_array_equal(label[-size + 1 :], row[-size + 1 :])
        places = [start for start in range(60 - 2 * size + 1) if np.array_equal(row[start : start + size], row[-size:])]
        assert places
    ids, labels = CopySource(filler, byte_tokenizer(), length=60).rows(0, 2)
    np.testing.assert_array_equal(ids, labels)


@pytest.mark.parametrize("wording", WORDINGS)
def test_every_answer_is_that_of_its_fact(wording):
    ids, labels = facts(wording).rows(0, 20)
    verb = " is" if wording == "clauses" else ""
    seen = set()
    for row, label in zip(ids, labels, strict=True):
        text = byte_tokenizer().decode(row[row != byte_tokenizer().pad_token_id])
        told, *asked = text.split("\n ")
        known = dict(part.strip().rsplit(f"{verb} ", 1) for part in told.split(".") if part)
        assert len(known) in (2, 4)
        answers = dict.fromkeys(asked)
        assert {tuple(answer.rstrip(".").rsplit(f"{verb} ", 1)) for answer in answers} <= set(known.items())
        assert byte_tokenizer().decode(label[label != -100]) == "".join(f" {a.rstrip('.')[-1]}" for a in asked)
        assert len(asked) > len(answers)  # drawn with replacement, as many as fit
        seen |= set(known)
    assert len(seen) > 30


def test_rows_are_functions_of_seed_and_index(filler):
    for make in (
        lambda seed: CopySource(filler, byte_tokenizer(), length=60, seed=seed),
        lambda seed: facts(seed=seed),
    ):
        whole = make(1).rows(0, 6)
        for mine, part in zip(whole, make(1).rows(4, 2), strict=True):
            np.testing.assert_array_equal(mine[4:], part)
        assert not np.array_equal(whole[0], make(2).rows(0, 6)[0])


def test_what_does_not_fit_is_said(filler):
    with pytest.raises(ValueError, match=r"length 11 .* at least 12"):
        CopySource(filler, byte_tokenizer(), length=11)
    with pytest.raises(ValueError, match=r"length 90000 and \d+ tokens of text"):
        CopySource(filler, byte_tokenizer(), length=90_000)
    with pytest.raises(ValueError, match=r"length 40 is too short: 4 facts take \d+ tokens"):
        facts(length=40)
    with pytest.raises(ValueError, match="11 needles of 1 digits"):
        facts(needles=(11,), length=900)
