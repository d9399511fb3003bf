import re

import numpy as np
import pytest
from tiny_models import spaced_tokenizer

from diff_transformer.data.documents import Document
from diff_transformer.data.filler import Filler
from diff_transformer.data.needles import (
    CITIES,
    DEPTHS,
    LANDMARKS,
    completion,
    draw_facts,
    make_needle_example,
    needle,
    numbers_said,
    parse_numbers,
    question,
)
from diff_transformer.data.seeding import evaluation_rng
from diff_transformer.data.tokenizer import byte_tokenizer, encode


@pytest.fixture(scope="module")
def filler(documents):
    return Filler(documents)


def _example(filler, tokenizer, index=0, **options):
    settings = {"length": 400, "needles": 4, "queries": 2, "depth": 0.5} | options
    return make_needle_example(evaluation_rng(0, index), filler, tokenizer, **settings)


def test_the_format_of_questions_and_answers():
    assert question(["Paris"]) == "\nQuestion: What is the magic number of Paris? Answer: Paris is"
    assert completion(["Paris"], ["42"]) == " 42."
    two = ["Paris", "Rome"]
    assert question(two) == "\nQuestion: What are the magic numbers of Paris and Rome? Answer: Paris is"
    assert completion(two, ["42", "17"]) == " 42, Rome is 17."
    assert "of Paris, Rome and Oslo?" in question([*two, "Oslo"])
    assert completion([*two, "Oslo"], ["1", "2", "3"]) == " 1, Rome is 2, Oslo is 3."


@pytest.mark.parametrize("queries", [1, 2, 4])
def test_the_prompt_holds_each_fact_once_and_asks_for_the_right_ones(filler, tokenizer, queries):
    for index in range(20):
        example = _example(filler, tokenizer, index, queries=queries)
        stated = dict(re.findall(r"The magic number of (\w+) is (\d+)\.", example.prompt))
        assert len(stated) == len(set(stated.values())) == 4
        assert example.prompt.endswith(question(example.cities))
        assert example.expected_completion == completion(example.cities, example.answers)
        assert [stated[city] for city in example.cities] == list(example.answers)
        assert parse_numbers(example.expected_completion, queries) == list(example.answers)


def assert_spans(example):
    for (start, end), city, number in zip(example.answer_spans, example.cities, example.answers, strict=True):
        assert example.prompt[start:end] == f"The magic number of {city} is {number}."


@pytest.mark.parametrize("depth", DEPTHS)
def test_the_first_queried_needle_is_at_its_depth_and_the_others_anywhere(filler, tokenizer, depth):
    others = []
    for index in range(30):
        example = _example(filler, tokenizer, index, depth=depth)
        context = example.prompt[: example.prompt.index("\nQuestion")]
        start, end = example.answer_spans[0]
        before, after = (len(encode(tokenizer, part)) for part in (context[: start - 1], context[end:]))
        assert example.depth == depth
        assert before / (before + after) == pytest.approx(depth, abs=0.06)
        if depth in (0.0, 1.0):
            assert (before if depth == 0 else after) == 0
        others.append(example.answer_spans[1][0] / len(context))
    assert min(others) < 0.25
    assert max(others) > 0.75


