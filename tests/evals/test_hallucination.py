"""Hallucination: models that copy, invent or are silent; every public format; runs that are interrupted."""

import gzip
import json
import math

import pytest
from tiny_models import bos_tokenizer, tiny_lm, tiny_model
from transformers import (
    ByT5Tokenizer,
)

from diff_transformer.data.tasks.grounded import HUB, load_grounded
from diff_transformer.data.tasks.python_tasks import documented, documented_in, lookups, summaries
from diff_transformer.data.tasks.types import GroundedItem
from diff_transformer.data.tokenizer import byte_tokenizer
from diff_transformer.errors import UserError
from diff_transformer.evals.hallucination import Settings, evaluate_hallucination, frame, summarise, trimmed
from diff_transformer.evals.judges import NO, ContainmentJudge, Judgement
from diff_transformer.evals.lm import CausalLM
from diff_transformer.evals.prompts import fit_document
from diff_transformer.evals.samples import Samples
from diff_transformer.lab.evaluate import run_eval, settings_of

QUESTIONS = [
    GroundedItem(
        "question", f"The tower has {n} steps. The bridge has {n + 1} arches.", "How many steps?", (str(n),), f"q{n}"
    )
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
    true = evaluate_hallucination(Writer(copies), SETS, ContainmentJudge())
    assert true.metrics["towers"] == true.metrics["ferries"] == true.metrics["mean"] == 1.0
    assert true.rows[0]["got"] == "10"
    assert true.rows[-1]["got"] == "On day 3 the ferry sank near the island."
    assert (true.rows[0]["expected"], true.rows[0]["verdict"], true.rows[0]["score"]) == ("10", "yes", 1.0)
    false = evaluate_hallucination(Writer(lambda prompt: "77 volcanoes"), SETS, ContainmentJudge())
    assert false.metrics["towers"] == false.metrics["ferries"] == 0.0
    json.dumps(true.rows)


def test_silence_is_wrong_and_no_judge_is_asked():
    class Never(ContainmentJudge):
        def __call__(self, item, output):
            raise AssertionError("asked")

    result = evaluate_hallucination(Writer(lambda prompt: " \n\n"), SETS, Never())
    assert result.metrics["towers"] == result.metrics["ferries"] == 0.0
    assert result.metrics["towers_empty"] == 1.0


def test_metrics_by_hand():
    def row(score, verdict, got="x", truncated=False):
        return {"set": "s", "score": score, "verdict": verdict, "got": got, "truncated": truncated}

    rows = [row(1.0, "yes"), row(0.0, "no", got=""), row(None, "undecided"), row(1.0, "yes", truncated=True)]
    assert summarise(rows) == {
        "s": 2 / 3, "s_stderr": pytest.approx(math.sqrt(2 / 9 / 2)), "s_undecided": 0.25, "s_empty": 0.25,
        "s_truncated": 0.25,
        "mean": 2 / 3,
    }  # fmt: skip
    unsure = summarise([row(None, "undecided")])
    assert unsure == {"s_undecided": 1.0, "s_empty": 0.0, "s_truncated": 0.0}


def test_the_output_ends_where_a_base_model_starts_anew():
    assert trimmed("question", "\n 42\nQuestion: x") == "42"
    assert trimmed("summary", " One.\nTwo.\n\nThree.") == "One.\nTwo."
    assert trimmed("summary", "One.\nArticle: x") == "One."


def test_the_model_s_text_is_text():
    hostile = "__import__('os').abort(); {0.__class__} %s <|endoftext|>"
    result = evaluate_hallucination(Writer(lambda prompt: hostile), {"t": QUESTIONS[:1]}, ContainmentJudge())
    assert result.rows[0]["got"] == hostile
    assert result.rows[0]["verdict"] == "no"


def test_prompts_end_with_what_the_model_must_fill():
    assert frame(QUESTIONS[0], "D.").startswith("D.\n\n")
    assert frame(QUESTIONS[0], "D.").endswith("\n\nQuestion: How many steps?\nAnswer:")
    assert frame(SUMMARIES[0], "D.") == "Article:\nD.\n\nA summary of the article in a few sentences:"


class Recorder(ContainmentJudge):
    def __init__(self):
        self.documents = []

    def __call__(self, item, output):
        self.documents.append(item.document)
        return Judgement("yes", "")


@pytest.fixture(scope="module")
def tiny():
    lm = tiny_lm("diff", vocab_size=258, positions=256)
    lm.name = "tiny"
    return lm


def test_long_texts_are_cut_to_the_positions_and_the_judge_sees_the_same(tiny, monkeypatch):
    monkeypatch.setattr(tiny, "generate", lambda prompts, count: ["something"] * len(prompts))
    long, short = GroundedItem("summary", "wörd " * 100), GroundedItem("summary", "A short one.")
    judge = Recorder()
    result = evaluate_hallucination(tiny, {"s": [long, short]}, judge, Settings(summary_tokens=40))
    cut, whole = result.rows
    assert (cut["truncated"], whole["truncated"], result.metrics["s_truncated"]) == (True, False, 0.5)
    assert 256 - 40 - 1 <= len(cut["prompt"].encode()) <= 256 - 40
    assert cut["document_tokens"] == 600
    assert cut["document_tokens_kept"] == len(judge.documents[0].encode()) < 216
    assert long.document.startswith(judge.documents[0])
    assert judge.documents[0] in cut["prompt"]
    assert judge.documents[1] == short.document


def test_a_length_beyond_the_positions_or_too_short_is_refused(tiny):
    with pytest.raises(ValueError, match="length 257 is more than the 256 positions of tiny"):
        evaluate_hallucination(tiny, SETS, ContainmentJudge(), Settings(length=257))
    with pytest.raises(ValueError, match=r"60 tokens leave \d+ for a document of \d+, below the least of 16"):
        evaluate_hallucination(
            tiny, SETS, ContainmentJudge(), Settings(length=100, summary_tokens=40, answer_tokens=40)
        )


def test_a_document_is_cut_so_that_the_tokenizer_s_own_beginning_fits_too():
    fitted = fit_document(bos_tokenizer(), "abcdefghijklmnopqrstuvwxyz", lambda text: f"<{text}>", 20)
    assert (fitted.prompt, fitted.kept, fitted.tokens) == ("<abcdefghijklmnopq>", 17, 26)
    lm = tiny_lm("llama", positions=300, tokenizer=bos_tokenizer())
    long = GroundedItem("summary", "A long text about nothing. " * 40, references=("It is long.",))
    (row,) = evaluate_hallucination(lm, {"s": [long]}, ContainmentJudge(), Settings(summary_tokens=40)).rows
    assert row["truncated"]
    assert len(lm.tokenizer(row["prompt"])["input_ids"]) == 260


def test_a_question_without_a_document_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="5 tokens leave 0 for a document of 0"):
        fit_document(byte_tokenizer(), "", lambda text: f"<{text}: who?>", 5)


