"""lm-evaluation-harness on models of known taste, on tiny models of every family, and on the paper's seven tasks."""

import json
from dataclasses import asdict
from functools import partial

import pytest
from numbers_of import mean, measured
from tiny_models import tiny_lm

from diff_transformer.data.tasks.types import MultipleChoiceItem
from diff_transformer.errors import UserError
from diff_transformer.evals import harness
from diff_transformer.evals.harness import PAPER_TASKS, Settings, evaluate_harness, local_task, local_tasks
from diff_transformer.evals.likelihood import continuation_logprobs
from diff_transformer.evals.samples import Samples
from diff_transformer.lab.evaluate import run_eval, settings_of

pytest.importorskip("lm_eval", reason="the extra `harness` is not installed")
from lm_eval.api.model import LM

ITEMS = [
    MultipleChoiceItem(f"What is {n} and {n}?", (f"{n}", f"it is {2 * n}", f"maybe {3 * n} or so"), n % 3)
    for n in range(1, 13)
]


def task_of(items, examples=()):
    splits = {"test": [asdict(item) for item in items], "train": [asdict(item) for item in examples]}
    return lambda: local_task("a set", {name: rows for name, rows in splits.items() if rows})


TASKS = {"sums": task_of(ITEMS[:8], ITEMS[8:])}


class Taste(LM):
    """A model whose log-likelihood of a continuation is what ``likes(context, continuation)`` says."""

    name = "taste"

    def __init__(self, likes):
        super().__init__()
        self.likes, self.seen = likes, []

    def loglikelihood(self, requests, disable_tqdm=False):
        self.seen += [request.args for request in requests]
        return [(float(self.likes(*request.args)), False) for request in requests]

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        raise NotImplementedError

    def generate_until(self, requests, disable_tqdm=False):
        raise NotImplementedError


def knowing(items=ITEMS, right=0.0, wrong=-50.0):
    """A model that knows which answer is right."""
    answers = {f"Question: {item.question}\nAnswer:": " " + item.choices[item.answer] for item in items}

    def likes(context, continuation):
        last = context[context.rindex("Question: ") :]
        return right if answers[last] == continuation else wrong

    return Taste(likes)


def test_a_model_that_knows_scores_one_and_its_opposite_zero():
    right = evaluate_harness(knowing(), TASKS)
    assert mean(right) == 1.0
    wrong = evaluate_harness(knowing(right=-500.0, wrong=0.0), TASKS)
    assert mean(wrong) == 0.0
    for row, item in zip(right.rows, ITEMS, strict=False):
        assert row["prompt"] == f"Question: {item.question}\nAnswer:"
        assert row["expected"] == row["got"] == item.choices[item.answer]
        assert row["score"] == 1.0
    assert all(row["got"] != row["expected"] for row in wrong.rows)
    json.dumps(right.rows)


def test_the_paper_takes_acc_norm_for_hellaswag_alone():
    taste = Taste(lambda context, continuation: -len(continuation))
    of_hellaswag = partial(local_task, "hellaswag_small", {"test": [asdict(item) for item in ITEMS[:8]]})
    both = {"sums": TASKS["sums"], "hellaswag_small": of_hellaswag}
    result = evaluate_harness(taste, both)
    assert mean(result, task="sums") == mean(result, "acc", task="sums") != mean(result, "acc_norm", task="sums")
    of = {"task": "hellaswag_small"}
    assert mean(result, **of) == mean(result, "acc_norm", **of)


def test_examples_come_before_the_question_and_never_are_the_question():
    taste = knowing()
    result = evaluate_harness(taste, TASKS, Settings(shots=2))
    assert mean(result) == 1.0
    shown = [item.question for item in ITEMS[8:]]
    for row, item in zip(result.rows, ITEMS, strict=False):
        blocks = row["prompt"].split("\n\n")
        assert len(blocks) == 3
        assert blocks[2] == f"Question: {item.question}\nAnswer:"
        for block in blocks[:2]:
            question, answer = block.removeprefix("Question: ").split("\nAnswer: ")
            assert question in shown
            assert answer in next(i.choices[i.answer] for i in ITEMS if i.question == question)


def test_without_examples_of_their_own_the_other_items_serve():
    result = evaluate_harness(knowing(), {"sums": task_of(ITEMS)}, Settings(shots=3))
    for row, item in zip(result.rows, ITEMS, strict=True):
        assert row["prompt"].count(item.question) == 1
    again = evaluate_harness(knowing(), {"sums": task_of(ITEMS)}, Settings(shots=3))
    other = evaluate_harness(knowing(), {"sums": task_of(ITEMS)}, Settings(shots=3, seed=7))
    assert [row["prompt"] for row in again.rows] == [row["prompt"] for row in result.rows]
    assert [row["prompt"] for row in other.rows] != [row["prompt"] for row in result.rows]


