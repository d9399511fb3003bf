"""Multi-needle retrieval (section 3.4): a needle assigns a magic number to a city, in a text about something else.

    ... filler  The magic number of Paris is 42. filler  The magic number of Rome is 17. filler ...
    Question: What are the magic numbers of Rome and Paris? Answer: Rome is| 17, Paris is 42.

The prompt ends at the bar. :func:`make_needle_example` makes prompts for evaluation, as text, for any tokenizer.
:class:`~diff_transformer.data.needle_source.NeedleSource` makes training rows in the same format.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from diff_transformer.data.filler import Filler
from diff_transformer.data.seeding import training_rng
from diff_transformer.data.tokenizer import encode, encode_inside
from diff_transformer.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_CITY_NAMES = """
Aarhus Accra Adelaide Agadir Aleppo Algiers Almaty Amman Amsterdam Ankara Antwerp Asmara Aswan Athens Auckland
Baghdad Baku Bamako Bangkok Banjul Barcelona Basel Beirut Belfast Belgrade Bergen Berlin Bern Bilbao Bogota Bologna
Bonn Bordeaux Boston Brasilia Bremen Brisbane Brussels Bucharest Budapest Bursa Busan Cairo Calgary Canberra Caracas
Cardiff Cebu Chengdu Chennai Chicago Cologne Colombo Cork Cusco Dakar Dalian Dallas Damascus Darwin Davao Delft
Delhi Denver Detroit Dhaka Dijon Djibouti Doha Dresden Dubai Dublin Dundee Durban Edinburgh Edmonton Erfurt Faro
Florence Frankfurt Fukuoka Galway Gdansk Geneva Genoa Ghent Glasgow Granada Graz Guangzhou Haifa Hamburg Hanoi
Harare Havana Helsinki Hiroshima Hobart Honolulu Houston Hyderabad Innsbruck Istanbul Izmir Jaipur Jakarta Jeddah
Jerusalem Kabul Kampala Kano Karachi Kathmandu Kazan Khartoum Kigali Kingston Kinshasa Kobe Kolkata Krakow Kyoto
Lagos Lahore Leeds Leipzig Leuven Liege Lille Lima Limerick Linz Lisbon Liverpool Ljubljana London Luanda Lusaka
Luxor Lyon Madrid Malaga Malmo Managua Manila Maputo Marrakesh Marseille Medellin Melbourne Memphis Miami Milan
Minsk Mombasa Monrovia Montreal Moscow Mumbai Munich Muscat Nagoya Nairobi Nanjing Nantes Naples Nashville Nicosia
Odessa Omaha Oran Osaka Oslo Ottawa Oulu Padua Palermo Paris Perth Phoenix Pisa Portland Porto Prague Pretoria Pune
Quito Rabat Riga Riyadh Rome Rotterdam Salvador Santiago Santos Sapporo Sarajevo Seattle Sendai Seoul Seville
Shanghai Singapore Skopje Sofia Stockholm Stuttgart Suva Sydney Taipei Tallinn Tampa Tampere Tashkent Tbilisi Tehran
Tirana Tokyo Toronto Toulouse Trieste Tripoli Tulsa Tunis Turin Turku Uppsala Utrecht Vaduz Valencia Valletta
Vancouver Varna Venice Verona Vienna Vigo Vilnius Warsaw Wuhan Xian Yerevan Yokohama York Zagreb Zanzibar Zurich
"""
CITIES: tuple[str, ...] = tuple(_CITY_NAMES.split())
_CITIES_AND_NUMBERS = re.compile(rf"\b(?:{'|'.join(CITIES)})\b|[0-9]+", re.IGNORECASE)
LANDMARKS = {  # of some of the cities, for needles that do not name them
    "Athens": "the Parthenon", "Barcelona": "the Sagrada Familia", "Beirut": "the Pigeon Rocks",
    "Berlin": "the Brandenburg Gate", "Brussels": "the Atomium", "Budapest": "the Fisherman's Bastion",
    "Cologne": "the cathedral on the Rhine", "Dresden": "the Semper Opera", "Dubai": "the Burj Khalifa",
    "Florence": "the Uffizi", "Granada": "the Alhambra", "Hamburg": "the Elbe Philharmonic Hall",
    "Istanbul": "the Hagia Sophia", "Jerusalem": "the Western Wall", "Krakow": "Wawel Castle",
    "London": "the Tower Bridge", "Madrid": "the Prado", "Milan": "La Scala", "Moscow": "the Kremlin",
    "Munich": "the Frauenkirche on Marienplatz", "Paris": "the Eiffel Tower", "Pisa": "the Leaning Tower",
    "Prague": "Charles Bridge", "Rome": "the Colosseum", "Salvador": "the Elevador Lacerda",
    "Seville": "the Giralda", "Singapore": "Marina Bay Sands", "Stockholm": "the Vasa Museum",
    "Sydney": "the Opera House with the sails", "Venice": "the Rialto Bridge", "Verona": "the balcony of Juliet",
    "Vienna": "Schönbrunn Palace",
}  # fmt: skip
WORDINGS: dict[str, tuple[str, ...]] = {"city": CITIES, "landmark": tuple(LANDMARKS)}  # and their cities
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
_FITTING_ATTEMPTS = 8


@dataclass(frozen=True)
class NeedleExample:
    """A prompt and its expected completion."""

    prompt: str
    expected_completion: str  # " 17, Paris is 42."
    answers: tuple[str, ...]  # in the order of the question
    cities: tuple[str, ...]  # in the order of the question
    depth: float  # of the first queried needle: 0 = start of the context, 1 = just before the question
    answer_spans: tuple[tuple[int, int], ...]  # characters of the queried needles' sentences, in the question's order
    num_tokens: int  # of the prompt


Frame = Callable[[str, Sequence[str]], str]  # (context, cities asked for) -> the whole prompt


def needle(city: str, number: str, wording: str = "city") -> str:
    """The sentence that assigns a number to a city, with a space before it; as "landmark" without a word of the
    question, so that it is found by what it means (after NoLiMa, arXiv 2502.05167)."""
    if wording == "landmark":
        return f" On the wall behind {LANDMARKS[city]}, somebody painted {number}."
    return f" The magic number of {city} is {number}."


def question(cities: Sequence[str], wording: str = "city") -> str:
    """The end of a prompt: the question about ``cities`` and the beginning of its answer."""
    if wording == "landmark":
        which = "Which figure belongs" if len(cities) == 1 else "Which figures belong"
        return f"\nQuestion: {which} to {listed(cities)}? Answer: {cities[0]} is"
    are, s = ("is", "") if len(cities) == 1 else ("are", "s")
    return f"\nQuestion: What {are} the magic number{s} of {listed(cities)}? Answer: {cities[0]} is"


def listed(cities: Sequence[str]) -> str:
    """ "Paris", "Paris and Rome", "Paris, Rome and Oslo"."""
    return cities[0] if len(cities) == 1 else f"{', '.join(cities[:-1])} and {cities[-1]}"


def plain_prompt(context: str, cities: Sequence[str]) -> str:
    """The paper's prompt: the context, and :func:`question`."""
    return context + question(cities)


