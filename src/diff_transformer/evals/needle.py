"""Multi-needle retrieval (section 3.4, Table 2, Figure 5).

    filler  The magic number of Paris is 42.  filler  The magic number of Rome is 17.  filler
    Question: What is the magic number of Rome? Answer: Rome is| 17

N needles are hidden in text and R of them asked for; the first one asked for sits at a chosen depth, the others
anywhere. The model continues greedily after the bar. An example's score is the share of the R numbers that it gives
exactly and in order. Numbers and cities come from a random stream that training never uses.

Instruct models are asked through their chat template (``chat_template``), in the user's words (``wording``), and by a
rule for free text (``scoring="search"``): the number that the first 32 tokens say of each city, or the numbers in the
order asked (``numbers_said``). Each city has one number, so the chance of a guess is the same by both rules.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from diff_transformer.checks import require_known, require_positive, require_whole_percents
from diff_transformer.data.filler import Filler
from diff_transformer.data.needles import (
    DEPTHS,
    NeedleExample,
    completion,
    least_length,
    listed,
    make_needle_example,
    number_range,
    numbers_said,
    parse_numbers,
    question,
)
from diff_transformer.data.seeding import evaluation_rng
from diff_transformer.errors import UserError
from diff_transformer.evals.lm import (
    LanguageModel,
    check_length,
    haystack,
    rows_at_once,
    text_details,
)
from diff_transformer.evals.prompts import asked_details, check_asking, special_spellings, templated, worded
from diff_transformer.evals.samples import Samples
from diff_transformer.evals.types import Result

SEARCHED = 32  # tokens of an answer in which ``scoring="search"`` looks for the numbers


@dataclass(frozen=True)
class Settings:
    """The defaults are Table 2. For Figure 5 set cells to [[8, 1]] and lengths to [8192, 16384, 32768, 65536]."""

    # Text around the needles: "python", a text file, JSON lines, parquet or a folder.
    corpus: str = "python"
    # Text to use: "held-out" (of a folder, a tenth), "all", or "auto": held-out for models of this package; for other
    # models held-out if that suffices, else all
    split: str = "auto"
    # (N, R): needles in the text, needles asked for.
    cells: tuple[tuple[int, int], ...] = ((1, 1), (2, 2), (4, 2), (6, 2))
    # Position of the first needle asked for: 0 is the start of the text, 1 its end.
    depths: tuple[float, ...] = DEPTHS
    # Tokens of prompt and answer together, in the model's own tokenizer.
    length: int = 4096
    # Several lengths in one run, instead of length.
    lengths: tuple[int, ...] = ()
    # Prompts for each cell, length and depth.
    samples: int = 50
    # Digits of a magic number.
    digits: int = 2
    # Ask through the tokenizer's chat template.
    chat_template: bool = False
    # Words of the question, with {cities} for the cities asked for and {city} for the first one; what follows a bar,
    # "What is the magic number of {cities}?|{city} is", begins the answer. Empty for "\nQuestion: What is ... Answer:".
    wording: str = ""
    # "next" (the first numbers of the answer, which the prompt begins) or "search" (the number that its first 32 tokens
    # say of each city)
    scoring: str = "next"
    # Seed of cities, numbers, positions and text.
    seed: int = 0


QUICK = {"length": 128, "cells": ((1, 1),), "samples": 8, "digits": 1}


def amount(settings: Settings) -> tuple[int, int]:
    """Prompts, and their tokens in all."""
    lengths = settings.lengths or (settings.length,)
    prompts = len(settings.cells) * len(settings.depths) * settings.samples
    return prompts * len(lengths), prompts * sum(lengths)


def run(lm: LanguageModel, settings: Settings, samples: Samples) -> Result:
    """``diff-transformer eval needle``."""
    lengths = settings.lengths or (settings.length,)
    require_positive(**{f"lengths[{i}]": each for i, each in enumerate(settings.lengths)})
    check_length(lm, max(lengths), "the longest prompt with its answer")
    filler, part = haystack(lm, settings, max(lengths))
    result = evaluate_needle(lm, filler, settings, samples)
    result.about.update(text_details(settings, part))
    return result


@dataclass(frozen=True)
class Asking:
    """How a model is asked, and where its answer is looked for; see the fields of ``Settings``.

    Raises:
        ValueError: for a tokenizer without a chat template, a wording without ``{cities}``, or an unknown rule.
    """

    tokenizer: Any
    chat_template: bool = False
    wording: str = ""
    scoring: str = "next"

    def __post_init__(self):
        require_known("scoring", self.scoring, ("next", "search"))
        check_asking(self.tokenizer, self.chat_template, self.wording, ("cities",))

    def prompt(self, context: str, cities: Sequence[str]) -> str:
        """The whole prompt: the context, the question, and the beginning of the answer."""
        asked, cue, beginning = self._question(cities)
        if not self.chat_template:
            return context + asked + cue + beginning
        return templated(self.tokenizer, (context + asked).strip(), beginning if self.scoring == "next" else "")

    def _question(self, cities: Sequence[str]) -> tuple[str, str, str]:
        """The question, what stands before the answer, and the beginning of the answer."""
        if not self.wording:
            asked, beginning = question(cities).split(" Answer: ")
            return asked, " Answer: ", beginning
        asked, _, beginning = worded(self.wording, cities=listed(cities), city=cities[0]).partition("|")
        return f"\n{asked}", " " if beginning else "", beginning

    def new_tokens(self, queries: int, digits: int) -> int:
        """Tokens of an answer, at most."""
        least = answer_tokens(self.tokenizer, queries, digits)
        return least if self.scoring == "next" else max(SEARCHED, least)

    def right(self, text: str, example: NeedleExample) -> int:
        """How many of the example's answers the generated ``text`` gives."""
        if self.scoring == "next":
            numbers = parse_numbers(text, len(example.answers))
        else:
            begun = "" if self.chat_template else f"{self._question(example.cities)[2]} "
            numbers = numbers_said(begun + text, example.cities)
        return sum(a == b for a, b in zip(numbers, example.answers, strict=True))

    def details(self) -> dict:
        """For the result's provenance."""
        searched = f"with the number of each city searched for in the first {SEARCHED} tokens"
        return asked_details(self.chat_template, self.wording, searched if self.scoring == "search" else "")


