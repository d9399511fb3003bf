"""RULER's tasks with models that are known to solve them or not, and their published form."""

import ast
import importlib.util
import re
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from numbers_of import mean, measured
from tiny_models import bos_tokenizer, chat_tokenizer, tiny_lm

from diff_transformer.data.ruler import NOISE, TASKS, longest, material, score
from diff_transformer.data.seeding import evaluation_rng
from diff_transformer.data.tasks.types import GroundedItem
from diff_transformer.data.tokenizer import byte_tokenizer
from diff_transformer.errors import UserError
from diff_transformer.evals.ruler import Settings, lengths_of, run
from diff_transformer.evals.samples import ALL

LETTERS = "abcdefghijklmnopqrst"
WORDS = [f"word{a}{b}" for a in LETTERS for b in "aeiouabcde"] + [f"thing{a}{b}" for a in LETTERS for b in LETTERS]
TEXT = [word for i, word in enumerate(WORDS) for word in (f"{word}", "." if i % 7 == 0 else "and")]
READING = [
    GroundedItem("question", f"The river of {name} is the {river}.", f"Which river is in {name}?", (river, "a river"))
    for name, river in (("Vienna", "Danube"), ("Rome", "Tiber"), ("Paris", "Seine"))
]


@pytest.fixture(scope="module")
def of():
    return material([f"{word}." if i % 9 == 0 else word for i, word in enumerate(WORDS)], READING)


def sample(name, units, of, number=0, length=4096):
    return TASKS[name].make(evaluation_rng(0, "ruler", name, length, number), units, of, length)


def solved(prompt):
    """The answer to a prompt of any task, by rule."""
    if "VAR" in prompt:
        text, asked = prompt.rsplit("Memorize and track", 1)[1].split("\nQuestion: ")
        names = {re.search(r"assigned the value (\d+)", asked)[1]}
        for new, old in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", text):
            names |= {new} if old in names else set()
        return " ".join(names)
    if "numbered list" in prompt:
        listed = re.findall(r"\d+\. (\w+)", prompt.rsplit("Memorize the ones", 1)[1].split("\nQuestion: ")[0])
        return " ".join(word for word, _ in Counter(listed).most_common(10))
    if "coded" in prompt:
        words = prompt.split("appeared coded words. ", 1)[1].split("\nQuestion: ")[0].split()
        return " ".join(word for word, _ in Counter(words).most_common(4))
    if "Document 1:" in prompt:
        place = re.findall(r"Which river is in (\w+)", prompt)[-1]
        return re.search(rf"The river of {place} is the (\w+)", prompt)[1]
    asked = re.findall(r"magic \w+ for (.*?) mentioned", prompt)[-1].replace(", and ", ", ").split(", ")
    found = re.findall(r"magic \w+ for (\S+) is: (\S+)\.", prompt)
    return " ".join(value for key, value in found if key in asked)


@pytest.mark.parametrize("name", TASKS)
def test_each_task_is_solved_by_its_rule_and_by_nothing_else(name, of):
    task = TASKS[name]
    for number, units in enumerate((task.least, 40, 90)):
        drawn = sample(name, units, of, number)
        assert score(task, drawn.answers, solved(drawn.question + drawn.beginning)) == 1
        assert score(task, drawn.answers, "I cannot say.") == 0
        assert drawn == sample(name, units, of, number)
        assert drawn.answers != sample(name, units, of, number + 1).answers or name == "qa"


def test_answers_count_in_shares_or_one_suffices(of):
    values = sample("niah_multivalue", 20, of).answers
    assert len(values) == 4
    assert score(TASKS["niah_multivalue"], values, f"{values[0]} and {values[2]}") == 0.5
    assert score(TASKS["qa"], ("Danube", "a river"), "it is THE DANUBE") == 1
    assert len(sample("vt", 20, of).answers) == 5
    assert len(sample("cwe", 30, of).answers) == 10
    assert len(sample("niah_multiquery", 20, of).answers) == 4


def test_needles_are_spread_over_the_text(of):
    places = []
    for number in range(60):
        question = sample("niah_single_1", 50, of, number).question
        lines = question.split("\n")[1:-1]
        assert sorted(Counter(lines).values()) == [1, 50]
        assert lines.count(NOISE) == 50
        places.append(next(i for i, line in enumerate(lines) if line != NOISE))
    assert min(places) < 5
    assert max(places) > 45
    assert 18 < np.mean(places) < 32


def test_the_longest_that_fits_is_taken():
    make = lambda units: units  # noqa: E731
    for limit in (3, 4, 7, 100, 1023):
        assert longest(make, lambda drawn, limit=limit: drawn <= limit, 3) == limit
    assert longest(make, lambda drawn: False, 3) is None
    assert longest(lambda units: min(units, 40), lambda drawn: True, 3) == 40