def completion(cities: Sequence[str], numbers: Sequence[str]) -> str:
    """The expected completion of :func:`question`: " 17, Paris is 42."."""
    rest = [f", {city} is {number}" for city, number in zip(cities[1:], numbers[1:], strict=True)]
    return f" {numbers[0]}{''.join(rest)}."


def needle_texts(count: int) -> Iterator[str]:
    """``count`` texts of one or two needles and a question about them, without filler.

    A small tokenizer that is trained on them too has single tokens for the words of the task.
    """
    for index in range(count):
        cities, numbers = draw_facts(training_rng(0, "needle texts", index), 1 + index % 2, 2)
        facts = [needle(city, number) for city, number in zip(cities, numbers, strict=True)]
        yield "".join(facts) + question(cities) + completion(cities, numbers)


def parse_numbers(text: str, count: int) -> list[str | None]:
    """The first ``count`` numbers of a generated answer, in order, filled up with None.

    Only the first line that is not blank is read, so that text after the answer does not count.
    """
    numbers: list[str | None] = list(re.findall(r"[0-9]+", text.lstrip().split("\n", 1)[0])[:count])
    return numbers + [None] * (count - len(numbers))


def numbers_said(text: str, cities: Sequence[str]) -> list[str | None]:
    """The number that a free answer says of each of ``cities``; None for a city without one.

    Cities and numbers are read in pairs: the i-th of some cities with the i-th of the numbers right after them ("Rome
    has 17", "Rome and Oslo have 17 and 42"). If that does not give every city a number, they are read with the numbers
    before them ("17 is Rome's"). An answer that names no city gives its numbers in the order asked. Every city has one
    number, so more guesses do not raise a score.
    """
    words = [match[0].lower() for match in _CITIES_AND_NUMBERS.finditer(text)]
    if all(word.isdigit() for word in words):
        return [*words[: len(cities)], *[None] * (len(cities) - len(words))]
    names = [city.lower() for city in cities]
    readings = [_pairs(words), _pairs(words[::-1])]
    numbers = next((pairs for pairs in readings if pairs.keys() >= {*names}), readings[0])
    return [numbers.get(name) for name in names]


