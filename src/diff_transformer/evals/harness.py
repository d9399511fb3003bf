"""lm-evaluation-harness (Tables 1 and 8): multiple choice by log-likelihood, zero- and few-shot.

    Question: ...  Answer: ...      examples, for few-shot
    Question: ...  Answer:| choice  the choice with the highest log-likelihood, in total or per character

``data="hub"`` runs the harness's own tasks, which it downloads. Rows of a published set in local files are asked by the
harness's task of that set. Other questions in files, and those of "python", have the format of ARC.

The paper's tables use ``acc_norm`` for HellaSwag and ``acc`` for the other six tasks. Of all combinations, only this
one reproduces the printed means of StableLM-base-alpha-3B-v2 (56.8) and OpenLLaMA-3B-v2 (57.5) from the published
scores by task.
"""

import logging
import math
import os
import re
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from diff_transformer.checks import require_positive
from diff_transformer.data.sources import suffix_of
from diff_transformer.data.tasks.python_tasks import descriptions, names
from diff_transformer.data.tasks.rows import SUFFIXES, rows_of, stem_of
from diff_transformer.errors import UserError
from diff_transformer.evals.lm import max_positions
from diff_transformer.evals.prompts import asked_details, check_asking, worded
from diff_transformer.evals.samples import Samples
from diff_transformer.evals.types import Result

PAPER_TASKS = ("arc_challenge", "arc_easy", "boolq", "hellaswag", "openbookqa", "piqa", "winogrande")
FOLDERS = ("arc", "super_glue/boolq", "hellaswag", "openbookqa", "piqa", "winogrande")  # of PAPER_TASKS in lm_eval
# The harness's task of a published set, by a column that other sets do not have.
_TASKS = {
    "endings": "hellaswag", "goal": "piqa", "passage": "boolq", "option1": "winogrande",
}  # fmt: skip
# The column of the question in sets that have one.
_QUESTIONS = {"arc_easy": "question", "openbookqa": "question_stem", "piqa": "goal", "": "question"}
_SPLITS = {"train": ("train",), "validation": ("val", "valid", "validation", "dev"), "test": ("test",)}
_ANSWERS = ("label", "answer", "answerKey")
REQUESTS = 256  # per step of the progress bar
METRICS = ("paper", "acc", "acc_norm")
QUICK = {"data": "python", "samples": 40}


@dataclass(frozen=True)
class Settings:
    """Tasks and scoring."""

    # "hub" (the harness's tasks, downloaded on first use), "python" (made from the running Python's documentation), or
    # one set: a file, or a folder of files with train, validation or test in their names. Their rows have the columns
    # that the published set has on the hub, or are {"question", "choices", "answer"}, the answer as an index from 0.
    data: str = "hub"
    # Names of the harness's tasks; by default the paper's seven. For local data: the tasks to run, by default all.
    tasks: tuple[str, ...] = PAPER_TASKS
    # Examples before each question. Table 1 has 0, Table 8 has 5.
    shots: int = 0
    # "acc" (highest log-likelihood), "acc_norm" (highest per character), or "paper": acc_norm for HellaSwag and acc for
    # all others. A task without acc_norm is scored by acc.
    metric: str = "paper"
    # First items of each task; None for all.
    samples: int | None = None
    # Ask through the tokenizer's chat template, as the harness does; few-shot examples are earlier turns.
    chat_template: bool = False
    # Words of a question of "python" or of a file, with {question}; empty for "Question: {question}\nAnswer:". Tasks of
    # the harness have their own.
    wording: str = ""
    # Seed of the draw of examples.
    seed: int = 1234


def run(lm, settings: Settings, samples: Samples) -> Result:
    """Load the tasks and evaluate."""
    if settings.data == "hub":
        if settings.wording:
            raise UserError(
                "wording is of our own sets of questions, and data is 'hub', whose tasks have their own; leave wording "
                "out, or give a file"
            )
        tasks = {name: partial(harness_task, name) for name in settings.tasks}
    else:
        local = local_tasks(settings.data, settings.wording)
        chosen = settings.tasks if settings.tasks != PAPER_TASKS else tuple(local)
        unknown = [name for name in chosen if name not in local]
        if unknown:
            raise UserError(f"{settings.data} has no task {', '.join(unknown)}; it has: {', '.join(local)}")
        tasks = {name: local[name] for name in chosen}
    return evaluate_harness(lm, tasks, settings, samples)


