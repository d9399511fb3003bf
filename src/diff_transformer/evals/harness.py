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
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from diff_transformer.data.sources import suffix_of
from diff_transformer.data.tasks.python_tasks import descriptions
from diff_transformer.data.tasks.rows import SUFFIXES, rows_of, stem_of
from diff_transformer.errors import UserError
from diff_transformer.evals.lm import max_positions
from diff_transformer.evals.prompts import check_template, template_details
from diff_transformer.evals.samples import ALL, Samples
from diff_transformer.evals.types import Result
from diff_transformer.settings import NonNegativeInt, PositiveInt, Seed

PAPER_TASKS = ("arc_challenge", "arc_easy", "boolq", "hellaswag", "openbookqa", "piqa", "winogrande")
FOLDERS = ("arc", "super_glue/boolq", "hellaswag", "openbookqa", "piqa", "winogrande")  # of PAPER_TASKS in lm_eval
# The harness's task of a published set, by a column that other sets do not have.
_TASKS = {
    "endings": "hellaswag", "goal": "piqa", "passage": "boolq", "option1": "winogrande",
    "question_stem": "openbookqa", "answerKey": "arc_easy",
}  # fmt: skip
_SPLITS = {"train": ("train",), "validation": ("val", "valid", "validation", "dev"), "test": ("test",)}
_ANSWERS = ("label", "answer", "answerKey")
REQUESTS = 256  # per step of the progress bar
QUICK = {"data": "python", "samples": 40}


@dataclass(frozen=True)
class Settings:
    """Tasks and scoring."""

    # "hub" (the harness's tasks, downloaded on first use), "python" (made from the running Python's documentation), or
    # one set: a file, or a folder of files with train, validation or test in their names. Their rows have the columns
    # that the published set has on the hub, or are {"question", "choices", "answer"}, the answer as an index from 0.
    data: str = "hub"
    # Names of the harness's tasks; by default the paper's seven. For local data: the tasks to run, by default all.
    tasks: Annotated[tuple[str, ...], Field(min_length=1)] = PAPER_TASKS
    # Examples before each question. Table 1 has 0, Table 8 has 5.
    shots: NonNegativeInt = 0
    # First items of each task; None for all.
    samples: PositiveInt | None = None
    # Ask through the tokenizer's chat template, as the harness does; few-shot examples are earlier turns.
    chat_template: bool = False
    # Seed of the draw of examples.
    seed: Seed = 1234


def amount(settings: Settings, config: Any) -> tuple[int | None, None]:
    """Items of all tasks, at most; None for whole tasks."""
    tasks = len(settings.tasks) if settings.data == "hub" else 1
    return settings.samples and tasks * settings.samples, None


def run(lm, settings: Settings, samples: Samples) -> Result:
    """Load the tasks and evaluate."""
    if settings.data == "hub":
        return evaluate_harness(lm, {name: partial(harness_task, name) for name in settings.tasks}, settings, samples)
    local = local_tasks(settings.data)
    chosen = settings.tasks if settings.tasks != PAPER_TASKS else tuple(local)
    unknown = [name for name in chosen if name not in local]
    if unknown:
        raise UserError(f"{settings.data} has no task {', '.join(unknown)}; it has: {', '.join(local)}")
    return evaluate_harness(lm, {name: local[name] for name in chosen}, settings, samples)


def evaluate_harness(
    lm,
    tasks: Mapping[str, Callable[[], Any]],
    settings: Settings = Settings(),
    samples: Samples = ALL,
) -> Result:
    """The answers to each of ``tasks``, scored as the harness does.

    Args:
        lm: a ``CausalLM``, or a ``lm_eval.api.model.LM``.
        tasks: functions that return a task object of the harness, by name.
        settings: without ``data`` and ``tasks``.

    Returns:
        A row for each item: task, shots, prompt, choices, logprobs, ``acc``, ``acc_norm`` if the task has it, and
        ``score``, that of the two which the paper takes.

    Raises:
        UserError: if the harness is not installed, or a task cannot be downloaded, has too few examples, or is not
            scored by accuracy.
    """
    check_template(getattr(lm, "tokenizer", None), settings.chat_template)
    lm_eval = require_installed()
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    rows: list[dict] = []
    model = harness_model(lm, samples)
    for name, source in tasks.items():
        model.task_name = name
        rows += _scored(lm_eval, model, name, source(), settings)
    about = {"tasks": list(tasks), "lm_eval": lm_eval.__version__}
    return Result("harness", rows, about | template_details(settings.chat_template))


def _scored(lm_eval, model, name: str, task, settings: Settings) -> list[dict]:
    """A row for each of the first items. They are scored together: the draw of examples depends on it."""
    shots, chat = settings.shots, settings.chat_template
    if task.OUTPUT_TYPE != "multiple_choice" or "acc" not in task.aggregation():
        raise UserError(
            f"task {name} is of type {task.OUTPUT_TYPE} and scored by {', '.join(task.aggregation())}; give tasks of "
            "multiple choice that are scored by acc, as the paper's are"
        )
    if shots and shots > (there := len(task.fewshot_docs()) - (task.config.fewshot_split == "test")):
        raise UserError(f"{shots} shots are more than the {there} examples that {name} has; give fewer")
    task.set_config("num_fewshot", shots)
    task.set_fewshot_seed(seed=settings.seed)
    outcome = lm_eval.evaluate(
        lm=model, task_dict={name: task}, limit=settings.samples, bootstrap_iters=0, log_samples=True,
        apply_chat_template=chat, fewshot_as_multiturn=chat,
    )  # fmt: skip
    logged = sorted(outcome["samples"][name], key=lambda sample: sample["doc_id"])
    return [{"task": name, "shots": shots, **_row(task, sample)} for sample in logged]


