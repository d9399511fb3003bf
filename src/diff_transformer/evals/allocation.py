"""How much attention goes to the answer, and how much to the noise (section 3.4, Table 3, Figure 1).

    filler  [The magic number of Rome is 17.]  filler, other needles  Question: ... Answer: Rome is|
    noise            answer span                     noise                 neither           from here

The attention of the last position of a retrieval prompt is divided by the sum of its magnitudes, head by head. This
makes maps comparable whose rows sum to 1 (softmax) and to 1 - lambda (differential, with negative entries). The result
is the share on the answer's sentence and the share on the noise: the rest of the context without the question and
without the first token, which softmax attention uses as a sink.

Table 3 does not say whether heads are averaged before or after magnitudes are taken; here each head has its shares.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from diff_transformer.data.filler import Filler
from diff_transformer.data.needles import DEPTHS, make_needle_example
from diff_transformer.data.seeding import evaluation_rng
from diff_transformer.data.tokenizer import encode, token_spans
from diff_transformer.evals.lm import CausalLM, check_length, haystack, text_details
from diff_transformer.evals.samples import ALL, Samples
from diff_transformer.evals.types import Result
from diff_transformer.settings import Depths, PositiveInt, Seed

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
    depths: Depths = DEPTHS
    # Tokens of a prompt, in the model's own tokenizer.
    length: PositiveInt = 4096
    # Prompts for each depth.
    samples: PositiveInt = 50
    # Needles in the text; the question asks for one.
    needles: PositiveInt = 1
    # Digits of a magic number.
    digits: PositiveInt = 2
    # Seed of cities, numbers, positions and text.
    seed: Seed = 0


QUICK = {"length": 124, "samples": 4, "digits": 1}


def amount(settings: Settings, config: Any) -> tuple[int, int]:
    """Prompts, and their tokens in all, on any model."""
    prompts = len(settings.depths) * settings.samples
    return prompts, prompts * settings.length


def run(lm: CausalLM, settings: Settings, samples: Samples) -> Result:
    """``diff-transformer eval allocation``."""
    filler, part = haystack(lm, settings, settings.length)
    result = evaluate_allocation(lm, filler, settings, samples)
    result.about.update(text_details(settings, part))
    return result


def evaluate_allocation(
    lm: CausalLM,
    filler: Filler,
    settings: Settings = Settings(),
    samples: Samples = ALL,
) -> Result:
    """A row for each prompt: ``depth``, and the shares ``answer`` and ``noise`` averaged over heads and layers. The
    table ``allocation_heads`` has the shares of every head of every layer, rounded to four places.

    ``settings`` without those of the text, which ``filler`` has.

    Raises:
        ValueError: for a length in which the needles do not fit, or that the model does not support.
    """
    check_length(lm, settings.length, "the prompt")
    prefix: list[int] = getattr(lm, "prefix", [])
    made: list[dict] = []
    for depth in settings.depths:

        def score(numbers: Sequence[int], depth: float = depth) -> list[dict]:
            return [_row(lm, filler, settings, prefix, depth, number) for number in numbers]

        made += samples.rows(f"depth {depth:.0%}", range(settings.samples), score)
    rows, heads = [], []
    for example, row in enumerate(made):
        for layer, parts in enumerate(row.pop("heads")):
            for head, (answer, noise) in enumerate(zip(*parts.round(decimals=4).tolist(), strict=True)):
                place = {"example": example, "layer": layer, "head": head}
                heads.append({"experiment": "allocation_heads", **place, "answer": answer, "noise": noise})
        rows.append({"example": example, **row})
    return Result("allocation", rows + heads)


def _row(lm: CausalLM, filler: Filler, settings: Settings, prefix: list[int], depth: float, sample: int) -> dict:
    example = make_needle_example(
        evaluation_rng(settings.seed, "allocation", settings.needles, round(100 * depth), sample), filler, lm.tokenizer,
        length=settings.length - len(prefix), needles=settings.needles, queries=1, depth=depth, digits=settings.digits,
    )  # fmt: skip
    asked = example.prompt.rindex("\nQuestion:")
    spans = token_spans(lm.tokenizer, example.prompt, [example.answer_spans[0], (asked, len(example.prompt))])
    ids = torch.tensor([prefix + encode(lm.tokenizer, example.prompt).tolist()])
    (start, end), (question, _) = (tuple(len(prefix) + place for place in span) for span in spans)
    place, first = torch.arange(ids.shape[1]), max(1, len(prefix))  # the first token counts as neither
    answer = (place >= max(first, start)) & (place < end)
    shares, heads = attention_shares(
        lm.last_row_attention(ids), answer, (place >= first) & (place < question) & ~answer
    )
    return {
        "depth": depth, "sample": sample, "tokens": ids.shape[1], "prompt": example.prompt,
        "expected": example.expected_completion, **shares, "score": shares["answer"], "heads": heads,
    }  # fmt: skip


def attention_shares(layers: list[Tensor], answer: Tensor, noise: Tensor) -> tuple[dict[str, float], list[Tensor]]:
    """The shares of attention, by magnitude, on the positions ``answer`` and ``noise``.

    Args:
        layers: attention of one position in each layer, ``[heads, T]``.
        answer, noise: bool ``[T]``.

    Returns:
        ``answer`` and ``noise``, averaged over heads and layers; and the shares of each layer's heads, fp64
        ``[2, heads]``.
    """
    sizes = [layer.double().abs() for layer in layers]
    sizes = [size / size.sum(-1, keepdim=True) for size in sizes]
    heads = [torch.stack([size[:, answer].sum(-1), size[:, noise].sum(-1)]) for size in sizes]
    return dict(zip(PARTS, torch.cat(heads, dim=1).mean(1).tolist(), strict=True)), heads