def evaluate_needle(
    lm: LanguageModel,
    filler: Filler,
    settings: Settings = Settings(),
    samples: Samples | None = None,
) -> Result:
    """A row for each prompt: ``n``, ``r``, ``length``, ``depth``, the whole prompt, ``score``, the share of right
    numbers, and ``tokens``, the prompt's length with the tokens that the tokenizer puts in front (BOS).

    ``settings`` without those of the text, which ``filler`` has; ``samples``: progress, limit and resumption.

    Raises:
        ValueError: for a length in which the needles do not fit, or that the model does not support.
    """
    lengths, depths, digits = tuple(settings.lengths) or (settings.length,), settings.depths, settings.digits
    require_positive(length=min(lengths), per_cell=settings.samples)
    require_whole_percents(depths)
    samples = samples or Samples()
    asking = Asking(lm.tokenizer, settings.chat_template, settings.wording, settings.scoring)
    if asking.chat_template:
        filler = filler.without(special_spellings(lm.tokenizer))
    prefix = 0 if asking.chat_template else len(getattr(lm, "prefix", ()))
    check_length(lm, max(lengths), "the longest prompt with its answer")
    prompts = min(settings.samples, samples.limit or settings.samples)
    for each in dict.fromkeys((min(lengths), max(lengths))):  # lengths between them fit if these do
        check_needle_fits(
            filler, lm.tokenizer, settings.cells, each, digits, depths=depths, per_cell=prompts, seed=settings.seed,
            prefix=prefix, asking=asking,
        )  # fmt: skip
    low, high = number_range(digits)
    rows: list[dict] = []
    for needles, queries in settings.cells:
        for each in lengths:
            for depth in depths:
                cell = _Cell(needles, queries, each, depth, digits, settings.seed, asking)
                part = f"n{needles}_r{queries}_len{each}_depth{round(100 * depth)}"
                score = _scorer(lm, filler, cell, prefix)
                rows += samples.rows(part, range(settings.samples), score, batch_size=rows_at_once(lm, each))
    about = {"length": max(lengths), "lengths": list(lengths), "chance": 1.0 / (high - low), **asking.details()}
    return Result("needle", rows, about)


