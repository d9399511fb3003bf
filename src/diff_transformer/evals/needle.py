"""Multi-needle retrieval (section 3.4, Table 2, Figure 5).

    filler  The magic number of Paris is 42.  filler  The magic number of Rome is 17.  filler
    Question: What is the magic number of Rome? Answer: Rome is| 17

N needles are hidden in text and R of them asked for; the first one asked for sits at a chosen depth, the others
anywhere. The model continues greedily after the bar. An example's score is the share of the R numbers it gives exactly
and in order; numbers and cities are drawn from a stream that training never uses.
"""

from collections.abc import Sequence

import numpy as np

from diff_transformer.checks import require_positive
from diff_transformer.data.filler import Filler
from diff_transformer.data.needles import DEPTHS, completion, make_needle_example, number_range, parse_numbers
from diff_transformer.data.seeding import evaluation_rng
from diff_transformer.evals.lm import LanguageModel
from diff_transformer.evals.provenance import provenance
from diff_transformer.evals.types import Result


def evaluate_needle(
    lm: LanguageModel,
    filler: Filler,
    *,
    settings: Sequence[tuple[int, int]] = ((1, 1), (2, 2), (4, 2), (6, 2)),
    depths: Sequence[float] = DEPTHS,
    length: int = 4096,
    samples: int = 50,
    digits: int = 2,
    seed: int = 0,
) -> Result:
    """Accuracy by (N, R) of ``settings`` and by depth.

    Args:
        length: tokens of prompt and answer together, in the model's own tokenizer.
        samples: prompts in each cell (the paper has 50).

    ``metrics``: ``n{N}_r{R}_depth{percent}`` and their mean ``n{N}_r{R}``; ``partial_n{N}_r{R}`` counts examples with
    at least one number right; ``chance`` is the score of guessing.
    """
    require_positive(length=length, samples=samples)
    low, high = number_range(digits)
    metrics = {"chance": 1.0 / (high - low)}
    rows: list[dict] = []
    for needles, queries in settings:
        cell_examples = []
        for depth in depths:
            for sample in range(samples):
                rng = evaluation_rng(seed, "needle", needles, queries, round(100 * depth), sample)
                example = make_needle_example(
                    rng, filler, lm.tokenizer, length=length - answer_tokens(lm.tokenizer, queries, digits),
                    needles=needles, queries=queries, depth=depth, digits=digits,
                )  # fmt: skip
                cell_examples.append(example)
        texts = lm.generate([e.prompt for e in cell_examples], answer_tokens(lm.tokenizer, queries, digits))
        for index, (example, text) in enumerate(zip(cell_examples, texts, strict=True)):
            found = parse_numbers(text, queries)
            right = sum(a == b for a, b in zip(found, example.answers, strict=True))
            rows.append({
                "needles": needles, "queries": queries, "depth": depths[index // samples], "prompt": example.prompt,
                "expected": example.expected_completion, "got": text, "score": right / queries,
            })  # fmt: skip
        _summarise(metrics, rows[-len(cell_examples) :], needles, queries, depths)
    details = {"length": length, "samples": samples, "digits": digits, "seed": seed}
    return Result("needle", lm.name, metrics, rows, provenance(**details))


def check_needle_fits(filler: Filler, tokenizer, cells: Sequence[tuple[int, int]], length: int, digits: int):
    """Raise ValueError if a prompt of one of the cells (N, R) cannot be made in ``length`` tokens."""
    for needles, queries in cells:
        room = length - answer_tokens(tokenizer, queries, digits)
        rng = evaluation_rng(0, "fit", needles, queries)
        try:
            make_needle_example(
                rng, filler, tokenizer, length=room, needles=needles, queries=queries, depth=0.5, digits=digits
            )
        except ValueError as error:
            raise ValueError(f"needle evaluation with N={needles}, R={queries}, {length} tokens: {error}") from error


def _summarise(metrics: dict, rows: list[dict], needles: int, queries: int, depths: Sequence[float]):
    cell = f"n{needles}_r{queries}"
    for depth in depths:
        scores = [row["score"] for row in rows if row["depth"] == depth]
        metrics[f"{cell}_depth{round(100 * depth)}"] = float(np.mean(scores))
    metrics[cell] = float(np.mean([row["score"] for row in rows]))
    metrics[f"partial_{cell}"] = float(np.mean([row["score"] > 0 for row in rows]))


def answer_tokens(tokenizer, queries: int, digits: int) -> int:
    """Room for the longest answer: the longest city name, a number and punctuation for each one asked for."""
    longest = completion(["Rio de Janeiro"] * queries, ["9" * digits] * queries)
    return len(tokenizer(longest, add_special_tokens=False)["input_ids"]) + 2
