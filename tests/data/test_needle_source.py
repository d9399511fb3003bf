import re

import numpy as np
import pytest

from diff_transformer.data.documents import Document
from diff_transformer.data.filler import Filler
from diff_transformer.data.needle_source import NeedleSource
from diff_transformer.data.needles import completion, make_needle_example, question
from diff_transformer.data.seeding import evaluation_rng
from diff_transformer.data.tokenizer import byte_tokenizer, encode


@pytest.fixture(scope="module")
def filler(documents):
    return Filler(documents)


@pytest.fixture(scope="module", params=["trained", "bytes"])
def source(request, filler, tokenizer):
    if request.param == "trained":
        return NeedleSource(filler, tokenizer, length=160, seed=1)
    return NeedleSource(filler, byte_tokenizer(), length=501, seed=1)


def _text(source, row):
    return source.tokenizer.decode([token for token in row.tolist() if token != source.tokenizer.pad_token_id])


def test_a_row_has_the_tokens_of_its_text(source):
    ids, _ = source.rows(0, 100)
    for row in ids:
        text = _text(source, row)
        assert text.endswith(".<|endoftext|>")
        assert text.count("<|endoftext|>") == 1
        spliced = row[row != source.tokenizer.pad_token_id][:-1]
        np.testing.assert_array_equal(spliced, encode(source.tokenizer, text.removesuffix("<|endoftext|>")))


def test_every_answer_is_right_and_every_city_is_asked_for_at_most_once(source):
    needle_counts, query_counts = set(), set()
    for row in source.rows(0, 100)[0]:
        context, *exchanges = _text(source, row).removesuffix("<|endoftext|>").split("\nQuestion: ")
        facts = dict(re.findall(r" The magic number of (\w+) is (\d+)\.", context))
        needle_counts.add(len(facts))
        asked = []
        assert exchanges
        for exchange in exchanges:
            answers = re.findall(r"(\w+) is (\d+)", exchange.split("Answer: ")[1])
            cities = [city for city, _ in answers]
            numbers = [number for _, number in answers]
            assert f"\nQuestion: {exchange}" == question(cities) + completion(cities, numbers)
            assert [facts[city] for city in cities] == numbers
            query_counts.add(len(cities))
            asked += cities
        assert len(asked) == len(set(asked))
    assert needle_counts == {1, 2, 4}
    assert query_counts == {1, 2}


def test_the_context_and_question_are_those_of_the_evaluation(filler, tokenizer):
    """A row of one question is an evaluation prompt, its completion and the end of the text."""
    source = NeedleSource(filler, tokenizer, length=160, questions_per_document=1)
    made = _text(source, source.rows(0, 1)[0][0])
    example = make_needle_example(evaluation_rng(0), filler, tokenizer, length=150, needles=2, queries=1, depth=0.5)
    pattern = r"( [^\n]*)\nQuestion: What (is|are) the magic numbers? of [\w, ]+\? Answer: \w+ is \d+(, \w+ is \d+)*\."
    assert re.fullmatch(pattern + re.escape("<|endoftext|>"), made)
    assert re.fullmatch(pattern, example.prompt + example.expected_completion)


def test_rows_are_a_pure_function_of_seed_and_index(source):
    ids, labels = source.rows(5, 3)
    for offset in range(3):
        single = source.rows(5 + offset, 1)
        np.testing.assert_array_equal(single[0][0], ids[offset])
        np.testing.assert_array_equal(single[1][0], labels[offset])
    other = NeedleSource(source.filler, source.tokenizer, length=source.length, seed=2)
    assert not np.array_equal(other.rows(5, 3)[0], ids)


def test_with_answer_loss_only_the_answers_alone_carry_a_loss(filler, tokenizer):
    source = NeedleSource(filler, tokenizer, length=160, answer_loss_only=True)
    ids, labels = source.rows(0, 30)
    for row, row_labels in zip(ids, labels, strict=True):
        kept = row_labels != -100
        np.testing.assert_array_equal(row_labels[kept], row[kept])
        expected = re.findall(r"Answer: \w+ is( [^\n<]*)", _text(source, row))
        assert tokenizer.decode(row[kept].tolist()) == "".join(expected)


def test_what_no_stretch_of_filler_fits_is_padded_without_loss(tokenizer):
    """Every word of this filler has four bytes, so some lengths cannot be filled exactly."""
    even = Filler([Document("d", "cat sat mat " * 300)])
    padded = 0
    for length in (500, 501):
        source = NeedleSource(even, byte_tokenizer(), length=length, needles=(2,), queries=(1,))
        ids, labels = source.rows(0, 20)
        pads = labels == -100
        assert (ids[pads] == source.tokenizer.eos_token_id).all()
        np.testing.assert_array_equal(labels[~pads], ids[~pads])
        assert pads.sum(axis=1).max() < 4
        padded += pads.sum()
    assert padded > 0


def test_errors(filler, tokenizer):
    with pytest.raises(ValueError, match=r"length 40 is too short for \d needles and a question"):
        NeedleSource(filler, tokenizer, length=40)
    with pytest.raises(ValueError, match="every document needs a question"):
        NeedleSource(filler, tokenizer, length=200, needles=(1, 2), queries=(2,))
    with pytest.raises(ValueError, match="every document needs a question"):
        NeedleSource(filler, tokenizer, length=200, needles=())
    with pytest.raises(ValueError, match="11 needles of 1 digits"):
        NeedleSource(filler, tokenizer, length=2000, needles=(11,), digits=1)


def test_a_tokenizer_that_joins_across_words_is_refused(filler, joining):
    with pytest.raises(ValueError, match="joins tokens across"):
        NeedleSource(filler, joining, length=800)
