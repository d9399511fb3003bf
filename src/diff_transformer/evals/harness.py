"""lm-evaluation-harness (Tables 1 and 8): multiple choice by log-likelihood, zero- and few-shot.

    Question: ...  Answer: ...      examples, for few-shot
    Question: ...  Answer:| choice  the choice that the model finds likeliest, as it is or for each of its characters

``data="hub"`` runs the harness's own tasks, which it downloads; files and "python" run offline, through the same
scoring. The paper's table takes ``acc_norm`` for HellaSwag and ``acc`` for the other six: of all choices of the two,
only this one gives the means that it prints for StableLM-base-alpha-3B-v2 (56.8) and OpenLLaMA-3B-v2 (57.5) from the
scores by task that were published for those models.
"""

import logging
import math
import os
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from diff_transformer.checks import require_positive
from diff_transformer.data.multiple_choice import MultipleChoiceSet, load_multiple_choice
from diff_transformer.evals.harness_model import harness_model
from diff_transformer.evals.harness_tasks import PAPER_TASKS, check_shots, harness_task, local_task
from diff_transformer.evals.provenance import provenance
from diff_transformer.evals.samples import Samples
from diff_transformer.evals.types import Result

METRICS = ("paper", "acc", "acc_norm")
QUICK = {"data": "python", "samples": 40}


@dataclass(frozen=True)
class Settings:
    """Which tasks, and how they are scored.

    Attributes:
        data: "hub" (the harness's tasks, downloaded when first used), "python" (made from the running Python's
            documentation), a file or a folder (see ``load_multiple_choice``).
        tasks: names of the harness's tasks; the paper's seven. Of a folder, the tasks to run: all if left as it is.
        shots: examples before each question; the paper has 0 (Table 1) and 5 (Table 8).
        metric: "acc" (the likeliest choice), "acc_norm" (the likeliest for each of its characters), or "paper":
            acc_norm for HellaSwag and acc for all others. A task without acc_norm is scored by acc.
        samples: items of each task, the first ones; None for all.
        seed: of the draw of examples.
    """

    data: str = "hub"
    tasks: tuple = PAPER_TASKS
    shots: int = 0
    metric: str = "paper"
    samples: int | None = None
    seed: int = 1234


def run(lm, settings: Settings, samples: Samples) -> Result:
    """Load the tasks and evaluate."""
    if settings.data == "hub":
        tasks: dict[str, Any] = {name: partial(harness_task, name) for name in settings.tasks}
    else:
        sets = load_multiple_choice(settings.data)
        chosen = settings.tasks if settings.tasks != PAPER_TASKS else tuple(sets)
        unknown = [name for name in chosen if name not in sets]
        if unknown:
            raise ValueError(f"{settings.data} has no task {', '.join(unknown)}; it has: {', '.join(sets)}")
        tasks = {name: sets[name] for name in chosen}
    result = evaluate_harness(
        lm, tasks, shots=settings.shots, metric=settings.metric, items=settings.samples, seed=settings.seed,
        samples=samples,
    )  # fmt: skip
    return replace(result, provenance={**result.provenance, "data": settings.data})