def evaluate_harness(
    lm,
    tasks: Mapping[str, Callable[[], Any]],
    settings: Settings = Settings(),
    samples: Samples | None = None,
) -> Result:
    """The answers to each of ``tasks``, scored as the harness does.

    Args:
        lm: a ``CausalLM``, or a ``lm_eval.api.model.LM`` with a name.
        tasks: functions that return a task object of the harness, by name.
        settings: without ``data`` and ``tasks``.

    Returns:
        A row for each item: task, shots, prompt, choices, logprobs, ``score`` by ``metric``, ``acc``, ``acc_norm`` if
        the task has it, ``truncated`` if the prompt's beginning was cut; or ``skipped``, why the model cannot read it.

    Raises:
        UserError: if the harness is not installed, or a task cannot be downloaded or has too few examples.
    """
    shots, metric, items, seed = settings.shots, settings.metric, settings.samples, settings.seed
    chat_template, wording = settings.chat_template, settings.wording
    require_positive(items=items)
    if shots < 0:
        raise UserError(f"shots is {shots}; give 0 or more")
    if metric not in METRICS:
        raise UserError(f"metric is {metric!r}; give one of {', '.join(METRICS)}")
    check_asking(getattr(lm, "tokenizer", None), chat_template, wording, ("question",))
    lm_eval = _library()
    samples = samples or Samples()
    rows: list[dict] = []
    with _quiet():
        model = harness_model(lm)
        for name, source in tasks.items():
            task = source()
            if shots and shots > (there := len(task.fewshot_docs()) - (task.config.fewshot_split == "test")):
                raise UserError(f"{shots} shots are more than the {there} examples that {name} has; give fewer")
            count = min(len(task.eval_docs), items or len(task.eval_docs), samples.limit or len(task.eval_docs))

            def score(places: list[int], name=name, task=task, count=count) -> list[dict]:
                bar = samples.bar
                if bar is not None:
                    model.step = lambda done, total: bar(name, count * done // total, count)
                scored = _score(lm_eval, model, name, task, count, shots, seed, chat_template)
                return [scored[place] for place in places]

            rows += samples.rows(name, range(count), score, batch_size=count)
    for name in tasks:
        of_task = [row for row in rows if row["task"] == name]
        if of_task and all("skipped" in row for row in of_task):
            raise UserError(f"{of_task[0]['skipped']}; so have all items: give a model with more positions")
    for row in rows:
        row["shots"] = shots
        if "skipped" not in row:
            row["score"], row["got"] = row[_metric(row, metric)], row["choices"][_likeliest(row, metric)]
    about = {"tasks": list(tasks), "lm_eval": lm_eval.__version__}
    return Result("harness", rows, about | asked_details(chat_template, wording))


def _score(lm_eval, model, name: str, task, count: int, shots: int, seed: int, chat: bool) -> list[dict]:
    """A row for each of the first ``count`` items. They are scored together: the draw of examples depends on it."""
    if task.OUTPUT_TYPE != "multiple_choice":
        raise UserError(f"task {name} is of type {task.OUTPUT_TYPE}; give tasks of multiple choice, as the paper's are")
    task.set_config("num_fewshot", shots)
    task.set_fewshot_seed(seed=seed)
    outcome = lm_eval.evaluate(
        lm=model, task_dict={name: task}, limit=count, bootstrap_iters=0, log_samples=True, apply_chat_template=chat,
        fewshot_as_multiturn=chat,
    )  # fmt: skip
    logged = sorted(outcome["samples"][name], key=lambda sample: sample["doc_id"])
    return [_row(model, name, task, sample) for sample in logged]


def _skipped(model, name: str, sample: dict) -> dict | None:
    """The row of an item with a choice that the model cannot read; None for all others."""
    reasons = [model.too_long(continuation) for _, continuation in sample["arguments"]]
    reason = next(filter(None, reasons), None)
    if reason is None:
        return None
    prompt = sample["arguments"][0][0]
    return {"task": name, "prompt": prompt, "score": None, "skipped": f"row {sample['doc_id']} of {name}: {reason}"}


def _row(model, name: str, task, sample: dict) -> dict:
    skipped = _skipped(model, name, sample)
    if skipped is not None:
        return skipped
    arguments = [(context, continuation) for context, continuation in sample["arguments"]]
    contexts, continuations = zip(*arguments, strict=True)
    prompt, choices = contexts[0], [continuation.strip() for continuation in continuations]
    in_context = len(set(contexts)) > 1  # WinoGrande: the choices precede one shared ending
    if in_context:
        prompt = os.path.commonprefix(contexts)  # noqa: RUF071 (of characters)
        choices = [context[len(prompt) :] + continuation for context, continuation in arguments]
    gold = task.doc_to_text(sample["doc"]) if in_context else sample["target"]
    row = {
        "task": name, "set": task.config.task, "prompt": prompt, "choices": choices,
        "expected": choices[gold] if isinstance(gold, int) and 0 <= gold < len(choices) else str(gold),
        "logprobs": [float(logprob) for logprob, _ in sample["filtered_resps"]],
        "lengths": [max(1, len(choice)) for choice in task.doc_to_choice(sample["doc"])],
        "truncated": any(model.cuts(context, continuation) for context, continuation in arguments),
        "acc": float(sample["acc"]),
    }  # fmt: skip
    if "acc_norm" in sample:
        row["acc_norm"] = float(sample["acc_norm"])
    return row


def _metric(row: dict, metric: str) -> str:
    if metric == "paper":
        metric = "acc_norm" if row["set"].lower().startswith("hellaswag") else "acc"
    return metric if metric in row else "acc"


def _likeliest(row: dict, metric: str) -> int:
    lengths = row["lengths"] if _metric(row, metric) == "acc_norm" else [1] * len(row["choices"])
    scores = [logprob / length for logprob, length in zip(row["logprobs"], lengths, strict=True)]
    return max(range(len(scores)), key=scores.__getitem__)


def _library():
    try:
        import lm_eval
        import lm_eval.models.huggingface
    except ImportError as error:
        raise UserError(
            f"this experiment needs lm-evaluation-harness ({error}); install it with "
            "`pip install diff-transformer[harness]`"
        ) from None
    return lm_eval


@contextmanager
def _quiet():
    """Silence the harness's log and progress bars, which would interleave with ours."""
    import lm_eval.api.task

    module: Any = lm_eval.api.task
    logger = logging.getLogger("lm_eval")
    level, bars = logger.level, getattr(module, "tqdm", None)
    logger.setLevel(logging.ERROR)
    if bars is not None:
        module.tqdm = lambda iterable, **_: iterable
    try:
        yield
    finally:
        logger.setLevel(level)
        if bars is not None:
            module.tqdm = bars


def harness_task(name: str):
    """A task of the harness by its name, with its data.

    Raises:
        UserError: for an unknown name, or data that are neither cached nor downloadable.
    """
    manager = task_manager(name in PAPER_TASKS)
    if name not in manager.all_tasks:
        raise UserError(f"lm-evaluation-harness has no task {name!r}; the paper's are {', '.join(PAPER_TASKS)}")
    try:
        loaded = manager.load([name])["tasks"]
    except Exception as error:  # the hub's exception depends on versions and on where it fails
        raise UserError(
            f"the data of {name} are not cached and cannot be downloaded ({type(error).__name__}: {str(error)[:200]}); "
            "connect this machine, or set data to a file or folder of tasks, or to python"
        ) from error
    if name not in loaded:
        raise UserError(f"{name!r} is a group of tasks; name its tasks one by one")
    return loaded[name]


@cache
def task_manager(of_the_paper: bool):
    """The harness's index of tasks. The whole index is slow to read, so the paper's tasks get one of their folders."""
    import lm_eval.tasks

    root = Path(lm_eval.tasks.__file__).parent
    folders = [root / name for name in FOLDERS if (root / name).is_dir()]
    if of_the_paper and len(folders) == len(FOLDERS):
        return lm_eval.tasks.TaskManager(include_path=[str(folder) for folder in folders], include_defaults=False)
    return lm_eval.tasks.TaskManager()


def local_tasks(data: str, wording: str = "") -> dict[str, Callable[[], Any]]:
    """The tasks of "python", or the one of a file or a folder.

    Args:
        wording: words with {question} for sets that have questions; empty for the set's own.

    Raises:
        UserError: for a path that does not exist, or files that cannot be read.
    """
    if data == "python":
        tasks = {}
        for name, items in {"python_descriptions": descriptions(), "python_names": names()}.items():
            rows = [asdict(item) for item in items]
            scored = len(rows) - len(rows) // 4  # the others are examples, so that no prompt has a later question
            splits = {"test": rows[:scored], "train": rows[scored:]}
            tasks[name] = partial(local_task, name, splits, wording)
        return tasks
    path = Path(data)
    files = sorted(file for file in path.iterdir() if suffix_of(file) in SUFFIXES) if path.is_dir() else [path]
    splits = {}
    for file in files:
        words = set(re.split(r"[^a-z]+", stem_of(file).lower()))
        split = "test" if len(files) == 1 else next((side for side, known in _SPLITS.items() if words & {*known}), None)
        if split in splits:
            raise UserError(f"{data} has several files for {split}; give the files of one set, or one file")
        if split is not None:
            splits[split] = [_hub_columns(row) for row in rows_of(str(file))]
    if not splits:
        raise UserError(f"no file of {data} has train, validation or test in its name; give a file, or rename them")
    name = stem_of(path) if path.is_file() else path.resolve().name
    return {name: partial(local_task, name, splits, wording)}


def _hub_columns(row: dict) -> dict:
    """A row with the columns of the hub: ARC and OpenBookQA are published in another form, BoolQ with other labels."""
    question = row.get("question")
    if isinstance(question, dict):
        choices = {key: [choice[key] for choice in question["choices"]] for key in ("text", "label")}
        return {**row, "question": question["stem"], "question_stem": question["stem"], "choices": choices}
    if "passage" in row and "label" not in row and "answer" in row:
        return {**row, "label": int(row["answer"])}
    return row


def _published(name: str, row: dict) -> str:
    """The harness's task for a row of a set called ``name``; "" for {question, choices, answer}."""
    task = next((task for column, task in _TASKS.items() if column in row), "")
    if task or "answerKey" not in row:
        return task
    return "openbookqa" if "question" not in row or "openbook" in name.lower() else "arc_easy"


def local_task(name: str, splits: dict[str, list[dict]], wording: str = ""):
    """Local rows as a task of the harness: of a published set the harness's own task, of others one in the format of
    ARC. The last split with answers is scored; few-shot examples come from "train", or else from the scored rows.

    Raises:
        UserError: for rows that the task cannot read.
    """
    import datasets
    from lm_eval.api.task import ConfigurableTask

    order = [split for split in ("test", "validation", "train") if split in splits]
    scored = next((s for s in order if any(splits[s][0].get(key) not in (None, "") for key in _ANSWERS)), order[0])
    rows, examples = splits[scored], splits["train"] if "train" in splits and scored != "train" else []
    of = _published(name, rows[0])
    sides = {"test": datasets.Dataset.from_list(rows), "train": datasets.Dataset.from_list(examples)}
    config: dict[str, Any] = {
        "custom_dataset": lambda **_: sides, "test_split": "test", "validation_split": None, "num_fewshot": 0,
        "training_split": "train" if examples else None, "fewshot_split": "train" if examples else "test",
    }  # fmt: skip
    words = wording or ("" if of else "Question: {question}\nAnswer:")
    if words and of in _QUESTIONS:
        config["doc_to_text"] = lambda doc: worded(words, question=doc[_QUESTIONS[of]])
    try:
        if of:
            group = {"group": "local", "task": [{"task": of, **config}]}
            return task_manager(True).load(group)["tasks"][of]
        metrics = [
            {"metric": metric, "aggregation": "mean", "higher_is_better": True} for metric in ("acc", "acc_norm")
        ]
        return ConfigurableTask(config=config | {
            "task": name, "output_type": "multiple_choice", "doc_to_choice": "choices", "doc_to_target": "answer",
            "metric_list": metrics,
        })  # fmt: skip
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise UserError(
            f"the rows of {name} cannot be asked ({type(error).__name__}: {error}); give those of ARC, BoolQ, "
            "HellaSwag, OpenBookQA, PIQA or WinoGrande with the columns of the hub, or {question, choices, answer}"
        ) from error


def harness_model(lm):
    """``lm`` as a model of the harness; one that already is a harness model is returned as it is.

    ``cuts(context, continuation)`` tells whether the model has too few positions for both. ``too_long(continuation)``
    tells why it cannot read the continuation alone, or None. The model calls ``step(done, total)`` as it answers.
    """
    from lm_eval.api.model import LM
    from lm_eval.models.huggingface import HFLM

    if isinstance(lm, LM):
        return _with_defaults(lm)

    class Adapter(HFLM):
        step: Callable[[int, int], None] = staticmethod(_nothing)

        def loglikelihood(self, requests, disable_tqdm: bool = False):
            """Score in chunks of similar length, which moves the progress bar and keeps padding small."""
            answers: list[Any] = [(-math.inf, False)] * len(requests)  # for choices that the model cannot read
            fits = [i for i, request in enumerate(requests) if self.too_long(request.args[1]) is None]
            order = sorted(fits, key=lambda i: -sum(map(len, requests[i].args)))
            for start in range(0, len(order), REQUESTS):
                part = order[start : start + REQUESTS]
                for i, value in zip(part, super().loglikelihood([requests[i] for i in part], True), strict=True):
                    answers[i] = value
                self.step(start + len(part), len(order))
            return answers

        def too_long(self, continuation: str) -> str | None:
            tokens = len(self.tok_encode(continuation))
            if tokens <= self.max_length:
                return None
            return f"a choice has {tokens} tokens, more than the {self.max_length} positions of {lm.name}"

        def cuts(self, context: str, continuation: str) -> bool:
            return len(self.tok_encode(context + continuation)) > self.max_length + 1

    return Adapter(
        pretrained=lm.model, tokenizer=lm.tokenizer, backend="causal", batch_size=lm.batch_size,
        max_length=max_positions(lm),
    )  # fmt: skip


def _with_defaults(model):
    defaults = {"step": _nothing, "cuts": lambda context, continuation: False, "too_long": _nothing}
    for name, default in defaults.items():
        if not hasattr(model, name):
            setattr(model, name, default)
    return model


def _nothing(*_: object) -> None:
    pass
