"""RULER's tasks [arXiv 2404.06654] without a network: needles, variable tracking, common and frequent words, questions.

    Some special magic numbers are hidden within the following text. ...
    One of the special magic numbers for green-table is: 4108245. ...
    What are all the special magic numbers for ... mentioned in the provided text? ... are| 4108245, ...

A prompt is as long as the length allows in the model's own tokens, with room for the answer. The model continues
greedily after the bar, and a sample's score is the share of the expected strings that its answer contains. With the
published length, samples (500) and an instruct model's chat template the tasks are the published ones, but for the
words and the text (``data/ruler.py``). The harness's own tasks, which download theirs, are ``eval harness``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Annotated, Any

from pydantic import Field

from diff_transformer.checks import require_known
from diff_transformer.data.ruler import TASKS, Material, longest, material, score
from diff_transformer.data.ruler import Sample as Drawn
from diff_transformer.data.seeding import evaluation_rng
from diff_transformer.data.tasks.grounded import load_grounded
from diff_transformer.data.tokenizer import encode
from diff_transformer.errors import UserError
from diff_transformer.evals.lm import CausalLM, check_length, haystack, rows_at_once, text_details
from diff_transformer.evals.needle import lengths_of
from diff_transformer.evals.prompts import check_template, special_spellings, template_details, templated
from diff_transformer.evals.samples import Samples
from diff_transformer.evals.types import Result
from diff_transformer.settings import PositiveInt, Seed


@dataclass(frozen=True)
class Settings:
    """Tasks, lengths and text."""

    # Tasks, by their published names; "qa" asks questions of `data`.
    tasks: Annotated[tuple[str, ...], Field(min_length=1)] = tuple(name for name in TASKS if name != "qa")
    # Tokens of prompt and answer together, in the model's own tokenizer.
    length: PositiveInt = 4096
    # Several lengths in one run, instead of length.
    lengths: tuple[PositiveInt, ...] = ()
    # Prompts for each task and length; the published number is 500.
    samples: PositiveInt = 50
    # Text of the haystacks, and words of keys and lists: "python", a text file, JSON lines, parquet or a folder.
    corpus: str = "python"
    # Text to use: "held-out", "all", or "auto", as of `needle`.
    split: str = "auto"
    # Documents with questions for "qa", as of `hallucination`: "python", a file, "hub:NAME".
    data: str = "python"
    # Ask through the tokenizer's chat template.
    chat_template: bool = False
    # Seed of all draws.
    seed: Seed = 0


QUICK = {"length": 1024, "tasks": ("niah_single_1", "niah_multikey_1", "vt"), "samples": 4}


def amount(settings: Settings, config: Any) -> tuple[int, int]:
    """Prompts, and their tokens in all, on any model."""
    prompts, lengths = len(settings.tasks) * settings.samples, lengths_of(settings)
    return prompts * len(lengths), prompts * sum(lengths)


def run(lm: CausalLM, settings: Settings, samples: Samples) -> Result:
    """A row for each prompt: ``task``, ``length``, its own ``tokens``, prompt, expected strings, answer and ``score``.

    Raises:
        UserError: for an unknown task, a length in which a task does not fit, or a "qa" without questions.
    """
    for name in settings.tasks:
        require_known("task of RULER", name, TASKS)
    lengths = lengths_of(settings)
    check_template(lm.tokenizer, settings.chat_template)
    check_length(lm, max(lengths), "the longest prompt with its answer")
    filler, part = haystack(lm, settings, max(lengths))
    if settings.chat_template:
        filler = filler.without(special_spellings(lm.tokenizer))
    asked = "qa" in settings.tasks
    items = [item for of in load_grounded(settings.data).values() for item in of] if asked else []
    of = material(filler.words, items)
    if asked and not of.questions:
        raise UserError(f"{settings.data} has no documents with questions and answers; give others, or leave qa out")
    for name, length, number in product(settings.tasks, lengths, range(settings.samples)):
        _Draw(lm, settings, of, name, length, number).require_room()
    rows: list[dict] = []
    for name in settings.tasks:
        for length in lengths:

            def answered(numbers: Sequence[int], name: str = name, length: int = length) -> list[dict]:
                draws = [_Draw(lm, settings, of, name, length, number) for number in numbers]
                drawn = [draw.longest() for draw in draws]
                prompts = [_prompt(lm, settings, each) for each in drawn]
                texts = lm.generate(prompts, TASKS[name].new_tokens, templated=settings.chat_template)
                return [
                    {
                        "task": name, "length": length, "tokens": draw.tokens(each), "prompt": prompt,
                        "expected": ", ".join(each.answers), "got": text,
                        "score": score(TASKS[name], each.answers, text),
                    }
                    for draw, each, prompt, text in zip(draws, drawn, prompts, texts, strict=True)
                ]  # fmt: skip

            size = rows_at_once(lm, length)
            rows += samples.rows(f"{name}, {length} tokens", range(settings.samples), answered, batch_size=size)
    about = {"length": max(lengths), "lengths": list(lengths), "tasks": list(settings.tasks)}
    return Result("ruler", rows, about | template_details(settings.chat_template) | text_details(settings, part))


def _prompt(lm: CausalLM, settings: Settings, drawn: Drawn) -> str:
    if not settings.chat_template:
        return drawn.question + drawn.beginning
    return templated(lm.tokenizer, drawn.question, drawn.beginning.strip())


@dataclass(frozen=True)
class _Draw:
    """Sample ``number`` of the task ``name`` at ``length``."""

    lm: CausalLM
    settings: Settings
    of: Material
    name: str
    length: int
    number: int

    def make(self, units: int) -> Drawn:
        rng = evaluation_rng(self.settings.seed, "ruler", self.name, self.length, self.number)
        return TASKS[self.name].make(rng, units, self.of, self.length)

    def tokens(self, drawn: Drawn) -> int:
        """Tokens of the prompt and of what the model puts in front of it."""
        chat = self.settings.chat_template
        front = 0 if chat else len(self.lm.prefix)
        return front + len(encode(self.lm.tokenizer, _prompt(self.lm, self.settings, drawn), special=chat))

    @property
    def room(self) -> int:
        return self.length - TASKS[self.name].new_tokens

    def require_room(self) -> None:
        """Raise UserError if not even the smallest sample fits."""
        if (needed := self.tokens(self.make(TASKS[self.name].least))) > self.room:
            raise UserError(
                f"task {self.name} takes {needed + self.length - self.room} tokens at least, and length is "
                f"{self.length}; give more, or another task"
            )

    def longest(self) -> Drawn:
        """With as much context as fits."""
        best = longest(self.make, lambda drawn: self.tokens(drawn) <= self.room, TASKS[self.name].least)
        assert best is not None  # by require_room
        return best
