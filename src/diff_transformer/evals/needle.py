"""Multi-needle retrieval (section 3.4, Table 2, Figure 5).

    filler  The magic number of Paris is 42.  filler  The magic number of Rome is 17.  filler
    Question: What is the magic number of Rome? Answer: Rome is| 17

N needles are hidden in text and R of them asked for; the first one asked for sits at a chosen depth, the others
anywhere. The model continues greedily after the bar. An example's score is the share of the R numbers that it gives
exactly and in order. Numbers and cities come from a random stream that training never uses.

Instruct models are asked through their chat template (``chat_template``), and by a rule for free text
(``scoring="search"``): the number that the first 32 tokens say of each city, or the numbers in the order asked
(``numbers_said``). Each city has one number, so the chance of a guess is the same by both rules.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from diff_transformer.checks import require_known
from diff_transformer.data.filler import Filler
from diff_transformer.data.needles import (
    DEPTHS,
    WORDINGS,
    NeedleExample,
    completion,
    least_length,
    make_needle_example,
    number_range,
    numbers_said,
    parse_numbers,
    question,
)
from diff_transformer.data.seeding import evaluation_rng
from diff_transformer.errors import UserError
from diff_transformer.evals.lm import CausalLM, check_length, haystack, rows_at_once, text_details
from diff_transformer.evals.prompts import check_template, special_spellings, template_details, templated
from diff_transformer.evals.samples import ALL, Samples
from diff_transformer.evals.types import Result
from diff_transformer.settings import Depths, PositiveInt, Seed
from diff_transformer.train.config import Cells

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
    cells: Cells = ((1, 1), (2, 2), (4, 2), (6, 2))
    # Position of the first needle asked for: 0 is the start of the text, 1 its end.
    depths: Depths = DEPTHS
    # Tokens of prompt and answer together, in the model's own tokenizer.
    length: PositiveInt = 4096
    # Several lengths in one run, instead of length.
    lengths: tuple[PositiveInt, ...] = ()
    # Prompts for each cell, length and depth.
    samples: PositiveInt = 50
    # Digits of a magic number.
    digits: PositiveInt = 2
    # "city" (the needle names the city, as in training), or "landmark" (it names a landmark there, so that no word of
    # the question leads to it)
    wording: str = "city"
    # Ask through the tokenizer's chat template.
    chat_template: bool = False
    # "next" (the first numbers of the answer, which the prompt begins) or "search" (the number that its first 32 tokens
    # say of each city)
    scoring: Literal["next", "search"] = "next"
    # Seed of cities, numbers, positions and text.
    seed: Seed = 0


QUICK = {"length": 128, "cells": ((1, 1),), "samples": 8, "digits": 1}


def amount(settings: Settings, config: Any) -> tuple[int, int]:
    """Prompts, and their tokens in all, on any model."""
    lengths = lengths_of(settings)
    prompts = len(settings.cells) * len(settings.depths) * settings.samples
    return prompts * len(lengths), prompts * sum(lengths)


def lengths_of(settings: Any) -> tuple[int, ...]:
    """``lengths`` of an experiment's settings, or its one ``length``."""
    return tuple(settings.lengths) or (settings.length,)


def run(lm: CausalLM, settings: Settings, samples: Samples) -> Result:
    """``diff-transformer eval needle``."""
    filler, part = haystack(lm, settings, max(lengths_of(settings)))
    result = evaluate_needle(lm, filler, settings, samples)
    result.about.update(text_details(settings, part))
    return result


def evaluate_needle(lm: CausalLM, filler: Filler, settings: Settings = Settings(), samples: Samples = ALL) -> Result:
    """A row for each prompt: ``n``, ``r``, ``length``, ``depth``, the whole prompt, ``score``, the share of right
    numbers, and ``tokens``, the prompt's length with the tokens that the tokenizer puts in front (BOS).

    ``settings`` without those of the text, which ``filler`` has.

    Raises:
        UserError: for a length in which the needles do not fit, or that the model does not support.
    """
    lengths = lengths_of(settings)
    require_known("wording", settings.wording, WORDINGS)
    check_template(lm.tokenizer, settings.chat_template)
    check_length(lm, max(lengths), "the longest prompt with its answer")
    asking = Asking(lm.tokenizer, settings, 0 if settings.chat_template else len(getattr(lm, "prefix", ())))
    if settings.chat_template:
        filler = filler.without(special_spellings(lm.tokenizer))
    check_needle_fits(filler, asking)
    more = {"templated": True} if settings.chat_template else {}
    rows: list[dict] = []
    for needles, queries in settings.cells:
        for length in lengths:
            for depth in settings.depths:
                cell = {"n": needles, "r": queries, "length": length, "depth": depth}

                def score(numbers: Sequence[int], cell: dict[str, Any] = cell) -> list[dict]:
                    examples = [asking.example(filler, number, **cell) for number in numbers]
                    texts = lm.generate([each.prompt for each in examples], asking.new_tokens(cell["r"]), **more)
                    return [cell | asking.answered(*each) for each in zip(examples, texts, strict=True)]

                part = f"{queries} of {needles} needles, {length} tokens, depth {depth:.0%}"
                rows += samples.rows(part, range(settings.samples), score, batch_size=rows_at_once(lm, length))
    low, high = number_range(settings.digits)
    searched = f"with the number of each city searched for in the first {SEARCHED} tokens"
    about = {"length": max(lengths), "lengths": list(lengths), "chance": 1.0 / (high - low)}
    asked = template_details(settings.chat_template, searched if settings.scoring == "search" else "")
    return Result("needle", rows, about | asked)


