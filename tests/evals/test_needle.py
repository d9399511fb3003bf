"""Multi-needle retrieval with models that are known to find everything, nothing, or half."""

import html
import re

import pytest
from numbers_of import mean, measured
from tiny_models import bos_tokenizer, chat_tokenizer, tiny_lm

from diff_transformer.data.documents import Document
from diff_transformer.data.evaluation_text import load_haystack
from diff_transformer.data.filler import Filler
from diff_transformer.data.needles import LANDMARKS, completion
from diff_transformer.data.tokenizer import byte_tokenizer
from diff_transformer.evals.needle import Settings, evaluate_needle
from diff_transformer.lab.evaluate import run_eval, settings_of
from diff_transformer.report import write_report

SIZES = {"cells": ((1, 1), (3, 2)), "depths": (0.0, 1.0), "length": 400, "samples": 3}


@pytest.fixture(scope="module")
def filler():
    return Filler([Document("prose", "It was a quiet street, and nobody had come by since the morning. " * 60)])


class Finder:
    """A model whose continuation is ``answer(prompt)``."""

    name, tokenizer = "finder", byte_tokenizer()

    def __init__(self, answer):
        self.answer, self.prompts = answer, []

    def generate(self, prompts, max_new_tokens):
        self.prompts += prompts
        return [self.answer(prompt) for prompt in prompts]


def read_out(prompt):
    context, question = prompt.rsplit("\nQuestion: What ", 1)
    asked = question.split(" of ", 1)[1].split("?")[0].replace(" and ", ", ").split(", ")
    facts = dict(s.split(" is ") for s in context.replace(".", ". ").split("The magic number of ")[1:])
    numbers = [facts[city].split(".")[0] for city in asked]
    return (
        f" {numbers[0]}" + "".join(f", {c} is {n}" for c, n in zip(asked[1:], numbers[1:], strict=True)) + ".\nOther 77"
    )


def test_a_model_that_finds_everything_scores_one(filler):
    result = evaluate_needle(Finder(read_out), filler, Settings(**SIZES))
    assert [row["score"] for row in result.rows] == [1.0] * 12


def test_needles_that_name_a_landmark_are_found_by_who_knows_its_city(filler):
    def knows(prompt):
        context, asked = re.split(r"\nQuestion: Which figures? belongs? to ", prompt)
        cities = re.findall(r"\w+", asked.split("?")[0].replace(" and ", ", "))
        numbers = [re.search(rf"{LANDMARKS[city]}, somebody painted (\d+)", context)[1] for city in cities]
        return completion(cities, numbers)

    result = evaluate_needle(Finder(knows), filler, Settings(**SIZES, wording="landmark"))
    assert [row["score"] for row in result.rows] == [1.0] * 12
    with pytest.raises(ValueError, match=r"no wording 'riddle'"):
        evaluate_needle(Finder(knows), filler, Settings(**SIZES, wording="riddle"))


def test_half_an_answer_is_half_a_point_and_none_is_none(filler):
    result = evaluate_needle(Finder(lambda prompt: read_out(prompt).split(",")[0]), filler, Settings(**SIZES))
    assert {(row["n"], row["score"]) for row in result.rows} == {(1, 1.0), (3, 0.5)}
    assert mean(evaluate_needle(Finder(lambda prompt: " I cannot say."), filler, Settings(**SIZES))) == 0.0


def test_a_number_counts_only_if_it_is_exact(filler):
    for wrong in (lambda n: n + "0", lambda n: n[:-1], lambda n: n[::-1] if n != n[::-1] else "00"):
        model = Finder(lambda prompt, wrong=wrong: f" {wrong(read_out(prompt).split(',')[0].strip(' .')[:2])}.")
        assert mean(evaluate_needle(model, filler, Settings(**{**SIZES, "cells": ((1, 1),)}))) == 0.0