class Solver:
    """A model that answers by rule, with ``answer(prompt)``."""

    name, prefix = "solver", [256]

    def __init__(self, tokenizer=None, answer=solved):
        self.tokenizer, self.answer, self.prompts = tokenizer or byte_tokenizer(), answer, []

    def generate(self, prompts, max_new_tokens, templated=False):
        self.prompts += prompts
        return [self.answer(prompt) for prompt in prompts]


@pytest.mark.parametrize("chat", [False, True])
def test_prompts_are_as_long_as_the_length_allows(chat, monkeypatch):
    monkeypatch.setattr("diff_transformer.evals.ruler.haystack", lambda *of: (Words(), "all"))
    lm = Solver(chat_tokenizer() if chat else None)
    settings = Settings(lengths=(2600, 3000), samples=2, chat_template=chat)
    result = run(lm, settings, ALL)
    assert mean(result) == 1
    assert len(result.rows) == 11 * 2 * 2 == len(lm.prompts)
    for row in result.rows:
        room = row["length"] - TASKS[row["task"]].new_tokens
        used = len(lm.tokenizer(row["prompt"], add_special_tokens=False)["input_ids"]) + (not chat)
        assert room - 260 < used <= room
    assert ("asked" in result.about) == chat


class Words:
    words = (*TEXT, *(word for word in TEXT if word != "."))  # the second half is one sentence

    def without(self, spellings):
        return self


def test_what_cannot_be_asked_is_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setattr("diff_transformer.evals.ruler.haystack", lambda *of: (Words(), "all"))
    lm = Solver()
    with pytest.raises(UserError, match=r"no task of RULER 'niah'.*there are: niah_single_1"):
        run(lm, Settings(tasks=("niah",)), ALL)
    with pytest.raises(UserError, match=r"task vt takes \d+ tokens at least, and length is 700; give more"):
        run(lm, Settings(tasks=("niah_single_1", "vt"), length=700), ALL)
    assert not lm.prompts  # it is said before anything is measured
    with pytest.raises(UserError, match="has no chat template"):
        run(lm, Settings(chat_template=True), ALL)
    (tmp_path / "summaries.jsonl").write_text('{"document": "text", "summary": "short"}\n')
    with pytest.raises(UserError, match="has no documents with questions and answers"):
        run(lm, Settings(tasks=("qa",), data=str(tmp_path / "summaries.jsonl")), ALL)
    with pytest.raises(UserError, match="the text has 2 different words"):
        material(["some", "words"])


def test_a_real_model_is_measured(tmp_path):
    lm = tiny_lm("llama", positions=900, tokenizer=bos_tokenizer())
    settings = Settings(tasks=("niah_single_1", "qa"), length=900, samples=1)
    record = measured("ruler", lm, settings, tmp_path / "r.jsonl.gz")
    assert {row["task"] for row in record.rows} == {"niah_single_1", "qa"}
    assert lengths_of(settings) == (900,)


def published(file, name):
    """The value of ``name`` in a file of lm-evaluation-harness, which follows the published generator."""
    folder = Path(importlib.util.find_spec("lm_eval").origin).parent / "tasks" / "ruler"
    for node in ast.walk(ast.parse((folder / file).read_text())):
        if isinstance(node, ast.Assign) and node.targets[0].id == name:
            return ast.literal_eval(node.value)
    raise LookupError(name)


@pytest.mark.parametrize(
    ("name", "file", "place"),
    [("vt", "vt_utils.py", "variable_tracking"), ("cwe", "cwe_utils.py", None), ("fwe", "fwe_utils.py", None),
     ("qa", "qa_utils.py", None)],
)  # fmt: skip
def test_prompts_have_the_published_form(name, file, place, of):
    pytest.importorskip("lm_eval")
    form = published(file, "CONFIG")
    form = form[place] if place else form
    drawn = sample(name, 50, of)
    parts = [re.escape(part) for part in re.split(r"\{\w+\}", form["template"])]
    assert re.search(".*".join(parts) + "$", drawn.question, re.DOTALL)
    ending = [re.escape(part) for part in re.split(r"\{\w+\}", form["answer_prefix"].strip())]
    assert re.fullmatch(".*".join(ending), drawn.beginning.strip())
    assert TASKS[name].new_tokens == form["tokens_to_generate"]


@pytest.mark.parametrize("name", [name for name in TASKS if name.startswith("niah")])
def test_needles_have_the_published_form(name, of):
    pytest.importorskip("lm_eval")
    form, needle = published("niah_utils.py", "TEMPLATE"), published("prepare_niah.py", "NEEDLE")
    drawn = sample(name, 50, of)
    if len(drawn.answers) == 1:
        for some, one in (("Some", "A"), ("are all", "is"), ("are", "is")):
            form = form.replace(some, one)
    escaped = partial(re.sub, r"\\{\w+\\}", ".*")
    assert re.fullmatch(escaped(re.escape(form)), drawn.question, re.DOTALL)
    assert len(re.findall(escaped(re.escape(needle)).replace(".*", r"\S+"), drawn.question)) >= len(drawn.answers)