def test_cutting_keeps_as_much_as_fits():
    tokenizer = byte_tokenizer()
    fitted = fit_document(tokenizer, "abcdefghijklmnopqrstuvwxyz", lambda text: f"<{text}>", 20)
    assert (fitted.prompt, fitted.kept, fitted.tokens, fitted.truncated) == ("<abcdefghijklmnopqr>", 18, 26, True)
    whole = fit_document(tokenizer, "short", lambda text: f"<{text}>", 7)
    assert (whole.prompt, whole.truncated) == ("<short>", False)


@pytest.mark.parametrize("document", ["short", "a long text " * 100])
def test_a_tokenizer_without_a_fast_backend_is_refused(document):
    wanted = "ByT5Tokenizer has no fast backend; give a tokenizer saved with tokenizer.json"
    with pytest.raises(ValueError, match=wanted):
        fit_document(ByT5Tokenizer(), document, lambda text: f"<{text}>", 60)
    lm = CausalLM(tiny_model("llama"), ByT5Tokenizer(), "slow")
    with pytest.raises(ValueError, match=wanted):
        evaluate_hallucination(
            lm, {"s": [GroundedItem("summary", document)]}, ContainmentJudge(), Settings(summary_tokens=8)
        )


def test_an_interrupted_run_ends_as_an_uninterrupted_one(tmp_path):
    whole = evaluate_hallucination(Writer(copies), SETS, ContainmentJudge())
    journal, calls = tmp_path / "journal.jsonl", []

    class Breaks(ContainmentJudge):
        def __call__(self, item, output):
            calls.append(item.id)
            if len(calls) == 4:
                raise KeyboardInterrupt
            return super().__call__(item, output)

    with pytest.raises(KeyboardInterrupt):
        evaluate_hallucination(Writer(copies), SETS, Breaks(), samples=Samples(journal))
    writer = Writer(copies)
    resumed = evaluate_hallucination(writer, SETS, Breaks(), samples=Samples(journal, resume=True))
    assert (resumed.metrics, resumed.rows) == (whole.metrics, whole.rows)
    assert calls[3:6] == ["q13", "q13", "q14"]  # the one it stopped at is judged again, those before are not
    assert not [prompt for prompt in writer.prompts if "Question" in prompt]


