"""Quantised attention logits (section 3.7, Figure 8): accuracy on HellaSwag and loss, at 16, 8, 6 and 4 bits.

    step = max |logits| / (2^(bits-1) - 1)          logits -> step * round(logits / step), before the softmax

Quantisation is dynamic: the maximum is that of the current logits. The paper does not say over which of them; here over
all heads and both maps of a layer, for one example, so that one large logit coarsens the grid of all others. It depends
on the tokens that one call computes: the context is read in one pass and each ending in another.

Both maps of differential attention are quantised. The softmax and everything after it are unchanged.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from diff_transformer.data.tasks.continuations import load_continuations
from diff_transformer.data.tasks.types import MultipleChoiceItem
from diff_transformer.evals.attention_call import AttentionCall, Change
from diff_transformer.evals.attention_tap import changed_logits
from diff_transformer.evals.likelihood import continuation_logprobs
from diff_transformer.evals.lm import CausalLM, check_length, first_of_text, rows_at_once, text_details, text_rows
from diff_transformer.evals.prompts import choice_tokens
from diff_transformer.evals.samples import ALL, Samples
from diff_transformer.evals.types import Result
from diff_transformer.settings import NonNegativeInt, PositiveInt, Seed

BITS = (16, 8, 6, 4)


@dataclass(frozen=True)
class Settings:
    """Settings of the experiment. For the paper's Figure 8, set data to "hub:Rowan/hellaswag" and samples to 10042."""

    # Multiple-choice continuations: "python", a file of HellaSwag, or "hub:NAME".
    data: str = "python"
    # Text for the loss: "python", a text file, JSON lines, parquet or a folder.
    corpus: str = "python"
    # Text to use: "held-out" (of a folder, a tenth), "all", or "auto": held-out for models of this package; for other
    # models held-out if that suffices, else all
    split: str = "auto"
    # Tasks; all if there are fewer.
    samples: PositiveInt = 1000
    # Rows of text for the loss; 0 leaves the loss out.
    rows: NonNegativeInt = 64
    # Tokens of such a row, in the model's own tokenizer.
    length: PositiveInt = 1024
    # Bits of a logit, 2 to 16.
    bits: Annotated[tuple[Annotated[int, Field(ge=2, le=16)], ...], Field(min_length=1)] = BITS
    # Seed of the choice of rows, and of the order of tasks from "python" or the hub.
    seed: Seed = 0


QUICK = {"samples": 24, "rows": 8, "length": 128}


def amount(settings: Settings, config: Any) -> tuple[int, None]:
    """Tasks, at most, and rows of text, each with every number of bits."""
    return len(settings.bits) * (settings.samples + settings.rows), None


def run(lm: CausalLM, settings: Settings, samples: Samples) -> Result:
    """``diff-transformer eval quantization``."""
    tasks = load_continuations(settings.data, seed=settings.seed)[: settings.samples]
    ids, part = None, "none"
    if settings.rows:
        ids, part = text_rows(lm, settings, settings.rows)
    result = evaluate_quantization(lm, tasks, ids, settings, samples)
    result.about.update(text_details(settings, part))
    return result