@pytest.mark.parametrize("length", [400, 1000, 4096])
@pytest.mark.parametrize("name", ["trained", "bytes", "a space before every text", "tokens across spaces"])
def test_every_tokenizer_fills_its_length(filler, tokenizer, joining, name, length):
    if name == "a space before every text":
        chosen = spaced_tokenizer(["".join(filler.words[i : i + 10]) for i in range(0, 3000, 10)])
    else:
        chosen = {"trained": tokenizer, "bytes": byte_tokenizer(), "tokens across spaces": joining}[name]
    for index in range(5):
        for depth in (0.0, 0.5, 1.0):
            example = _example(filler, chosen, index, length=length, depth=depth)
            assert length - max(length // 100, 12) <= example.num_tokens <= length
            assert example.num_tokens == len(encode(chosen, example.prompt))
            assert_spans(example)


def test_a_landmark_shares_no_word_with_the_question_about_its_city():
    assert {*LANDMARKS} <= {*CITIES}
    for city, landmark in LANDMARKS.items():
        words = [
            {*re.findall(r"\w+", text.lower())}
            for text in (needle(city, "42", "landmark"), question([city], "landmark"))
        ]
        assert words[0] & words[1] <= {"the", "to", "on"}, landmark


@pytest.mark.parametrize("digits", [1, 2, 3, 6])
def test_numbers_are_distinct_and_have_no_leading_zero(digits):
    seen = set()
    for index in range(100):
        cities, numbers = draw_facts(np.random.default_rng(index), 8, digits)
        assert len(set(cities)) == len(set(numbers)) == 8
        assert all(len(number) == digits and (digits == 1 or number[0] != "0") for number in numbers)
        seen |= set(numbers)
    assert digits > 1 or seen == set("0123456789")


@pytest.mark.parametrize(
    ("text", "count", "expected"),
    [
        (" 42.", 1, ["42"]),
        (" 42, Rome is 17.", 2, ["42", "17"]),
        (" 42.\nQuestion: What is the magic number of Rome? Answer: Rome is 17.", 2, ["42", None]),
        ("\n 42, Rome is 17", 2, ["42", "17"]),
        ("", 2, [None, None]),
        (" the the ٣ ²", 1, [None]),
        (" 425 42", 1, ["425"]),
        ("4 2", 3, ["4", "2", None]),
    ],
)
def test_numbers_are_read_from_what_a_model_writes(text, count, expected):
    assert parse_numbers(text, count) == expected


def test_filler_is_words_of_the_documents_without_magic_numbers_and_oddities():
    text = (
        "One fine day.\n\n  The magic\nnumber of a  file is 7! Magic numbers help. <|endoftext|> Then\tnight. "
        + "x" * 50
    )
    assert "".join(Filler([Document("d", text)]).words) == " One fine day. Then night."
    with pytest.raises(ValueError, match="give text with spaces"):
        Filler([Document("d", "街道很安静，从早上起就没有人来过。" * 9)])
    large = Filler([Document("a", "alpha " * 1000), Document("b", "beta " * 1000)], max_bytes=1100)
    assert {" alpha", " beta"} <= set(large.words)
    assert 150 < len(large.words) < 250


def test_filler_tokens_are_the_tokens_of_the_text(filler, tokenizer):
    for chosen in (tokenizer, byte_tokenizer()):
        table = filler.tokens(chosen)
        np.testing.assert_array_equal(table.ids, encode(chosen, "".join(filler.words)))
        assert table.starts[-1] == len(table.ids)
        word = table.ids[table.starts[41] : table.starts[42]]
        assert chosen.decode(word.tolist()) == filler.words[41]


def test_filler_windows_have_the_size_asked_for(filler, tokenizer):
    starts = filler.tokens(tokenizer).starts
    for size in (0, 1, 7, 100, 2001, int(starts[-1])):
        first, last = filler.window(np.random.default_rng(size), tokenizer, size)
        assert starts[last] - starts[first] == size


def test_errors(filler, tokenizer):
    with pytest.raises(ValueError, match="hold no words"):
        Filler([Document("d", " \n")])
    with pytest.raises(ValueError, match=r"tokens of filler are needed and the documents have \d+; give more text"):
        _example(filler, tokenizer, length=10**6)
    with pytest.raises(ValueError, match="length 20 is too short for 4 needles"):
        _example(filler, tokenizer, length=20)
    with pytest.raises(ValueError, match=r"queries must lie between 1 and needles \(4\), got 5"):
        _example(filler, tokenizer, queries=5)
    with pytest.raises(ValueError, match="queries must lie"):
        _example(filler, tokenizer, queries=0)
    with pytest.raises(ValueError, match=r"depth must lie .* got 25"):
        _example(filler, tokenizer, depth=25)
    with pytest.raises(ValueError, match="11 needles of 1 digits: give between 1 and 10"):
        _example(filler, tokenizer, needles=11, digits=1)
    with pytest.raises(ValueError, match="digits must lie between 1 and 9, got 0"):
        _example(filler, tokenizer, digits=0)


@pytest.mark.parametrize(
    ("answer", "numbers"),
    [
        ("Rome has 17 and Oslo has 42.", ["17", "42"]),
        ("oslo: 42; ROME: 17", ["17", "42"]),
        ("The magic numbers of Rome and Oslo are 17 and 42, respectively.", ["17", "42"]),
        ("17 is the magic number of Rome, and 42 that of Oslo.", ["17", "42"]),
        ("You asked for Rome and Oslo. Oslo has 42, Rome has 17.", ["17", "42"]),
        ("17 and 42", ["17", "42"]),
        ("17", ["17", None]),
        ("Rome is 10, 11, 12, 17.", ["10", None]),
        ("Paris has 17 and Rome has 5.", ["5", None]),
        ("The number of Paris is 17.", [None, None]),
        ("I do not know.", [None, None]),
    ],
)
def test_numbers_said_of_cities(answer, numbers):
    assert numbers_said(answer, ["Rome", "Oslo"]) == numbers