def _pairs(words: Sequence[str]) -> dict[str, str]:
    """The number of each city in ``words``, cities and numbers of which the numbers come last."""
    pairs: dict[str, str] = {}
    cities: list[str] = []
    for is_number, group in groupby(words, str.isdigit):
        if not is_number:
            cities = list(group)
            continue
        numbers = list(group)
        for city, number in zip(cities[-len(numbers) :], numbers, strict=False):
            pairs.setdefault(city, number)
        cities = []
    return pairs


def draw_facts(rng: np.random.Generator, count: int, digits: int, wording: str = "city") -> tuple[list[str], list[str]]:
    """``count`` distinct cities of a wording, and as many distinct numbers of ``digits`` digits without a leading zero.

    Raises:
        UserError: if there are fewer cities or numbers.
    """
    low, high = number_range(digits)
    known = WORDINGS[wording]
    if not 1 <= count <= min(len(known), high - low):
        raise UserError(
            f"{count} needles of {digits} digits: give between 1 and {min(len(known), high - low)} "
            f"(there are {len(known)} cities and {high - low} numbers)"
        )
    cities = rng.choice(len(known), count, replace=False)
    numbers = low + rng.choice(high - low, count, replace=False)
    return [known[city] for city in cities], [str(number) for number in numbers]


def number_range(digits: int) -> tuple[int, int]:
    """[low, high) of the numbers with ``digits`` digits."""
    if not 1 <= digits <= 9:
        raise UserError(f"digits must lie between 1 and 9, got {digits}")
    return (0 if digits == 1 else 10 ** (digits - 1)), 10**digits


def least_length(
    rng: np.random.Generator,
    tokenizer: PreTrainedTokenizerFast,
    *,
    needles: int,
    queries: int,
    digits: int = 2,
    frame: Frame = plain_prompt,
    special: bool = False,
    wording: str = "city",
) -> int:
    """The smallest ``length`` that :func:`make_needle_example` accepts with this ``rng`` and a depth, in tokens."""
    cities, numbers = draw_facts(rng, needles, digits, wording)
    facts = [needle(city, number, wording) for city, number in zip(cities, numbers, strict=True)]
    return len(encode(tokenizer, frame("", cities[:queries]), special=special)) + sum(
        map(len, encode_inside(tokenizer, facts))
    )