@dataclass(frozen=True)
class _Cell:
    needles: int
    queries: int
    length: int
    depth: float
    digits: int
    seed: int
    asking: Asking

    def __str__(self) -> str:
        return f"needle evaluation with N={self.needles}, R={self.queries}, {self.length} tokens"

    def example(self, filler: Filler, tokenizer, sample: int, prefix: int = 0) -> NeedleExample:
        room = self.length - prefix - self.asking.new_tokens(self.queries, self.digits)
        return make_needle_example(
            self._rng(sample), filler, tokenizer, length=room, needles=self.needles, queries=self.queries,
            depth=self.depth, digits=self.digits, frame=self.asking.prompt, special=self.asking.chat_template,
        )  # fmt: skip

    def least(self, tokenizer, sample: int, prefix: int = 0) -> int:
        """The smallest ``length`` that this sample's prompt and answer fit in."""
        facts = least_length(
            self._rng(sample), tokenizer, needles=self.needles, queries=self.queries, digits=self.digits,
            frame=self.asking.prompt, special=self.asking.chat_template,
        )  # fmt: skip
        return prefix + facts + self.asking.new_tokens(self.queries, self.digits)

    def _rng(self, sample: int) -> np.random.Generator:
        return evaluation_rng(self.seed, "needle", self.needles, self.queries, round(100 * self.depth), sample)


def _scorer(lm: LanguageModel, filler: Filler, cell: _Cell, prefix: int) -> Callable[[list[int]], list[dict]]:
    def score(numbers: list[int]) -> list[dict]:
        examples = [cell.example(filler, lm.tokenizer, number, prefix) for number in numbers]
        more = {"templated": True} if cell.asking.chat_template else {}
        new_tokens = cell.asking.new_tokens(cell.queries, cell.digits)
        texts = lm.generate([e.prompt for e in examples], new_tokens, **more)
        rows = []
        for example, text in zip(examples, texts, strict=True):
            right = cell.asking.right(text, example)
            rows.append({
                "n": cell.needles, "r": cell.queries, "length": cell.length, "depth": cell.depth,
                "tokens": prefix + example.num_tokens, "prompt": example.prompt,
                "expected": example.expected_completion, "got": text, "score": right / cell.queries,
            })  # fmt: skip
        return rows

    return score


def check_needle_fits(
    filler: Filler,
    tokenizer,
    cells: Sequence[tuple[int, int]],
    length: int,
    digits: int,
    *,
    depths: Sequence[float] = DEPTHS,
    per_cell: int = 50,
    seed: int = 0,
    prefix: int = 0,
    asking: Asking | None = None,
):
    """Check that the prompts of all cells (N, R) fit in ``length`` tokens, including ``prefix`` and answer.

    Raises:
        ValueError: if they do not, with the smallest length that fits all of them.
    """
    asking = asking or Asking(tokenizer)
    longest: list[tuple[int, _Cell, int]] = []  # per (N, R): tokens of the longest sample, and which
    for needles, queries in cells if depths else ():
        every = [
            (_Cell(needles, queries, length, depth, digits, seed, asking), sample)
            for depth in depths
            for sample in range(per_cell)
        ]
        try:
            sizes = [cell.least(tokenizer, sample, prefix) for cell, sample in every]
        except ValueError as error:
            raise UserError(f"{every[0][0]}: {error}") from error
        longest.append((max(sizes), *every[sizes.index(max(sizes))]))
    for least, cell, sample in sorted(longest, key=lambda one: -one[0]):
        if least > length:
            raise UserError(
                f"{cell}: needles, question and answer take up to {least}; give a length of {least} or more, or fewer "
                "needles"
            )
        try:
            cell.example(filler, tokenizer, sample, prefix)
        except ValueError as error:
            raise UserError(f"{cell}: {error}") from error


def answer_tokens(tokenizer, queries: int, digits: int) -> int:
    """Tokens of the longest answer: the longest city name, a number and punctuation for each needle asked for."""
    longest = completion(["Rio de Janeiro"] * queries, ["9" * digits] * queries)
    return len(tokenizer(longest, add_special_tokens=False)["input_ids"]) + 2