def _row(task, sample: dict) -> dict:
    contexts, continuations = zip(*sample["arguments"], strict=True)
    prompt, choices = contexts[0], [continuation.strip() for continuation in continuations]
    in_context = len(set(contexts)) > 1  # WinoGrande: the choices precede one shared ending
    if in_context:
        prompt = os.path.commonprefix(contexts)  # noqa: RUF071 (of characters)
        choices = [context[len(prompt) :] + continuation for context, continuation in sample["arguments"]]
    gold = task.doc_to_text(sample["doc"]) if in_context else sample["target"]
    scores = {metric: float(sample[metric]) for metric in ("acc", "acc_norm") if metric in sample}
    logprobs = [float(logprob) for logprob, _ in sample["filtered_resps"]]
    metric, lengths = "acc", [1] * len(choices)
    if "acc_norm" in scores and task.config.task.lower().startswith("hellaswag"):
        metric, lengths = "acc_norm", [max(1, len(choice)) for choice in task.doc_to_choice(sample["doc"])]
    likeliest = max(range(len(choices)), key=lambda place: logprobs[place] / lengths[place])
    return {
        "prompt": prompt, "choices": choices, "logprobs": logprobs, **scores, "score": scores[metric],
        "expected": choices[gold] if isinstance(gold, int) and 0 <= gold < len(choices) else str(gold),
        "got": choices[likeliest],
    }  # fmt: skip


def require_installed() -> Any:
    """The library; raises UserError without it."""
    try:
        import lm_eval
        import lm_eval.models.huggingface
    except ImportError as error:
        raise UserError(
            f"this experiment needs lm-evaluation-harness ({error}); install it with "
            "`pip install diff-transformer[harness]`"
        ) from None
    return lm_eval


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


def local_tasks(data: str) -> dict[str, Callable[[], Any]]:
    """The tasks of "python", or the one of a file or a folder.

    Raises:
        UserError: for a path that does not exist, or files that cannot be read.
    """
    if data == "python":
        rows = [asdict(item) for item in descriptions()]
        scored = len(rows) - len(rows) // 4  # the others are examples, so that no prompt has a later question
        splits = {"test": rows[:scored], "train": rows[scored:]}
        return {"python_descriptions": partial(local_task, "python_descriptions", splits)}
    path = Path(data)
    files = sorted(file for file in path.iterdir() if suffix_of(file) in SUFFIXES) if path.is_dir() else [path]
    splits = {}
    for file in files:
        words = set(re.split(r"[^a-z]+", stem_of(file).lower()))
        split = "test" if len(files) == 1 else next((side for side, known in _SPLITS.items() if words & {*known}), None)
        if split in splits:
            raise UserError(f"{data} has several files for {split}; give the files of one set, or one file")
        if split is not None:
            splits[split] = rows_of(str(file))
    if not splits:
        raise UserError(f"no file of {data} has train, validation or test in its name; give a file, or rename them")
    name = stem_of(path) if path.is_file() else path.resolve().name
    return {name: partial(local_task, name, splits)}


def local_task(name: str, splits: dict[str, list[dict]]):
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
    of = next((task for column, task in _TASKS.items() if column in rows[0]), "")
    sides = {"test": datasets.Dataset.from_list(rows), "train": datasets.Dataset.from_list(examples)}
    config: dict[str, Any] = {
        "custom_dataset": lambda **_: sides, "test_split": "test", "validation_split": None, "num_fewshot": 0,
        "training_split": "train" if examples else None, "fewshot_split": "train" if examples else "test",
    }  # fmt: skip
    try:
        if of:
            group = {"group": "local", "task": [{"task": of, **config}]}
            return task_manager(True).load(group)["tasks"][of]
        metrics = [
            {"metric": metric, "aggregation": "mean", "higher_is_better": True} for metric in ("acc", "acc_norm")
        ]
        return ConfigurableTask(config=config | {
            "task": name, "output_type": "multiple_choice", "metric_list": metrics, "doc_to_choice": "choices",
            "doc_to_target": "answer", "doc_to_text": lambda doc: f"Question: {doc['question']}\nAnswer:",
        })  # fmt: skip
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise UserError(
            f"the rows of {name} cannot be asked ({type(error).__name__}: {error}); give those of ARC, BoolQ, "
            "HellaSwag, OpenBookQA, PIQA or WinoGrande with the columns of the hub, or {question, choices, answer}"
        ) from error


def harness_model(lm, samples: Samples):
    """``lm`` as a model of the harness, which moves the bar of ``samples``; one that already is one is returned."""
    from lm_eval.api.model import LM
    from lm_eval.models.huggingface import HFLM

    if isinstance(lm, LM):
        return lm

    class Adapter(HFLM):
        task_name = ""

        def loglikelihood(self, requests, disable_tqdm: bool = False):
            """Score in chunks, which moves the progress bar."""
            answers = []
            for start in range(0, len(requests), REQUESTS):
                answers += super().loglikelihood(requests[start : start + REQUESTS], True)
                if samples.bar is not None:
                    samples.bar(self.task_name, len(answers), len(requests))
            return answers

    return Adapter(
        pretrained=lm.model, tokenizer=lm.tokenizer, backend="causal", batch_size=lm.batch_size,
        max_length=max_positions(lm),
    )  # fmt: skip
