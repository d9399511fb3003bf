"""Hallucination: models that copy, invent or are silent; every public format; runs that are interrupted."""

import ast
import json

import pytest
from numbers_of import mean, measured
from tiny_models import bos_tokenizer, tiny_lm, tiny_model
from transformers import (
    ByT5Tokenizer,
)

from diff_transformer.data.tasks.python_tasks import documented, documented_in, lookups, summaries
from diff_transformer.data.tasks.types import GroundedItem
from diff_transformer.data.tokenizer import byte_tokenizer
from diff_transformer.errors import UserError
from diff_transformer.evals.hallucination import Settings, evaluate_hallucination, frame, trimmed
from diff_transformer.evals.judges import Judgement, contained
from diff_transformer.evals.lm import CausalLM
from diff_transformer.evals.prompts import fit_document
from diff_transformer.lab.evaluate import run_eval, settings_of

QUESTIONS = [
    GroundedItem("question", f"The tower has {n} steps. The bridge has {n + 1} arches.", "How many steps?", (str(n),))
    for n in range(10, 16)
]
SUMMARIES = [
    GroundedItem("summary", f"On day {n} the ferry sank near the island. Everyone swam home.", references=("It sank.",))
    for n in range(4)
]
SETS = {"towers": QUESTIONS, "ferries": SUMMARIES}


class Writer:
    """A model whose continuation is ``answer(prompt)``."""

    name, tokenizer, batch_size = "writer", byte_tokenizer(), 4

    def __init__(self, answer):
        self.answer, self.prompts = answer, []

    def generate(self, prompts, max_new_tokens):
        self.prompts += prompts
        return [self.answer(prompt) for prompt in prompts]


def copies(prompt):
    """Right answers, and the article's first sentence as a summary, each followed by what a base model adds."""
    if "Question:" in prompt:
        return " " + prompt.split(" steps.")[0].split("has ")[1] + "\nQuestion: And arches?\nAnswer: 99"
    return " " + prompt.removeprefix("Article:\n").split(".")[0] + ".\n\nArticle:\nA volcano"


def test_copying_scores_one_and_inventing_zero():
    true = evaluate_hallucination(Writer(copies), SETS, contained)
    assert mean(true, set="towers") == mean(true, set="ferries") == 1.0
    assert true.rows[0]["got"] == "10"
    assert true.rows[-1]["got"] == "On day 3 the ferry sank near the island."
    assert (true.rows[0]["expected"], true.rows[0]["verdict"], true.rows[0]["score"]) == ("10", "yes", 1.0)
    false = evaluate_hallucination(Writer(lambda prompt: "77 volcanoes"), SETS, contained)
    assert mean(false) == 0.0
    json.dumps(true.rows)
    assert len({row["example"] for row in true.rows}) == len(true.rows) == 10


def test_silence_is_wrong_and_no_judge_is_asked():
    result = evaluate_hallucination(Writer(lambda prompt: " \n\n"), SETS, judge=None)
    assert {(row["score"], row["got"]) for row in result.rows} == {(0.0, "")}


def test_the_output_ends_where_a_base_model_starts_anew():
    assert trimmed("question", "\n 42\nQuestion: x") == "42"
    assert trimmed("summary", " One.\nTwo.\n\nThree.") == "One.\nTwo."
    assert trimmed("summary", "One.\nArticle: x") == "One."


def test_prompts_end_with_what_the_model_must_fill():
    assert frame(QUESTIONS[0], "D.").startswith("D.\n\n")
    assert frame(QUESTIONS[0], "D.").endswith("\n\nQuestion: How many steps?\nAnswer:")
    assert frame(SUMMARIES[0], "D.") == "Article:\nD.\n\nA summary of the article in a few sentences:"


@pytest.fixture(scope="module")
def tiny():
    lm = tiny_lm("diff", vocab_size=258, positions=256)
    lm.name = "tiny"
    return lm


def test_long_texts_are_cut_to_the_positions_and_the_judge_sees_the_same(tiny, monkeypatch):
    monkeypatch.setattr(tiny, "generate", lambda prompts, count: ["something"] * len(prompts))
    long, short = GroundedItem("summary", "wörd " * 100), GroundedItem("summary", "A short one.")
    documents = []

    def judge(item, output):
        documents.append(item.document)
        return Judgement("yes", "")

    result = evaluate_hallucination(tiny, {"s": [long, short]}, judge, Settings(summary_tokens=40))
    cut, whole = result.rows
    assert (cut["truncated"], whole["truncated"]) == (True, False)
    assert 256 - 40 - 1 <= len(cut["prompt"].encode()) <= 256 - 40
    assert len(documents[0].encode()) < 216
    assert long.document.startswith(documents[0])
    assert documents[0] in cut["prompt"]
    assert documents[1] == short.document