@dataclass(frozen=True)
class Asking:
    """How a model is asked, and where its answer is looked for. ``prefix``: tokens that stand before every prompt."""

    tokenizer: Any
    settings: Settings
    prefix: int = 0

    def example(self, filler: Filler, sample: int, n: int, r: int, length: int, depth: float) -> NeedleExample:
        room = length - self.prefix - self.new_tokens(r)
        rng = self._rng(sample, n, r, depth)
        return make_needle_example(rng, filler, self.tokenizer, length=room, depth=depth, **self._options(n, r))

    def least(self, sample: int, n: int, r: int, depth: float) -> int:
        """The smallest ``length`` that this sample's prompt and answer fit in."""
        facts = least_length(self._rng(sample, n, r, depth), self.tokenizer, **self._options(n, r))
        return self.prefix + facts + self.new_tokens(r)

    def new_tokens(self, queries: int) -> int:
        """Tokens of an answer: those of the longest city name, a number and punctuation for each needle asked for."""
        longest = completion(["Rio de Janeiro"] * queries, ["9" * self.settings.digits] * queries)
        least = len(self.tokenizer(longest, add_special_tokens=False)["input_ids"]) + 2
        return least if self.settings.scoring == "next" else max(SEARCHED, least)

    def answered(self, example: NeedleExample, text: str) -> dict:
        """Prompt, answer and score of an example, to which the model has added ``text``."""
        if self.settings.scoring == "next":
            numbers = parse_numbers(text, len(example.answers))
        else:
            begun = "" if self.settings.chat_template else f"{example.cities[0]} is "
            numbers = numbers_said(begun + text, example.cities)
        right = sum(a == b for a, b in zip(numbers, example.answers, strict=True))
        return {
            "tokens": self.prefix + example.num_tokens, "prompt": example.prompt,
            "expected": example.expected_completion, "got": text, "score": right / len(example.answers),
        }  # fmt: skip

    def _prompt(self, context: str, cities: Sequence[str]) -> str:
        """The whole prompt: the context, the question, and the beginning of the answer."""
        if not self.settings.chat_template:
            return context + question(cities, self.settings.wording)
        asked, beginning = question(cities, self.settings.wording).split(" Answer: ")
        return templated(
            self.tokenizer, (context + asked).strip(), beginning if self.settings.scoring == "next" else ""
        )

    def _options(self, n: int, r: int) -> dict[str, Any]:
        return {
            "needles": n, "queries": r, "digits": self.settings.digits, "frame": self._prompt,
            "special": self.settings.chat_template, "wording": self.settings.wording,
        }  # fmt: skip

    def _rng(self, sample: int, n: int, r: int, depth: float) -> np.random.Generator:
        return evaluation_rng(self.settings.seed, "needle", n, r, round(100 * depth), sample)


def check_needle_fits(filler: Filler, asking: Asking) -> None:
    """Check that the prompts of all cells (N, R) fit in the settings' lengths, before anything is generated.

    Raises:
        UserError: if they do not, with the smallest length that fits all of them; or if the filler does not suffice.
    """
    settings, lengths = asking.settings, lengths_of(asking.settings)
    sizes = {
        asking.least(sample, n, r, depth): (n, r, depth, sample)
        for n, r in settings.cells
        for depth in settings.depths
        for sample in range(settings.samples)
    }
    n, r, depth, sample = sizes[max(sizes)]
    if max(sizes) > min(lengths):
        raise UserError(
            f"needles, question and answer take up to {max(sizes)} tokens with N={n}, R={r}; give a length of "
            f"{max(sizes)} or more, or fewer needles"
        )
    for length in {min(lengths), max(lengths)}:
        asking.example(filler, sample, n, r, length, depth)
