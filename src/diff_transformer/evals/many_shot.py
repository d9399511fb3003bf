"""Many-shot classification in context, and its robustness to the order of the examples (section 3.5, Figures 6, 7, 9).

    Question: Who wrote Emma ?
    Type: human
    Question: Where is Oslo ?
    Type: location
    Question: When did the war end ?
    Type:| number

k labelled examples precede the question. Every label, with the line end that closes it in the examples, is scored as a
continuation of that prompt. The likeliest label is the answer: exact decoding constrained to the label set, without a
preference for short labels. If several labels tie for the highest score, the question's score is the share of right
ones among them. The examples' tokens are read once per order, whatever the number of questions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from diff_transformer.data.seeding import evaluation_rng
from diff_transformer.data.tasks.labelled import load_labelled
from diff_transformer.data.tasks.types import Labelled, LabelledSet
from diff_transformer.data.tokenizer import encode, leading_ids
from diff_transformer.errors import UserError
from diff_transformer.evals.likelihood import common_prefix, continuation_logprobs, read_prefix
from diff_transformer.evals.lm import CausalLM, check_length, max_positions
from diff_transformer.evals.prompts import choice_tokens
from diff_transformer.evals.samples import ALL, Samples
from diff_transformer.evals.types import Result
from diff_transformer.settings import PositiveInt, Seed

ORDERS = ("random", "alternate")  # alternate: the classes in turn
_SHORTEST = 256


@dataclass(frozen=True)
class Settings:
    """Many-shot classification."""

    # "python" (which module a docstring is from; offline), "hub:OWNER/SET", such as "hub:PolyAI/banking77", or a path:
    # a file, or a folder with a training and a test file (.csv, .json, .jsonl, .parquet)
    data: str = "python"
    # Numbers of examples to measure at.
    shots: tuple[PositiveInt, ...] = ()
    # Prompt lengths to measure at, in tokens with the answer, filled with examples. Without shots and lengths: one
    # example, and prompts of 256, 512, ... tokens up to what the model supports, at most `longest`.
    lengths: tuple[PositiveInt, ...] = ()
    # The longest of these prompts, in tokens.
    longest: PositiveInt = 65536
    # Questions for each number of examples and each order.
    samples: PositiveInt = 250
    # Orders of each kind at the largest number, for the margin between the best and the worst.
    order_seeds: PositiveInt = 10
    # Seed of the questions and the examples; orders have seeds of their own.
    seed: Seed = 0


QUICK = {"samples": 16, "order_seeds": 3, "longest": 512}


def amount(settings: Settings, config: Any) -> tuple[int, None]:
    """Questions after each number of examples, at most, and each order of the largest."""
    shots, lengths = _sizes(settings, getattr(config, "max_position_embeddings", None))
    return (len({*shots}) + len({*lengths}) - 1 + len(ORDERS) * settings.order_seeds) * settings.samples, None


def run(lm: CausalLM, settings: Settings, samples: Samples) -> Result:
    """Many-shot classification with ``settings``."""
    return evaluate_many_shot(lm, load_labelled(settings.data), settings, samples)


def evaluate_many_shot(
    lm: CausalLM,
    data: LabelledSet,
    settings: Settings = Settings(),
    samples: Samples = ALL,
) -> Result:
    """Answers by the number of examples, and by their order at the largest number.

    A smaller set of examples is the beginning of a larger one, and all orders of a number are of the same examples.
    Test texts are never among them.

    Returns:
        A row for each question: prompt (the question), expected, got, score, tied (labels with the best score),
        logprobs (of each label, in the order of ``labels`` in ``about``), shots, order, order_seed, tokens (of the
        prompt with its answer). The first row of each order also has ``examples``: the text before its questions.

    Raises:
        UserError: for prompts that the model does not support, or a length without room
            for a single example.
    """
    task = _Task(lm, data, settings.samples, settings.seed)
    counts = _counts(task, settings)
    rows = [row for count in counts[:-1] for row in _ask(task, count, "random", 0, samples)]
    for order in ORDERS:
        for order_seed in range(settings.order_seeds):
            rows += _ask(task, counts[-1], order, order_seed, samples)
    about = {"data": data.name, "labels": list(data.labels), "chance": 1 / len(data.labels), "counts": counts}
    return Result("many_shot", rows, about | {"training_texts": len(task.pool)})


class _Task:
    """The questions and the examples, in the order of their draw, and the format of prompts."""

    def __init__(self, lm: CausalLM, data: LabelledSet, questions: int, seed: int):
        self.lm, self.data, self.seed = lm, data, seed
        self.labels = data.labels
        self.endings = [f" {label}\n" for label in self.labels]
        chosen = evaluation_rng(seed, "many_shot", "questions").permutation(len(data.test))[:questions]
        self.questions = [data.test[i] for i in chosen]
        asked = {example.text.casefold() for example in data.test}
        shown = [example for example in data.train if example.text.casefold() not in asked]
        if not shown:
            raise UserError(f"every training text of {data.name} is a test text too; give other training texts")
        self.pool = [shown[i] for i in evaluation_rng(seed, "many_shot", "examples").permutation(len(shown))]

    def show(self, examples: Sequence[Labelled]) -> str:
        return "".join(f"{self.data.ask(example.text)} {example.label}\n" for example in examples)

    def ordered(self, count: int, order: str, order_seed: int) -> list[Labelled]:
        """The first ``count`` examples, in an order of this kind."""
        rng = evaluation_rng(self.seed, "many_shot", "order", order_seed)
        mixed = [self.pool[i] for i in rng.permutation(count)]
        return mixed if order == "random" else alternate(mixed, rng)

    def tokens(self, text: str) -> int:
        return len(encode(self.lm.tokenizer, text))

    def most_tokens(self, count: int, order_seeds: int) -> int:
        """Most tokens that ``count`` examples take, over the orders."""
        orders = [(order, order_seed) for order in ORDERS for order_seed in range(order_seeds)]
        return max(self.tokens(self.show(self.ordered(count, *order))) for order in orders)

    def answer_tokens(self) -> int:
        """Most tokens that a question with its answer takes, with the tokens in front of every prompt."""
        longest = max(self.endings, key=self.tokens)
        most = max(self.tokens(self.data.ask(question.text) + longest) for question in self.questions)
        return most + len(leading_ids(self.lm.tokenizer))


def alternate(examples: Sequence[Labelled], rng: np.random.Generator) -> list[Labelled]:
    """The examples with their classes in turn, in a random order of classes. Exhausted classes are skipped."""
    by_label: dict[str, list[Labelled]] = {}
    for example in examples:
        by_label.setdefault(example.label, []).append(example)
    labels = sorted(by_label)
    turns = [by_label[labels[i]] for i in rng.permutation(len(labels))]
    rounds = max(map(len, turns), default=0)
    return [of_class[turn] for turn in range(rounds) for of_class in turns if turn < len(of_class)]


def _sizes(settings: Settings, positions: int | None) -> tuple[Sequence[int], Sequence[int]]:
    """The numbers of examples and the prompt lengths to measure at, on a model with so many positions."""
    if settings.shots or settings.lengths:
        return settings.shots, settings.lengths
    top = min(positions or settings.longest, settings.longest)
    return (1,), [*(_SHORTEST << i for i in range(20) if _SHORTEST << i < top), top]


def _counts(task: _Task, settings: Settings) -> list[int]:
    """Numbers of examples to measure at, ascending."""
    (shots, lengths), order_seeds = _sizes(settings, max_positions(task.lm)), settings.order_seeds
    answer = task.answer_tokens()
    counts = {_fitting(task, length - answer, order_seeds) for length in lengths}
    most = max(shots, default=1)
    if most > len(task.pool):
        raise UserError(f"{most} examples were asked for, and {task.data.name} has {len(task.pool)} to show")
    if shots:
        lengths = [*lengths, answer + task.most_tokens(most, order_seeds)]
    check_length(task.lm, max(lengths), "the longest prompt")
    if min(counts | set(shots)) < 1:
        raise UserError(f"a prompt of {min(lengths)} tokens has no room for an example; give larger lengths or shots")
    return sorted(counts | set(shots))


def _fitting(task: _Task, room: int, order_seeds: int) -> int:
    """Number of examples that take at most ``room`` tokens in every order."""
    low, high = 0, len(task.pool)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if task.tokens(task.show(task.pool[:middle])) <= room else (low, middle - 1)
    while low and task.most_tokens(low, order_seeds) > room:
        low -= 1
    return low


def _ask(task: _Task, count: int, order: str, order_seed: int, samples: Samples) -> list[dict]:
    """The rows of all questions after ``count`` examples in one order. The examples are read once."""
    lm = task.lm
    examples = task.show(task.ordered(count, order, order_seed))
    prefix = None

    def score(questions: Sequence[Labelled]) -> list[dict]:
        nonlocal prefix
        texts = [examples + task.data.ask(question.text) for question in questions]
        pairs = [choice_tokens(lm.tokenizer, text, task.endings) for text in texts]
        contexts, continuations = [list(side) for side in zip(*pairs, strict=True)]
        if prefix is None:
            prefix = read_prefix(lm, contexts[0][: _examples_end(task, examples, contexts)])
        scores = continuation_logprobs(lm, contexts, continuations, prefix=prefix)
        rows = []
        for question, context, tails, logprobs in zip(questions, contexts, continuations, scores, strict=True):
            best = [label for label, score in zip(task.labels, logprobs, strict=True) if score == max(logprobs)]
            rows.append({
                "prompt": task.data.ask(question.text), "expected": question.label, "got": best[0],
                "score": (question.label in best) / len(best), "tied": len(best), "logprobs": logprobs, "shots": count,
                "order": order, "order_seed": order_seed, "tokens": len(context) + max(map(len, tails)),
            })  # fmt: skip
        return rows

    part = f"{count} shots, {order} order {order_seed}"
    rows = [*enumerate(samples.rows(part, task.questions, score, batch_size=max(1, lm.batch_size)))]
    return [{"example": place, **row, **({} if place else {"examples": examples})} for place, row in rows]


def _examples_end(task: _Task, examples: str, contexts: list[list[int]]) -> int:
    """Length of the common prefix of the examples' tokens and all contexts; at least 1."""
    alone = [*leading_ids(task.lm.tokenizer), *encode(task.lm.tokenizer, examples).tolist()]
    return max(1, common_prefix([alone, *contexts]))