def make_needle_example(
    rng: np.random.Generator,
    filler: Filler,
    tokenizer: PreTrainedTokenizerFast,
    *,
    length: int,
    needles: int,
    queries: int,
    depth: float,
    digits: int = 2,
    frame: Frame = plain_prompt,
    special: bool = False,
    wording: str = "city",
) -> NeedleExample:
    """A prompt of at most ``length`` tokens (special tokens not counted), less than 1 % or a word of filler below it.

    The needles are inserted between words of the filler. The whole prompt is tokenised, and filler added or removed
    until it fits. The answer needs room in the model's context in addition to ``length``.

    Args:
        length: tokens of the prompt, at most.
        needles: number of needles (N).
        queries: number of cities that the question asks for (R).
        depth: place of the first needle asked for, as a share of the context in tokens. The others are anywhere.
        digits: digits of a number.
        frame: makes the prompt of the context, which may lose the white space at its ends, and of the cities asked for.
        special: the prompt has special tokens, spelled out.
        wording: of ``WORDINGS``, for the needles; ``frame`` words the question.

    Raises:
        UserError: if ``length``, the filler, the cities or the numbers do not suffice.
    """
    if not 1 <= queries <= needles:
        raise UserError(f"queries must lie between 1 and needles ({needles}), got {queries}")
    if not 0 <= depth <= 1:
        raise UserError(f"depth must lie between 0 (start of the context) and 1 (its end), got {depth}")
    cities, numbers = draw_facts(rng, needles, digits, wording)  # the first R are asked for
    sentences = [needle(city, number, wording) for city, number in zip(cities, numbers, strict=True)]
    sizes = list(map(len, encode_inside(tokenizer, sentences)))
    asked_size = len(encode(tokenizer, frame("", cities[:queries]), special=special))
    room = length - sum(sizes) - asked_size
    if room < 0:
        raise UserError(
            f"length {length} is too short for {needles} needles and a question on {queries}: they take "
            f"{length - room} tokens; give a larger length or fewer needles"
        )
    prompt, num_tokens = "", 0
    joined, state = filler.tokens(tokenizer).joined, rng.bit_generator.state
    budget, tried = round(room / joined), set()
    for _ in range(_FITTING_ATTEMPTS):
        rng.bit_generator.state = state  # every attempt takes about the same text
        context, counted = _context(rng, filler, tokenizer, sentences, sizes, budget, depth)
        whole = frame(context, cities[:queries])
        tokens = len(encode(tokenizer, whole, special=special))
        if num_tokens < tokens <= length:
            prompt, num_tokens = whole, tokens
        exact = joined == 1 and tokens == sum(sizes) + counted + asked_size  # the words come as close as they can
        if tokens <= length and (exact or tokens >= length - length // 100):
            break
        rate = max(0.1, (tokens - sum(sizes) - asked_size) / max(1, counted))  # tokens by those counted word by word
        change = (length - tokens) / rate
        tried.add(budget)
        budget = max(0, budget + (max(1, int(change)) if change > 0 else math.floor(change)))
        while budget in tried and budget:
            budget -= 1
    if not prompt:
        raise UserError(f"no filler makes a prompt of {length} tokens with this tokenizer; give a larger length")
    asked = [sentence.lstrip() for sentence in sentences[:queries]]  # each occurs once: the filler has none
    starts = [prompt.index(sentence) for sentence in asked]
    return NeedleExample(
        prompt=prompt,
        expected_completion=completion(cities[:queries], numbers[:queries]),
        answers=tuple(numbers[:queries]),
        cities=tuple(cities[:queries]),
        depth=depth,
        answer_spans=tuple((start, start + len(text)) for start, text in zip(starts, asked, strict=True)),
        num_tokens=num_tokens,
    )


def _context(
    rng: np.random.Generator,
    filler: Filler,
    tokenizer: PreTrainedTokenizerFast,
    sentences: list[str],
    sizes: Sequence[int],
    budget: int,
    depth: float,
) -> tuple[str, int]:
    """Filler of ``budget`` tokens with the sentences in it, and the tokens of the filler, counted word by word."""
    first, last = filler.window(rng, tokenizer, budget)
    pieces = np.array(filler.words[first:last], dtype=object)
    lengths = np.diff(filler.tokens(tokenizer).starts[first : last + 1])
    counted = int(lengths.sum())
    gaps = rng.integers(0, len(pieces) + 1, len(sentences) - 1)
    pieces = np.insert(pieces, gaps, sentences[1:])
    lengths = np.insert(lengths, gaps, sizes[1:])
    before = np.concatenate([[0], np.cumsum(lengths)])
    gap = int(np.argmin(np.abs(before - depth * before[-1])))
    return "".join(np.insert(pieces, gap, sentences[0])), counted