def test_an_interrupted_run_that_goes_on_with_another_judge_asks_it_about_everything(tmp_path):
    class Broken(ContainmentJudge):
        def __call__(self, item, output):
            if item.id == "q13":
                raise KeyboardInterrupt
            return super().__call__(item, output)

    class Never(ContainmentJudge):
        name = "never"

        def __call__(self, item, output):
            return Judgement(NO, "never")

    journal = tmp_path / "journal.jsonl"
    with pytest.raises(KeyboardInterrupt):
        evaluate_hallucination(Writer(copies), SETS, Broken(), samples=Samples(journal))
    result = evaluate_hallucination(Writer(copies), SETS, Never(), samples=Samples(journal, resume=True))
    assert {row["verdict"] for row in result.rows} == {NO}


def test_limit_takes_the_first_of_each_set():
    result = evaluate_hallucination(Writer(copies), SETS, ContainmentJudge(), samples=Samples(limit=2))
    assert [row["set"] for row in result.rows] == ["towers", "towers", "ferries", "ferries"]


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2", "diffllama"])
def test_models_of_other_families(family):
    lm = tiny_lm(family, positions=200, vocab_size=258, eos_token_id=256)
    items = [GroundedItem("question", "No such thing is known. " * n, "Who?", ("Nobody",)) for n in (1, 2, 20)]
    result = evaluate_hallucination(lm, {"q": items}, ContainmentJudge(), Settings(answer_tokens=8))
    assert [row["truncated"] for row in result.rows] == [False, False, True]
    assert all(len(row["prompt"].encode()) + 8 <= 200 for row in result.rows)


HOTPOT = {
    "_id": "h1", "question": "Where?", "answer": "Rome", "type": "bridge", "level": "easy",
    "supporting_facts": [["A", 0]], "context": [["A", ["One.", " Two."]], ["B", ["Three."]]],
}  # fmt: skip


def given(spans=(), free="", yes_no=None, unanswerable=False) -> dict:
    """One annotator's answer in the format of Qasper."""
    answer = {"extractive_spans": list(spans), "free_form_answer": free, "yes_no": yes_no, "unanswerable": unanswerable}
    return {"answer": answer, "annotation_id": "z"}


PAPER = {
    "title": "On Towers",
    "abstract": "We climb.",
    "full_text": [{"section_name": "Steps", "paragraphs": ["Ten.", "More."]}, {"section_name": None, "paragraphs": []}],
    "qas": [
        {"question": "How many?", "answers": [given(spans=["ten", "more"]), given(unanswerable=True)]},
        {"question": "Steep?", "answers": [given(yes_no=False), given(free="Quite")]},
    ],
}
PROMPTS = """# METADATA: {"qid": "1"}
Wikipedia Title: Rome
Rome is a city.

Wikipedia Title: Oslo
Oslo too.

Q: Which is older?
A: Rome was founded first. So the answer is: Rome.


# METADATA: {"qid": "2"}
Wikipedia Title: Bergen
Bergen is wet.

Q: Is it dry?
A: no
"""