def test_tasks_that_cannot_be_asked_are_refused_and_samples_are_the_first_ones():
    with pytest.raises(ValueError, match="5 shots are more than the 4 examples that sums has"):
        evaluate_harness(knowing(), TASKS, Settings(shots=5))
    task = TASKS["sums"]()
    task.aggregation = lambda: {"f1": max}
    with pytest.raises(ValueError, match="task sums is of type multiple_choice and scored by f1; give tasks of"):
        evaluate_harness(knowing(), {"sums": lambda: task})
    for samples, count in ((2, 2), (100, 8)):
        assert [row["prompt"] for row in evaluate_harness(knowing(), TASKS, Settings(samples=samples)).rows] == [
            f"Question: {item.question}\nAnswer:" for item in ITEMS[:count]
        ]


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3", "diffllama", "diff"])
def test_any_model_is_scored_by_its_own_log_probabilities(family):
    lm = tiny_lm(family, vocab_size=258)
    result = evaluate_harness(lm, TASKS)
    for row, item in zip(result.rows, ITEMS, strict=False):
        choices = [list(f" {choice}".encode()) for choice in item.choices]
        expected = continuation_logprobs(lm, [list(row["prompt"].encode())], [choices])[0]
        assert row["logprobs"] == pytest.approx(expected, abs=2e-4)
        assert row["got"] == item.choices[max(range(3), key=expected.__getitem__)]


HUB_ROWS = {
    "allenai/ai2_arc": {
        "id": "a1", "question": "Which is hot?", "choices": {"text": ["ice", "fire"], "label": ["A", "B"]},
        "answerKey": "B",
    },
    "aps/super_glue": {"question": "is fire hot", "passage": "Fire is hot.", "idx": 0, "label": 1},
    "Rowan/hellaswag": {
        "ind": 1, "activity_label": "Cooking", "ctx_a": "A man lights a fire.", "ctx_b": "he",
        "ctx": "A man lights a fire. he",
        "endings": ["cooks.", "swims away.", "is a tree.", "sleeps on it."], "label": "0",
    },
    "allenai/openbookqa": {
        "id": "o1", "question_stem": "Fire is", "answerKey": "A",
        "choices": {"text": ["hot", "wet", "cold", "old"], "label": list("ABCD")},
    },
    "baber/piqa": {"goal": "Put out a fire", "sol1": "use oil", "sol2": "use water", "label": 1},
    "allenai/winogrande": {
        "sentence": "The fire melted the ice because _ was hot.", "option1": "the fire", "option2": "the ice",
        "answer": "1",
    },
}  # fmt: skip
GOLD = {
    "arc_challenge": "fire", "arc_easy": "fire", "boolq": "yes", "hellaswag": "cooks.", "openbookqa": "hot",
    "piqa": "use water", "winogrande": "fire was hot.",
}  # fmt: skip


@pytest.mark.parametrize("shots", [0, 5])
def test_the_seven_tasks_of_the_paper(monkeypatch, shots):
    """The harness's own templates, with our rows instead of the downloaded data."""
    import datasets

    def load(path, name=None, **_):
        part = datasets.Dataset.from_list([{**HUB_ROWS[path], "row": i} for i in range(8)])
        return datasets.DatasetDict(dict.fromkeys(("train", "validation", "test"), part))

    monkeypatch.setattr("datasets.load_dataset", load)
    lm = tiny_lm("llama", vocab_size=258)
    tasks = {name: (lambda name=name: harness.harness_task(name)) for name in PAPER_TASKS}
    result = evaluate_harness(lm, tasks, Settings(shots=shots, samples=2))
    assert [*dict.fromkeys(row["task"] for row in result.rows)] == list(PAPER_TASKS)
    for row in result.rows:
        assert row["expected"] == GOLD[row["task"]]
        assert row["score"] == row["acc_norm" if row["task"] == "hellaswag" else "acc"]
        assert (row["got"] == row["expected"]) == (row["score"] == 1.0)


def test_published_rows_in_files_are_asked_as_the_harness_asks_them(monkeypatch, tmp_path):
    """To the letter: another question gives another score (EleutherAI/lm-evaluation-harness issue 2914)."""
    import datasets

    hub = {
        "arc_easy": "allenai/ai2_arc", "boolq": "aps/super_glue", "hellaswag": "Rowan/hellaswag",
        "openbookqa": "allenai/openbookqa", "piqa": "baber/piqa", "winogrande": "allenai/winogrande",
    }  # fmt: skip
    rows = {name: dict(HUB_ROWS[path]) for name, path in hub.items()}
    rows["hellaswag"] |= {"activity_label": "Hair", "ctx_a": "[header] How to [title] Dye.  [step] Go.", "ctx_b": "he"}
    rows["piqa"]["goal"] = "How do I do it? "
    rows["boolq"] |= {"passage": " Snow is. ", "question": "is it?"}

    def load(path, name=None, **_):
        part = next(rows[task] for task, of in hub.items() if of == path)
        return datasets.DatasetDict(dict.fromkeys(("train", "validation", "test"), datasets.Dataset.from_list([part])))

    monkeypatch.setattr("datasets.load_dataset", load)
    theirs, ours = (Taste(lambda context, continuation: -len(continuation)) for _ in range(2))
    expected = evaluate_harness(theirs, {name: (lambda name=name: harness.harness_task(name)) for name in hub})
    for name, row in rows.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    tasks = {name: local_tasks(str(tmp_path / f"{name}.jsonl"))[name] for name in rows}
    result = evaluate_harness(ours, tasks)
    assert ours.seen == theirs.seen
    assert [row["score"] for row in result.rows] == [row["score"] for row in expected.rows]


