"""The tasks of RULER [arXiv 2404.06654], drawn from a seed, without a download.

Prompts, sizes and answers have the published form. What differs: keys and listed words come from the text that is
given, not from a list of English nouns, and essays are that text. Each function draws a sample with ``units`` of
context: lines of noise, sentences, words or documents. The same generator and more units give a longer prompt.
"""

import re
import string
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np

from diff_transformer.data.tasks.types import GroundedItem
from diff_transformer.errors import UserError

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
LONGEST = 30  # words of a sentence, so that a prompt comes close to its length
SHORT = 4096  # tokens below which the lists of "cwe" repeat their words less often
_SENTENCE = re.compile(r"(?<=[.!?])\s+")
_DEPTHS = np.linspace(0, 100, 40).round()  # per cent of the text, before which needles stand


@dataclass(frozen=True)
class Material:
    """The material of samples: words, sentences of running text, and documents with questions."""

    words: tuple[str, ...]
    sentences: tuple[str, ...]
    questions: tuple[GroundedItem, ...] = ()


@dataclass(frozen=True)
class Sample:
    """A prompt, which ends with the ``beginning`` of its answer, and the strings that the answer must have."""

    question: str
    beginning: str
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Task:
    """A task: ``make(rng, units, material, length)``, tokens of an answer, and whether one of its answers suffices."""

    make: Callable[[np.random.Generator, int, Material, int], Sample]
    new_tokens: int
    any_answer: bool = False
    least: int = 1  # units


def material(text: Sequence[str], questions: Sequence[GroundedItem] = ()) -> Material:
    """Words and sentences of a text, given as words. Longer sentences, such as code, are cut after 30 words.

    Raises:
        UserError: for a text with fewer than 500 different words of 4 to 10 small letters.
    """
    plain = {word for word in map(str.strip, text) if word.isascii() and word.isalpha() and word.islower()}
    words = tuple(sorted(word for word in plain if 4 <= len(word) <= 10))
    if len(words) < 500:
        raise UserError(f"the text has {len(words)} different words of 4 to 10 small letters; RULER needs 500")
    sentences = [sentence.split() for sentence in _SENTENCE.split(" ".join(map(str.strip, text)))]
    parts = [" ".join(of[i : i + LONGEST]) for of in sentences for i in range(0, len(of), LONGEST)]
    asked = tuple(item for item in questions if item.kind == "question" and item.document)
    return Material(words, tuple(parts), asked)


def needles(
    rng: np.random.Generator, units: int, of: Material, length: int, *, haystack: str = "text", keys: str = "words",
    values: str = "numbers", n_keys: int = 1, n_values: int = 1, n_queries: int = 1,
) -> Sample:  # fmt: skip
    """Needles in a haystack: "niah_..." of the paper.

    Args:
        haystack: "noise" (one sentence, repeated), "text", or "needles" (of other keys).
        keys, values: "words", "numbers" of 7 digits, or "uuids".
        n_keys, n_values, n_queries: keys, values of each, and keys that are asked for.
    """
    found = {
        _drawn(rng, keys, of.words): [_drawn(rng, values, of.words) for _ in range(n_values)] for _ in range(n_keys)
    }
    hidden = [_needle(values, key, value) for key, several in found.items() for value in several]
    rng.shuffle(hidden)
    if haystack == "text":
        first = int(rng.integers(len(of.sentences)))
        lines = [of.sentences[(first + i) % len(of.sentences)] for i in range(units)]
        places = sorted(int(units * depth / 100) for depth in rng.choice(_DEPTHS, len(hidden), replace=False))
    else:
        other = partial(_needle, values)
        lines = [
            NOISE if haystack == "noise" else other(_drawn(rng, keys, of.words), _drawn(rng, values, of.words))
            for _ in range(units)
        ]
        places = sorted(int(place) for place in rng.integers(0, units + 1, len(hidden)))
    for place, needle in zip(reversed(places), hidden, strict=True):
        lines.insert(place, needle)
    asked = [str(key) for key in rng.choice([*found], n_queries, replace=False)]
    query = asked[0] if n_queries == 1 else f"{', '.join(asked[:-1])}, and {asked[-1]}"
    answers = tuple(value for key in asked for value in found[key])
    single = len(answers) == 1
    kind, start, verb = (values[:-1], "A", "is") if single else (values, "Some", "are")
    context = (" " if haystack == "text" else "\n").join(lines)
    question = (
        f"{start} special magic {kind} {verb} hidden within the following text. Make sure to memorize it. I will quiz "
        f"you about the {kind} afterwards.\n{context}\nWhat {'is' if single else 'are all'} the special magic {kind} "
        f"for {query} mentioned in the provided text?"
    )
    return Sample(question, f" The special magic {kind} for {query} mentioned in the provided text {verb}", answers)


def variable_tracking(rng: np.random.Generator, units: int, of: Material, length: int) -> Sample:
    """ "vt": a chain of four assignments among noise, after an example with shorter names."""
    example, sample = _chain(rng, min(units, 10), 3), _chain(rng, units, 5)
    shown = f"{example.question}{example.beginning} {' '.join(example.answers)}\n\n\n"
    return Sample(shown + sample.question, sample.beginning, sample.answers)


def _chain(rng: np.random.Generator, units: int, letters: int, hops: int = 4) -> Sample:
    names: list[str] = []
    while len(names) <= hops:
        name = "".join(rng.choice([*string.ascii_uppercase], letters))
        names += [name] * (name not in names)
    value = str(rng.integers(10_000, 99_999))
    chain = [f"VAR {names[0]} = {value}", *(f"VAR {b} = VAR {a} " for a, b in pairwise(names))]
    lines = [NOISE] * units
    for place, statement in zip(sorted(rng.integers(0, units + 1, len(chain)), reverse=True), chain[::-1], strict=True):
        lines.insert(int(place), statement)
    context = "\n".join(lines)
    return Sample(
        "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
        f"{context}\nQuestion: Find all variables that are assigned the value {value} in the text above.",
        " Answer: According to the chain(s) of variable assignment in the text above, "
        f"{len(names)} variables are assgined the value {value}, they are:",  # the published spelling
        tuple(names),
    )