def only(path) -> GroundedItem:
    (items,) = load_grounded(str(path)).values()
    assert len(items) == 1
    return items[0]


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_summaries_in_their_published_formats(tmp_path):
    xsum = only(write(tmp_path / "xsum.jsonl", {"document": "A long story.", "summary": " Short. ", "id": "7"}))
    assert xsum == GroundedItem("summary", "A long story.", references=("Short.",), id="7")
    cnn = only(write(tmp_path / "cnn.jsonl", {"article": "Text.", "highlights": "One .\nTwo .", "id": "c"}))
    assert (cnn.document, cnn.references) == ("Text.", ("One .\nTwo .",))
    news = only(write(tmp_path / "news.jsonl", {"document": "First. ||||| Second. |||||", "summary": "Both."}))
    assert news.document == "First.\n\nSecond."


def test_questions_in_their_published_formats(tmp_path):
    path = tmp_path / "hotpot.json"
    path.write_text(json.dumps([HOTPOT]))
    text = "A\nOne. Two.\n\nB\nThree."
    assert only(path) == GroundedItem("question", text, "Where?", ("Rome",), id="h1")
    columns = {"title": ["A", "B"], "sentences": [["One.", " Two."], ["Three."]]}
    assert only(write(tmp_path / "hub.jsonl", {**HOTPOT, "context": columns})).document == text
    structs = [{"title": "A", "sentences": ["One.", " Two."]}, {"title": "B", "sentences": ["Three."]}]
    assert only(write(tmp_path / "structs.jsonl", {**HOTPOT, "context": structs})).document == text
    packed = tmp_path / "wiki.json.gz"
    packed.write_bytes(gzip.compress(json.dumps([{**HOTPOT, "context": json.dumps(HOTPOT["context"])}]).encode()))
    assert only(packed).document == text
    simple = only(write(tmp_path / "simple.jsonl", {"document": "D", "question": "Q?", "answers": ["a", "b", "a"]}))
    assert simple == GroundedItem("question", "D", "Q?", ("a", "b"), id="0")


def test_papers_as_published_and_as_columns(tmp_path):
    published = tmp_path / "qasper.json"
    published.write_text(json.dumps({"1909.1": PAPER}))
    columns = {
        "section_name": [s["section_name"] for s in PAPER["full_text"]],
        "paragraphs": [s["paragraphs"] for s in PAPER["full_text"]],
    }
    asked = {
        "question": [q["question"] for q in PAPER["qas"]],
        "answers": [{"answer": [a["answer"] for a in q["answers"]]} for q in PAPER["qas"]],
    }
    hub = write(tmp_path / "rows.jsonl", {**PAPER, "id": "1909.1", "full_text": columns, "qas": asked})
    for path in (published, hub):
        ((first, second),) = load_grounded(str(path)).values()
        assert first.document == second.document == "On Towers\n\nWe climb.\n\nSteps\nTen.\nMore."
        assert (first.question, first.references) == ("How many?", ("ten, more", "unanswerable"))
        assert (second.references, second.id) == (("no", "Quite"), "1909.1-1")


def test_worked_prompts_as_questions(tmp_path):
    (tmp_path / "prompts.txt").write_text(PROMPTS)
    first, second = load_grounded(str(tmp_path))["prompts"]
    assert (first.document, first.question, first.references) == (
        "Rome\nRome is a city.\n\nOslo\nOslo too.", "Which is older?", ("Rome",)
    )  # fmt: skip
    assert (second.question, second.references) == ("Is it dry?", ("no",))


def test_several_sources_samples_and_seeds(tmp_path):
    rows = [{"document": f"D{i}", "summary": f"S{i}"} for i in range(30)]
    path, other = write(tmp_path / "a.jsonl", *rows), write(tmp_path / "b.jsonl", *rows[:3])
    sets = load_grounded(f"{path}, {other}", samples=5)
    assert {name: len(items) for name, items in sets.items()} == {"a": 5, "b": 3}
    assert load_grounded(f"{path}", samples=5)["a"] == sets["a"]
    assert load_grounded(f"{path}", samples=5, seed=1)["a"] != sets["a"]
    assert set(load_grounded(f"{path}", samples=4)["a"]) < set(sets["a"])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "x"}, r"row 0 of .*bad.jsonl cannot be read \(it has the fields text\); accepted rows are"),
        ({"document": "d", "question": "q"}, "it has no answers as text"),
        ({"document": "d", "question": "q", "answers": [3]}, "it has no answers as text"),
        ({"question": "q", "answer": "a", "context": [["A"]]}, "row 0"),
        ({"document": 3, "summary": "s"}, "row 0"),
    ],
)
def test_rows_that_cannot_be_read_are_named(tmp_path, row, message):
    with pytest.raises(ValueError, match=message):
        load_grounded(str(write(tmp_path / "bad.jsonl", row)))