def test_a_folder_is_one_set_and_parts_without_answers_are_not_scored(tmp_path):
    row = HUB_ROWS["Rowan/hellaswag"]
    for part, label in (("train", 0), ("val", "0"), ("test", "")):
        write(tmp_path / "swag" / f"hellaswag_{part}.jsonl", {**row, "label": label, "ctx_a": part})
    task = local_tasks(str(tmp_path / "swag"))["swag"]()
    assert [doc["query"].split()[1] for doc in task.eval_docs] == ["val"]
    assert [doc["query"].split()[1] for doc in task.fewshot_docs()] == ["train"]


def test_without_a_network_the_message_says_what_to_do(monkeypatch):
    def fails(*args, **options):
        raise ConnectionError("no route to the hub")

    monkeypatch.setattr("datasets.load_dataset", fails)
    with pytest.raises(
        ValueError,
        match=r"arc_easy are not cached and cannot be downloaded \(ConnectionError: no route .* set data to a file or",
    ):
        harness.run(knowing(), harness.Settings(tasks=("arc_easy",)), Samples())
    of_the_paper = harness.task_manager(True)  # the whole index takes long to read
    monkeypatch.setattr(harness, "task_manager", lambda _: of_the_paper)
    with pytest.raises(ValueError, match="has no task 'arc_esay'; the paper's are arc_challenge"):
        harness.harness_task("arc_esay")


def test_without_the_harness_the_message_says_what_to_install(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ValueError, match=r"pip install diff-transformer\[harness\]"):
        evaluate_harness(knowing(), TASKS)


def write(path, *rows):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_files_that_are_no_tasks(tmp_path):
    with pytest.raises(UserError, match=r"no file at .*nothing\.jsonl; give \.jsonl"):
        local_tasks(str(tmp_path / "nothing.jsonl"))
    write(tmp_path / "a.jsonl", {})
    write(tmp_path / "b.jsonl", {})
    with pytest.raises(UserError, match=r"no file of .* has train, validation or test in its name"):
        local_tasks(str(tmp_path))
    for name in ("Easy-Test", "Hard-Test"):
        write(tmp_path / f"{name}.jsonl", {})
    with pytest.raises(UserError, match=r"has several files for test; give the files of one set"):
        local_tasks(str(tmp_path))
    (tmp_path / "odd.jsonl").write_text('{"a": 1}\n{"b"\n')
    with pytest.raises(UserError, match=r"odd\.jsonl is neither a JSON list nor JSON lines"):
        local_tasks(str(tmp_path / "odd.jsonl"))
    write(tmp_path / "bad.jsonl", {"text": "q"})
    with pytest.raises(UserError, match=r"the rows of bad cannot be asked .*give those of ARC"):
        evaluate_harness(knowing(), local_tasks(str(tmp_path / "bad.jsonl")))


def test_the_command_runs_a_folder_and_the_offline_default(tmp_path):
    data = tmp_path / "Mini"
    questions = [{"question": f"{n}?", "choices": ["no", "yes"], "answer": n % 2} for n in range(4)]
    write(data / "Mini-Test.jsonl", *questions[:2])
    write(data / "Mini-Train.jsonl", questions[2])
    lm = tiny_lm("diff", vocab_size=258, batch_size=8)
    result = measured(
        "harness", lm, settings_of("harness", {"data": str(data)}, ["shots=1"]), tmp_path / "out.jsonl.gz"
    )
    assert mean(result, "acc") in (0.0, 0.5, 1.0)
    assert result.rows[0]["prompt"] == "Question: 2?\nAnswer: no\n\nQuestion: 0?\nAnswer:"
    quick = settings_of("harness", {"samples": 3}, quick=True)
    result = measured("harness", lm, quick, tmp_path / "quick.jsonl.gz")
    assert len(result.rows) == 3
    assert {row["task"] for row in result.rows} == {"python_descriptions"}
    assert all(row["expected"] in row["choices"] for row in result.rows)
    with pytest.raises(UserError, match="has no task other; it has: Mini"):
        run_eval(
            "harness", lm, settings_of("harness", {}, [f"data={data}", 'tasks=["other"]']), tmp_path / "no.jsonl.gz"
        )