def test_a_length_beyond_the_positions_or_too_short_is_refused(tiny):
    with pytest.raises(ValueError, match="length has 257 tokens, more than the 256 positions of tiny"):
        evaluate_hallucination(tiny, SETS, contained, Settings(length=257))
    with pytest.raises(ValueError, match=r"a prompt of 60 tokens leaves \d+ for a document of \d+, below the"):
        evaluate_hallucination(tiny, SETS, contained, Settings(length=100, summary_tokens=40, answer_tokens=40))
    with pytest.raises(ValueError, match="a prompt of 0 tokens leaves 0 for a document"):
        evaluate_hallucination(tiny, SETS, contained, Settings(length=8, summary_tokens=40))


def test_a_document_is_cut_so_that_the_tokenizer_s_own_beginning_fits_too():
    fitted = fit_document(bos_tokenizer(), "abcdefghijklmnopqrstuvwxyz", lambda text: f"<{text}>", 20)
    assert fitted.prompt == "<abcdefghijklmnopq>"
    lm = tiny_lm("llama", positions=300, tokenizer=bos_tokenizer())
    long = GroundedItem("summary", "A long text about nothing. " * 40, references=("It is long.",))
    (row,) = evaluate_hallucination(lm, {"s": [long]}, contained, Settings(summary_tokens=40)).rows
    assert row["truncated"]
    assert len(lm.tokenizer(row["prompt"])["input_ids"]) == 260


def test_cutting_keeps_as_much_as_fits():
    tokenizer = byte_tokenizer()
    fitted = fit_document(tokenizer, "abcdefghijklmnopqrstuvwxyz", lambda text: f"<{text}>", 20)
    assert (fitted.prompt, fitted.document) == ("<abcdefghijklmnopqr>", "abcdefghijklmnopqr")
    assert fit_document(tokenizer, "short", lambda text: f"<{text}>", 7).prompt == "<short>"


@pytest.mark.parametrize("document", ["short", "a long text " * 100])
def test_a_tokenizer_without_a_fast_backend_is_refused(document):
    wanted = "ByT5Tokenizer has no fast backend; give a tokenizer saved with tokenizer.json"
    with pytest.raises(ValueError, match=wanted):
        fit_document(ByT5Tokenizer(), document, lambda text: f"<{text}>", 60)
    lm = CausalLM(tiny_model("llama"), ByT5Tokenizer(), "slow")
    with pytest.raises(ValueError, match=wanted):
        evaluate_hallucination(lm, {"s": [GroundedItem("summary", document)]}, contained, Settings(summary_tokens=8))


SOURCE = '''
class Box:
    """A box that holds things in order.

    More about the box,
    on two lines.
    """

    def put(self, thing):
        """Put a thing into the box, on top of the others."""

    def _hidden(self):
        """Not to be asked about in any question."""

def short():
    """Short."""
'''


def test_documented_names_of_a_module():
    found = {entry.name: entry for entry in documented_in(ast.parse(SOURCE))}
    assert set(found) == {"Box", "put"}
    assert found["Box"].summary == "A box that holds things in order."
    assert found["Box"].body == "More about the box, on two lines."


def test_questions_from_python_hold_their_answers_and_only_one_is_right():
    items = lookups(seed=3)
    assert len(items) == len(documented())
    for item in items[:40]:
        lines = dict(line.split(": ", 1) for line in item.document.split("\n"))
        assert len(lines) == 4
        asked = item.question.removeprefix("Which name has this description? ")
        assert [name for name, summary in lines.items() if summary == asked] == [item.references[0]]
    assert lookups(seed=3) == items != lookups(seed=4)
    places = [
        item.document.split("\n").index(
            next(x for x in item.document.split("\n") if x.startswith(item.references[0] + ":"))
        )
        for item in items
    ]
    assert {places.count(i) > len(items) / 8 for i in range(4)} == {True}
    assert all(item.references[0] not in item.document for item in summaries()[:5])


def test_the_command_on_the_offline_default(tmp_path):
    lm = tiny_lm("diff", vocab_size=258, positions=450)  # a byte is a token, and questions have up to 140 characters
    settings = settings_of("hallucination", {"samples": 2}, ["answer_tokens=6", "summary_tokens=6"], quick=True)
    result = measured("hallucination", lm, settings, tmp_path / "out.jsonl.gz")
    assert [row["set"] for row in result.rows] == ["python_summaries"] * 2 + ["python_lookups"] * 2
    assert result.about["judge"] == "containment"
    assert result.about["length"] == 450


def test_the_command_with_an_endpoint_needs_a_key(tiny, tmp_path, monkeypatch):
    pytest.importorskip("openai")
    for name in ("OPENAI_API_KEY", "OPENAI_ADMIN_KEY"):
        monkeypatch.delenv(name, raising=False)
    settings = settings_of("hallucination", {}, ["judge=endpoint:m", 'judge_options={"max_tokens": 4}'])
    with pytest.raises(UserError, match=r"the judge m cannot be asked: .*OPENAI_API_KEY"):
        run_eval("hallucination", tiny, settings, tmp_path / "out.jsonl.gz")