def test_sources_that_are_none(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="does not exist; give 'python', 'hub:NAME'"):
        load_grounded(str(tmp_path / "nothing.json"))
    with pytest.raises(ValueError, match="holds none of"):
        load_grounded(str(tmp_path))
    with pytest.raises(ValueError, match="data is ','"):
        load_grounded(",")
    (tmp_path / "empty.json").write_text("[]")
    with pytest.raises(ValueError, match="holds no rows"):
        load_grounded(str(tmp_path / "empty.json"))
    monkeypatch.setattr(
        "datasets.load_dataset", lambda *a, **k: (_ for _ in ()).throw(ConnectionError("no network\nat all"))
    )
    with pytest.raises(
        ValueError, match=r"xsum is not in the cache .* \(ConnectionError: no network\); connect this machine"
    ):
        load_grounded("hub:xsum")


def test_the_six_sets_of_the_hub(monkeypatch):
    rows = {
        "EdinburghNLP/xsum": {"document": "D", "summary": "S", "id": "1"},
        "abisee/cnn_dailymail": {"article": "D", "highlights": "S", "id": "1"},
        "alexfabbri/multi_news": {"document": "D ||||| E", "summary": "S"},
        "allenai/qasper": {**PAPER, "id": "1"},
        "hotpotqa/hotpot_qa": HOTPOT,
        "framolfese/2WikiMultihopQA": HOTPOT,
    }
    asked = []

    def load(repository, configuration, *, split, revision):
        asked.append((repository, configuration, split, revision))
        return [rows[repository]]

    monkeypatch.setattr("datasets.load_dataset", load)
    sets = load_grounded("hub:all")
    assert list(sets) == list(HUB) == ["xsum", "cnn_dailymail", "multi_news", "qasper", "hotpotqa", "2wikimultihopqa"]
    assert [items[0].kind for items in sets.values()] == ["summary"] * 3 + ["question"] * 3
    assert asked[1] == ("abisee/cnn_dailymail", "3.0.0", "test", None)


def test_any_other_set_of_the_hub_gives_its_test_side(monkeypatch):
    sides = {"train": [{"document": "T", "summary": "t"}], "validation": [{"document": "V", "summary": "v"}]}
    monkeypatch.setattr("datasets.load_dataset", lambda *a, **k: sides)
    assert load_grounded("hub:someone/news")["news"][0].document == "V"


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
    found = {entry.name: entry for entry in documented_in(SOURCE)}
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


def test_the_command_on_the_offline_default(tiny, tmp_path):
    settings = settings_of("hallucination", {"samples": 2}, ["answer_tokens=6", "summary_tokens=6"], quick=True)
    result = run_eval("hallucination", tiny, settings, tmp_path / "out.json")
    assert [row["set"] for row in result.rows] == ["python_summaries"] * 2 + ["python_lookups"] * 2
    assert result.provenance["judge"] == "containment"
    assert result.provenance["length"] == 256


def test_the_command_with_an_endpoint_needs_a_key(tiny, tmp_path, monkeypatch):
    pytest.importorskip("openai")
    for name in ("OPENAI_API_KEY", "OPENAI_ADMIN_KEY"):
        monkeypatch.delenv(name, raising=False)
    settings = settings_of("hallucination", {}, ["judge=endpoint:m", 'judge_options={"max_tokens": 4}'])
    with pytest.raises(UserError, match=r"the judge m cannot be asked: .*OPENAI_API_KEY"):
        run_eval("hallucination", tiny, settings, tmp_path / "out.json")