def evaluate_harness(
    lm,
    tasks: Mapping[str, MultipleChoiceSet | Callable[[], Any]],
    *,
    shots: int = 0,
    metric: str = "paper",
    items: int | None = None,
    seed: int = 1234,
    samples: Samples | None = None,
) -> Result:
    """Accuracy on each of ``tasks``, as the harness computes it.

    Args:
        lm: a ``CausalLM``, or any model that is a ``lm_eval.api.model.LM`` and has a name.
        tasks: items of our own, or functions that return a task object of the harness.
        items: at most so many of each task.

    ``metrics``, for each task, with 5 shots: ``NAME_5shot`` by ``metric``, its ``NAME_5shot_stderr``,
    ``NAME_5shot_acc``, ``NAME_5shot_acc_norm`` where the task has it, and ``NAME_5shot_truncated``, the share of items
    of which the model could not see the beginning; ``mean_5shot`` over the tasks.

    Raises:
        ValueError: where the harness is not installed, a task cannot be downloaded, or has too few examples.
    """
    require_positive(items=items)
    if shots < 0:
        raise ValueError(f"shots is {shots}; give 0 or more")
    if metric not in METRICS:
        raise ValueError(f"metric is {metric!r}; give one of {', '.join(METRICS)}")
    lm_eval = _library()
    samples = samples or Samples()
    rows: list[dict] = []
    with _quiet():
        model = harness_model(lm)
        for name, source in tasks.items():
            task = local_task(name, source) if isinstance(source, MultipleChoiceSet) else source()
            check_shots(name, source, shots)
            count = min(len(task.eval_docs), items or len(task.eval_docs), samples.limit or len(task.eval_docs))

            def score(places: list[int], name=name, task=task, count=count) -> list[dict]:
                bar = samples.bar
                if bar is not None:
                    model.step = lambda done, total: bar(name, count * done // total, count)
                scored = _score(lm_eval, model, name, task, count, shots, seed)
                return [scored[place] for place in places]

            rows += samples.rows(name, range(count), score, batch_size=count)
    for row in rows:
        row["score"], row["got"] = row[_metric(row, metric)], row["choices"][_likeliest(row, metric)]
    details = {"tasks": list(tasks), "shots": shots, "metric": metric, "items": items, "seed": seed}
    return Result("harness", lm.name, summarise(rows, shots), rows, provenance(**details, lm_eval=lm_eval.__version__))


def summarise(rows: list[dict], shots: int) -> dict[str, float]:
    """The metrics of rows, by task; standard errors as the harness's, with n - 1."""
    metrics: dict[str, float] = {}
    means = []
    for task in dict.fromkeys(row["task"] for row in rows):
        of_task, name = [row for row in rows if row["task"] == task], f"{task}_{shots}shot"
        count = len(of_task)
        mean = sum(row["score"] for row in of_task) / count
        metrics[name] = mean
        means.append(mean)
        if count > 1:
            metrics[f"{name}_stderr"] = math.sqrt(
                sum((row["score"] - mean) ** 2 for row in of_task) / (count - 1) / count
            )
        for metric in ("acc", "acc_norm", "truncated"):
            values = [row[metric] for row in of_task if metric in row]
            if values:
                metrics[f"{name}_{metric}"] = sum(values) / count
    return {**metrics, f"mean_{shots}shot": sum(means) / len(means)} if means else metrics


def _score(lm_eval, model, name: str, task, count: int, shots: int, seed: int) -> list[dict]:
    """A row for each of the first ``count`` items, always scored together, as the draw of examples depends on it."""
    task.set_config("num_fewshot", shots)
    task.set_fewshot_seed(seed=seed)
    outcome = lm_eval.evaluate(lm=model, task_dict={name: task}, limit=count, bootstrap_iters=0, log_samples=True)
    logged = sorted(outcome["samples"][name], key=lambda sample: sample["doc_id"])
    return [_row(model, name, task, sample) for sample in logged]


def _row(model, name: str, task, sample: dict) -> dict:
    arguments = [(context, continuation) for context, continuation in sample["arguments"]]
    contexts, continuations = zip(*arguments, strict=True)
    prompt, choices = contexts[0], [continuation.strip() for continuation in continuations]
    in_context = len(set(contexts)) > 1  # WinoGrande: the choices are the beginnings of one and the same ending
    if in_context:
        prompt = os.path.commonprefix(contexts)  # noqa: RUF071 (of characters)
        choices = [context[len(prompt) :] + continuation for context, continuation in arguments]
    gold = task.doc_to_text(sample["doc"]) if in_context else sample["target"]
    row = {
        "task": name, "prompt": prompt, "choices": choices,
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
        metric = "acc_norm" if row["task"].lower().startswith("hellaswag") else "acc"
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
        raise ValueError(
            f"this experiment needs lm-evaluation-harness ({error}); install it with "
            "`pip install diff-transformer[harness]`"
        ) from None
    return lm_eval


@contextmanager
def _quiet():
    """The harness without its log and its own progress bars, which would run into ours."""
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