def common_words(rng: np.random.Generator, units: int, of: Material, length: int) -> Sample:
    """ "cwe": the ten words that a numbered list repeats most, after an example. ``units`` are different words."""
    sizes = ((20, 3, 1), (6, 1)) if length < SHORT else ((40, 10, 3), (30, 3))
    (words, often, seldom), repeats = sizes
    example, sample = _list(rng, of.words, words, often, seldom), _list(rng, of.words, units, *repeats)
    shown = f"{example.question}{example.beginning} {_numbered(example.answers)}\n"
    return Sample(shown + sample.question, sample.beginning, sample.answers)


def _list(
    rng: np.random.Generator, words: Sequence[str], count: int, often: int, seldom: int, common: int = 10
) -> Sample:
    drawn = [str(word) for word in rng.choice(words, min(count + common, len(words)), replace=False)]
    listed = drawn[:common] * often + drawn[common:] * seldom
    rng.shuffle(listed)
    return Sample(
        "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
        f"appear most often.\n{_numbered(listed)}\nQuestion: What are the 10 most common words in the above list?",
        " Answer: The top 10 words that appear most often in the list are:",
        tuple(drawn[:common]),
    )


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))


def frequent_words(rng: np.random.Generator, units: int, of: Material, length: int, alpha: float = 2.0) -> Sample:
    """ "fwe": the three most frequent of coded words, whose counts follow a zeta law. ``units`` are words in all."""
    size = max(4, length // 50)
    coded = ["".join(rng.choice([*string.ascii_lowercase], 6)) for _ in range(size)]
    coded[0] = "..."
    share = np.arange(1.0, size + 1) ** -alpha
    counts = (units * share / share.sum()).astype(int)
    words = [word for word, count in zip(coded, counts, strict=True) for _ in range(count)]
    rng.shuffle(words)
    return Sample(
        "Read the following coded text and track the frequency of each coded word. Find the three most frequently "
        f"appeared coded words. {' '.join(words)}\nQuestion: Do not provide any explanation. Please ignore the dots "
        "'....'. What are the three most frequently appeared words in the above coded text?",
        " Answer: According to the coded text above, the three most frequently appeared words are:",
        tuple(coded[1:4]),
    )


def questions(rng: np.random.Generator, units: int, of: Material, length: int) -> Sample:
    """ "qa": a question among ``units`` documents, of which one has the answer."""
    order = rng.permutation(len(of.questions))
    item = of.questions[order[0]]
    documents = dict.fromkeys([item.document, *(of.questions[i].document for i in order[1:])])
    shown = [*documents][:units]
    rng.shuffle(shown)
    context = "\n\n".join(f"Document {number}:\n{text}" for number, text in enumerate(shown, 1))
    rule = (
        "Answer the question based on the given documents. Only give me the answer and do not output any other words."
    )
    question = f"{rule}\n\nThe following are given documents.\n\n{context}\n\n{rule}\n\nQuestion: {item.question}"
    return Sample(question, " Answer:", item.references)


TASKS: dict[str, Task] = {
    "niah_single_1": Task(partial(needles, haystack="noise"), 128),
    "niah_single_2": Task(needles, 128),
    "niah_single_3": Task(partial(needles, values="uuids"), 128),
    "niah_multikey_1": Task(partial(needles, n_keys=4), 128, least=4),
    "niah_multikey_2": Task(partial(needles, haystack="needles"), 128),
    "niah_multikey_3": Task(partial(needles, haystack="needles", keys="uuids", values="uuids"), 128),
    "niah_multivalue": Task(partial(needles, n_values=4), 128, least=4),
    "niah_multiquery": Task(partial(needles, n_keys=4, n_queries=4), 128, least=4),
    "vt": Task(variable_tracking, 30, least=5),
    "cwe": Task(common_words, 120, least=10),
    "fwe": Task(frequent_words, 50, least=32),
    "qa": Task(questions, 32, any_answer=True),
}


def longest(make: Callable[[int], Sample], fits: Callable[[Sample], bool], least: int) -> Sample | None:
    """The sample with the most units, from ``least``, that fits; None if not even that one does."""
    low, high, best = least, least, make(least)
    if not fits(best):
        return None
    while fits(longer := make(2 * high)) and longer != best:
        low, high, best = 2 * high, 2 * high, longer
    high = 2 * high  # does not fit, or is no longer
    while high - low > 1:
        middle = (low + high) // 2
        if fits(sample := make(middle)):
            low, best = middle, sample
        else:
            high = middle
    return best


def score(task: Task, answers: Sequence[str], text: str) -> float:
    """Share of the answers that ``text`` contains, in capitals or not; 1 or 0 where one answer suffices."""
    right = [answer.lower() in text.lower() for answer in answers]
    return float(any(right)) if task.any_answer else sum(right) / len(right)


def _needle(values: str, key: str, value: str) -> str:
    return f"One of the special magic {values} for {key} is: {value}."


def _drawn(rng: np.random.Generator, kind: str, words: Sequence[str]) -> str:
    if kind == "numbers":
        return str(rng.integers(10**6, 10**7))
    if kind == "uuids":
        return str(uuid.UUID(bytes=rng.bytes(16), version=4))
    return "-".join(map(str, rng.choice(words, 2)))