def test_a_model_that_reads_only_the_end_is_seen_in_the_depths_and_lengths(filler):
    near = lambda prompt: read_out(prompt) if "magic" in prompt[-120:].split("Question")[0] else " 0."  # noqa: E731
    model = Finder(near)
    result = evaluate_needle(model, filler, Settings(cells=((1, 1),), depths=(0.0, 1.0), lengths=(150, 300), samples=4))
    assert mean(result, depth=1.0) == 1.0
    assert mean(result, length=300, depth=0.0) == 0.0
    assert {row["length"] for row in result.rows} == {150, 300}
    assert all(row["tokens"] < row["length"] for row in result.rows)
    assert min(row["tokens"] for row in result.rows if row["length"] == 300) > 250


def test_prompts_are_those_of_the_seed(filler):
    models = []
    for seed in (0, 0, 1):
        models.append(Finder(lambda prompt: ""))
        evaluate_needle(models[-1], filler, Settings(**SIZES, seed=seed))
    assert models[0].prompts == models[1].prompts
    assert not set(models[0].prompts) & set(models[2].prompts)


def test_the_least_length_that_is_named_is_the_least_that_works(filler):
    model, sizes = Finder(read_out), {**SIZES, "samples": 20}
    model.prefix = (1, 2)  # as a tokenizer's token at the beginning: it counts
    with pytest.raises(ValueError, match=r"with N=3, R=2; give a length of \d+ or more") as caught:
        evaluate_needle(model, filler, Settings(**{**sizes, "lengths": (5,)}))
    least = int(re.search(r"length of (\d+) or more", str(caught.value))[1])
    with pytest.raises(ValueError, match=f"take up to {least} tokens with N=3, R=2"):
        evaluate_needle(model, filler, Settings(**{**sizes, "lengths": (least - 1,)}))
    assert not model.prompts
    assert evaluate_needle(model, filler, Settings(**{**sizes, "lengths": (least,)})).rows[-1]["score"] == 1


def test_a_short_haystack_takes_in_the_training_side_and_a_shorter_one_is_refused(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("Some words in a row. " * 100)
    filler, side = load_haystack(str(text), byte_tokenizer(), 1500, split="any")
    assert side == "all"
    assert filler.tokens(byte_tokenizer()).starts[-1] > 2000
    for split in ("any", "all"):
        with pytest.raises(ValueError, match=r"the corpus .* has \d+ tokens of filler, prompts need 5000; give more"):
            load_haystack(str(text), byte_tokenizer(), 5000, split=split)


def test_the_saved_prompt_is_whole_and_its_tokens_count_what_the_tokenizer_puts_in_front():
    filler = Filler([Document("prose", "It was a quiet street, and nobody had come by since the morning. " * 200)])
    lm = tiny_lm("llama", positions=9000, tokenizer=bos_tokenizer())
    seen = []
    lm.generate = lambda prompts, count: seen.extend(prompts) or [""] * len(prompts)
    (row,) = evaluate_needle(lm, filler, Settings(cells=((1, 1),), depths=(0.5,), length=8000, samples=1)).rows
    assert [row["prompt"]] == seen
    assert row["tokens"] == len(lm.tokenizer(row["prompt"])["input_ids"]) > 7900


class Instruct(Finder):
    """A model that answers questions put through its chat template, in a sentence of its own."""

    tokenizer = chat_tokenizer()

    def generate(self, prompts, max_new_tokens, templated=False):
        assert templated
        self.prompts += prompts
        self.new_tokens = max_new_tokens
        return [self.answer(prompt) for prompt in prompts]


def said_in_words(prompt):
    facts = dict(re.findall(r"The magic number of (\w+) is (\d+)\.", prompt))
    cities = [city for city in facts if city in prompt.rsplit("\n", 3)[1]]
    return "Well, 3 things: " + " and ".join(f"{city} has {facts[city]}" for city in reversed(cities)) + ". So there."


def test_an_instruct_model_is_asked_through_its_template_and_its_numbers_are_searched_for(filler):
    model, asking = Instruct(said_in_words), {"chat_template": True, "scoring": "search"}
    result = evaluate_needle(model, filler, Settings(**SIZES, **asking))
    assert mean(result) == 1.0
    assert model.new_tokens == 32
    for row, prompt in zip(result.rows, model.prompts, strict=True):
        assert prompt.startswith("<|endoftext|>user\n")
        assert prompt.endswith("?<|pad|>\n<|endoftext|>assistant\n")
        assert 396 - 32 - 6 <= row["tokens"] <= 400 - 32
        assert row["tokens"] == len(model.tokenizer(prompt)["input_ids"])
    assert result.about["asked"] == (
        "asked through the tokenizer's chat template, with the number of each city searched for in the first 32 tokens"
    )
    by_next = evaluate_needle(model, filler, Settings(**SIZES, chat_template=True))
    assert mean(by_next, n=1) == 0.0  # the first number is another
    wrong = Instruct(lambda prompt: said_in_words(prompt).replace("has ", "has 1"))
    assert mean(evaluate_needle(wrong, filler, Settings(**SIZES, **asking)), n=1) == 0.0


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        (lambda cities, numbers: " and ".join(numbers), 1.0),  # in the order asked
        (lambda cities, numbers: " and ".join(numbers[::-1]), 0.0),
        (lambda cities, numbers: f"{cities[0]} has {numbers[1]}, {cities[1]} has {numbers[0]}.", 0.0),
        (lambda cities, numbers: ", ".join([*"123456789", *numbers]), 0.0),  # guesses
        (lambda cities, numbers: f"{cities[0]} has {numbers[0]} and {cities[1]} has 1, 2, {numbers[1]}.", 0.5),
    ],
)
def test_free_answers_are_scored_by_city(filler, answer, score):
    def generated(prompt):
        facts = dict(re.findall(r"The magic number of (\w+) is (\d+)\.", prompt))
        asked = re.findall("|".join(facts), prompt.rsplit("\n", 3)[1])
        return answer(asked, [facts[city] for city in asked])

    settings = Settings(**{**SIZES, "cells": ((3, 2),)}, chat_template=True, scoring="search")
    result = evaluate_needle(Instruct(generated), filler, settings)
    assert mean(result) == score


