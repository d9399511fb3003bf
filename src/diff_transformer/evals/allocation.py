"""How much attention goes to the answer, and how much to the noise (section 3.4, Table 3, Figure 1).

    filler  [The magic number of Rome is 17.]  filler, other needles  Question: ... Answer: Rome is|
    noise            answer span                     noise                 neither           from here

The attention of the last position of a retrieval prompt is divided by the sum of its magnitudes, head by head. This
makes maps comparable whose rows sum to 1 (softmax) and to 1 - lambda (differential, with negative entries). The result
is the share on the answer's sentence and the share on the noise: the rest of the context without the question and
without the first token, which softmax attention uses as a sink.

Table 3 does not say whether heads are averaged before or after magnitudes are taken. The main numbers take each head's
shares. Those of the map averaged over a layer's heads stand beside them: there, weights of different sign cancel, so
the noise is smaller where heads disagree about it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from diff_transformer.checks import require_positive
from diff_transformer.data.filler import Filler
from diff_transformer.data.needles import DEPTHS, make_needle_example
from diff_transformer.data.seeding import evaluation_rng
from diff_transformer.data.tokenizer import encode, token_spans
from diff_transformer.evals.lm import LanguageModel, check_length, haystack, text_details
from diff_transformer.evals.samples import ALL, Samples
from diff_transformer.evals.types import Result

PARTS = ("answer", "noise")


@dataclass(frozen=True)
class Settings:
    """Settings of the experiment; the defaults are those of the paper's Table 3."""

    # Text around the needles: "python", a text file, JSON lines, parquet or a folder.
    corpus: str = "python"
    # Text to use: "held-out" (of a folder, a tenth), "all", or "auto": held-out for models of this package; for other
    # models held-out if that suffices, else all
    split: str = "auto"
    # Position of the needle asked for: 0 is the start of the text, 1 its end.
    depths: tuple[float, ...] = DEPTHS
    # Tokens of a prompt, in the model's own tokenizer.
    length: int = 4096
    # Prompts for each depth.
    samples: int = 50
    # Needles in the text; the question asks for one.
    needles: int = 1
    # Digits of a magic number.
    digits: int = 2
    # Seed of cities, numbers, positions and text.
    seed: int = 0


QUICK = {"length": 124, "samples": 4, "digits": 1}


def amount(settings: Settings) -> tuple[int, int]:
    """Prompts, and their tokens in all."""
    prompts = len(settings.depths) * settings.samples
    return prompts, prompts * settings.length


def run(lm: LanguageModel, settings: Settings, samples: Samples) -> Result:
    """``diff-transformer eval allocation``."""
    check_length(lm, settings.length, "the prompt")
    filler, part = haystack(lm, settings, settings.length)
    result = evaluate_allocation(lm, filler, settings, samples)
    result.about.update(text_details(settings, part))
    return result


def evaluate_allocation(
    lm: LanguageModel,
    filler: Filler,
    settings: Settings = Settings(),
    samples: Samples = ALL,
) -> Result:
    """A row for each prompt: ``depth``, the shares ``answer`` and ``noise`` averaged over heads and layers,
    ``answer_mean_map`` and ``noise_mean_map`` of the map averaged over the heads of a layer, and ``best_head_answer``,
    the largest share that a single head gives to the answer. The table ``allocation_heads`` has the shares of every
    head of every layer, rounded to four places.

    ``settings`` without those of the text, which ``filler`` has; ``samples``: progress, limit and resumption.

    Raises:
        ValueError: for a length in which the needles do not fit, or that the model does not support.
    """
    require_positive(length=settings.length, per_cell=settings.samples, needles=settings.needles)
    check_length(lm, settings.length, "the prompt")
    samples, made = samples or Samples(), []
    same = {name: getattr(settings, name) for name in ("length", "needles", "digits")}
    for depth in settings.depths:
        score = _scorer(lm, filler, {**same, "queries": 1, "depth": depth}, settings.seed)
        made += samples.rows(f"depth{round(100 * depth)}", range(settings.samples), score)
    rows, heads = [], []
    for example, row in enumerate(made):
        by_layer = [row.pop(f"{part}_heads") for part in PARTS]
        rows.append({"example": example, **row})
        for layer, parts in enumerate(zip(*by_layer, strict=True)):
            for head, (answer, noise) in enumerate(zip(*parts, strict=True)):
                place = {"example": example, "layer": layer, "head": head}
                heads.append({"experiment": "allocation_heads", **place, "answer": answer, "noise": noise})
    return Result("allocation", rows + heads)


def _scorer(lm: LanguageModel, filler: Filler, options: dict, seed: int) -> Callable[[Sequence[int]], list[dict]]:
    prefix = list(getattr(lm, "prefix", ()))
    options = {**options, "length": options["length"] - len(prefix)}

    def score(numbers: Sequence[int]) -> list[dict]:
        return [one(number) for number in numbers]

    def one(number: int) -> dict:
        rng = evaluation_rng(seed, "allocation", options["needles"], round(100 * options["depth"]), number)
        example = make_needle_example(rng, filler, lm.tokenizer, **options)
        asked = example.prompt.rindex("\nQuestion:")
        spans = [example.answer_spans[0], (asked, len(example.prompt))]
        (start, end), (question, _) = token_spans(lm.tokenizer, example.prompt, spans)
        ids = torch.tensor([prefix + encode(lm.tokenizer, example.prompt).tolist()])
        layers = lm.last_row_attention(ids)
        places = (start + len(prefix), end + len(prefix), question + len(prefix))
        first = max(1, len(prefix))
        shares = [shares_of(row, *places, first) for row in layers]  # for each layer (answer, noise), each [heads]
        of_means = [shares_of(row.mean(0, keepdim=True), *places, first) for row in layers]
        by_part = {part: [layer[i] for layer in shares] for i, part in enumerate(PARTS)}
        row = {
            "depth": options["depth"], "sample": number, "tokens": ids.shape[1], "prompt": example.prompt,
            "expected": example.expected_completion,
        }  # fmt: skip
        for part, heads in by_part.items():
            row[part] = torch.cat(heads).mean().item()
            row[f"{part}_heads"] = [[round(share, 4) for share in layer.tolist()] for layer in heads]
            row[f"{part}_mean_map"] = torch.cat([layer[PARTS.index(part)] for layer in of_means]).mean().item()
        row["best_head_answer"] = torch.cat(by_part["answer"]).max().item()
        row["score"] = row["answer"]
        return row

    return score


def shares_of(
    row: torch.Tensor, start: int, end: int, question: int, first: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """The shares of ``row [heads, T]`` on the answer's tokens ``start`` to ``end``, and on the noise: all other tokens
    before ``question``. The ``first`` tokens count as neither: those that the tokenizer puts in front, or the first
    one, even if it belongs to the answer (at depth 0). Shares are of the sum of magnitudes. Each is ``[heads]``, fp64.
    """
    row = row.double().abs()
    row = row / row.sum(-1, keepdim=True)
    answer = row[:, max(first, start) : end].sum(-1)
    return answer, row[:, first:question].sum(-1) - answer