def evaluate_quantization(
    lm: CausalLM,
    tasks: Sequence[MultipleChoiceItem],
    ids: Tensor | None = None,
    settings: Settings = Settings(),
    samples: Samples = ALL,
) -> Result:
    """Zero-shot accuracy and loss with attention logits of each number of bits.

    Args:
        tasks: the answer is the ending with the highest log-probability: in total, and per character.
        ids: rows of text ``[rows, T]`` for the loss, or None.
        settings: ``bits``.

    Returns:
        For each number of bits, a row for each row of text with its mean ``loss``; in the table ``quantization_choice``
        a row for each task: ``score`` by the log-probability per character, ``plain`` by the total, and ``cut``, the
        tokens that the context lost at its beginning to fit the model.

    Raises:
        UserError: for a text longer than the model supports.
    """
    if ids is not None:
        check_length(lm, ids.shape[1], "a row")
    rows: list[dict] = []
    for bits in settings.bits:
        plan = absmax(bits)

        def choices(batch: Sequence[tuple[int, MultipleChoiceItem]], bits: int = bits, plan=plan) -> list[dict]:
            with changed_logits(lm.model, plan):
                return _choices(lm, batch, bits)

        def losses(numbers: Sequence[int], bits: int = bits, plan=plan) -> list[dict]:
            assert ids is not None
            with changed_logits(lm.model, plan):
                means = lm.token_losses(ids[list(numbers)])[:, first_of_text(lm, ids) - 1 :].double().mean(1).tolist()
            return [{"example": n, "bits": bits, "loss": mean} for n, mean in zip(numbers, means, strict=True)]

        rows += samples.rows(f"choices, {bits} bits", [*enumerate(tasks)], choices)
        if ids is not None:
            at_once = rows_at_once(lm, ids.shape[1])
            rows += samples.rows(f"loss, {bits} bits", range(len(ids)), losses, batch_size=at_once)
    chance = sum(1 / len(task.choices) for task in tasks) / len(tasks) if tasks else None
    return Result("quantization", rows, {"bits": list(settings.bits), "tasks": len(tasks), "chance": chance})


def quantise(values: Tensor, largest: Tensor, bits: int) -> Tensor:
    """``values`` rounded to ``2^bits - 1`` levels between ``-largest`` and ``largest`` (which broadcasts); unchanged
    where ``largest`` is 0."""
    step = largest / (2 ** (bits - 1) - 1)
    return torch.where(step > 0, (values / step).round_().mul_(step), values)


def absmax(bits: int) -> Callable[[AttentionCall], Change]:
    """A plan for ``changed_logits``: dynamic absmax quantisation."""

    def plan(call: AttentionCall) -> Change:
        largest = _largest(call)
        return lambda logits, allowed: tuple(quantise(x, largest, bits) for x in logits)

    return plan


def _largest(call: AttentionCall) -> Tensor:
    """The largest magnitude of all heads and maps, ``[B, 1, 1, 1]``."""
    peaks = []
    for rows in call.blocks():
        keys = call.reach(rows)
        hidden = ~call.allowed(rows)[..., keys]
        peaks += [x.abs().masked_fill_(hidden, 0.0).amax((1, 2, 3), keepdim=True) for x in call.logits(rows, keys)]
    return torch.stack(peaks).amax(0)


def _choices(lm: CausalLM, numbered: Sequence[tuple[int, MultipleChoiceItem]], bits: int) -> list[dict]:
    """A row for each task. A context too long for the model's positions loses its beginning."""
    contexts, endings, cuts, first = [], [], [], len(lm.prefix)
    for _, task in numbered:
        context, choices = choice_tokens(lm.tokenizer, task.question, [f" {choice}" for choice in task.choices])
        room = (lm.positions or len(context) + max(map(len, choices))) - max(map(len, choices)) + 1
        cuts.append(max(0, len(context) - max(room, first + 1)))
        contexts.append(context[:first] + context[first + cuts[-1] :])
        endings.append(choices)
    rows = []
    scored = continuation_logprobs(lm, contexts, endings, batch_size=1)
    for (number, task), logprobs, cut in zip(numbered, scored, cuts, strict=True):
        normalised = [value / max(1, len(choice)) for value, choice in zip(logprobs, task.choices, strict=True)]
        got, plain = int(np.argmax(normalised)), int(np.argmax(logprobs))
        rows.append({
            "experiment": "quantization_choice", "example": number, "bits": bits, "prompt": task.question,
            "score": float(got == task.answer), "expected": task.choices[task.answer], "got": task.choices[got],
            "plain": float(plain == task.answer), "logprobs": logprobs, "cut": cut,
        })  # fmt: skip
    return rows