def test_an_answer_that_the_prompt_begins_is_scored_by_city_too(filler):
    finder = Finder(read_out)
    settings = Settings(**SIZES, scoring="search")
    assert mean(evaluate_needle(finder, filler, settings), n=3) == 1.0


def test_the_prompt_may_begin_the_answer(filler):
    model = Instruct(lambda prompt: " 0")
    evaluate_needle(model, filler, Settings(**SIZES, chat_template=True))
    assert re.search(r"\nQuestion: What is the magic number of (\w+)\?<\|pad\|>\n.*\n\1 is$", model.prompts[0])


def test_text_that_spells_special_tokens_is_left_out_of_a_template():
    filler = Filler([Document("d", "It was <|pad|>a [|pad|] quiet</s> street, said <|endoftext|> he. " * 60)])
    model = Instruct(lambda prompt: "")
    evaluate_needle(model, filler, Settings(**SIZES, chat_template=True))
    assert all(prompt.count("<|endoftext|>") == 2 and prompt.count("<|pad|>") == 1 for prompt in model.prompts)


@pytest.mark.parametrize("name", ["needle", "hallucination", "harness"])
def test_experiments_take_the_template_and_the_page_says_so(name, tmp_path):
    if name == "harness":
        pytest.importorskip("lm_eval")
    lm = tiny_lm("llama", tokenizer=chat_tokenizer(), positions=1000)
    more = ["answer_tokens=2", "summary_tokens=2"] if name == "hallucination" else []
    given = {"chat_template": True, "length": 400}
    settings = settings_of(name, given, [*more, "samples=2"], quick=True, lenient=True)
    result = measured(name, lm, settings, tmp_path / "r.jsonl.gz")
    prompts = [row["prompt"] for row in result.rows]
    assert all(prompt.startswith("<|endoftext|>user\n") for prompt in prompts)
    assert all("<|pad|>\n<|endoftext|>assistant\n" in prompt for prompt in prompts)
    assert result.about["chat_template"] is True
    assert result.about["dtype"] == "float32"
    page = write_report([tmp_path / "r.jsonl.gz"], tmp_path / "r.html").read_text()
    assert "asked through the tokenizer's chat template" in html.unescape(page)
    with pytest.raises(ValueError, match="has no chat template; leave --chat-template out"):
        run_eval(name, tiny_lm("llama", positions=1000), settings, tmp_path / "no.jsonl.gz")
