"""Quantised attention logits (section 3.7, Figure 8): accuracy on HellaSwag and loss, at 16, 8, 6 and 4 bits.

    step = max |logits| / (2^(bits-1) - 1)          logits -> step * round(logits / step), before the softmax

Quantisation is dynamic: the maximum is that of the current logits. The paper does not say over which of them;
``granularity`` does here:

    "tensor"   all heads and both maps of a layer, for one example: one large logit coarsens the grid of all others
    "head"     all queries of one head's map, for one example
    "row"      the keys that one query may attend to: causal, and independent of how many tokens a call computes

Both maps of differential attention are quantised. The softmax and everything after it are unchanged.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from diff_transformer.checks import require_positive
from diff_transformer.data.tasks.continuations import load_continuations
from diff_transformer.data.tasks.types import MultipleChoiceItem
from diff_transformer.data.tokenizer import encode_all
from diff_transformer.errors import UserError
from diff_transformer.evals.attention_tap import AttentionCall, Change, changed_logits
from diff_transformer.evals.likelihood import common_prefix, continuation_logprobs
from diff_transformer.evals.lm import (
    CausalLM,
    check_length,
    first_of_text,
    rows_at_once,
    text_details,
    text_rows,
)
from diff_transformer.evals.samples import Samples
from diff_transformer.evals.types import Result

BITS = (16, 8, 6, 4)
GRANULARITIES = ("tensor", "head", "row")
_CHOICE = {"experiment": "quantization_choice"}


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
    samples: int = 1000
    # Rows of text for the loss; 0 leaves the loss out.
    rows: int = 64
    # Tokens of such a row, in the model's own tokenizer.
    length: int = 1024
    # Bits of a logit, 2 to 16.
    bits: tuple = BITS
    # The logits that share a scale: "tensor", "head" or "row".
    granularity: str = "tensor"
    # Seed of the choice of rows, and of the order of tasks from "python" or the hub.
    seed: int = 0


QUICK = {"samples": 24, "rows": 8, "length": 128}


def run(lm: CausalLM, settings: Settings, samples: Samples) -> Result:
    """``diff-transformer eval quantization``."""
    require_positive(samples=settings.samples)
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
    samples: Samples | None = None,
) -> Result:
    """Zero-shot accuracy and loss with attention logits of each number of bits.

    Args:
        tasks: the answer is the ending with the highest log-probability: in total, and per character.
        ids: rows of text ``[rows, T]`` for the loss, or None.
        settings: ``bits`` and ``granularity``. Granularities "head" and "tensor" depend on the tokens that one call
            computes, so the context is read in one pass and each ending in another.

    Returns:
        For each number of bits, a row for each row of text with its mean ``loss``; in the table ``quantization_choice``
        a row for each task: ``score`` by the log-probability per character, ``plain`` by the total, ``cut``, the tokens
        that the context lost at its beginning to fit the model, or ``skipped``, why an ending is too long for it.

    Raises:
        ValueError: for bits outside 2 to 16, an unknown granularity, a row of text longer than the model supports, or
            if every task has an ending too long for the model.
    """
    bits, granularity = settings.bits, settings.granularity
    _check(bits, granularity)
    if ids is not None:
        check_length(lm, ids.shape[1], "a row")
    samples, rows = samples or Samples(), []
    for each in bits:

        def quantised(each: int = each) -> AbstractContextManager:
            return changed_logits(lm.model, absmax(each, granularity))

        alone = granularity != "row"
        score = _choice_scorer(lm, quantised, each, alone)
        numbered = list(enumerate(tasks))
        batch_size = 1 if alone else max(1, lm.batch_size // 4)
        rows += samples.rows(f"choices_{each}bit", numbered, score, batch_size=batch_size)
        if ids is not None:
            score = _loss_scorer(lm, ids, quantised, each)
            part, size = f"loss_{each}bit", rows_at_once(lm, ids.shape[1])
            rows += samples.rows(part, range(len(ids)), score, batch_size=size)
    if tasks and not any("cut" in row for row in rows):
        raise UserError(next(row["skipped"] for row in rows if "skipped" in row))
    chance = sum(1 / len(task.choices) for task in tasks) / len(tasks) if tasks else None
    return Result("quantization", rows, {"bits": list(bits), "tasks": len(tasks), "chance": chance})


def quantise(values: Tensor, largest: Tensor, bits: int) -> Tensor:
    """``values`` rounded to ``2^bits - 1`` levels between ``-largest`` and ``largest`` (which broadcasts); unchanged
    where ``largest`` is 0."""
    step = largest / (2 ** (bits - 1) - 1)
    return torch.where(step > 0, (values / step).round_().mul_(step), values)


def absmax(bits: int, granularity: str) -> Callable[[AttentionCall], Change]:
    """A plan for ``changed_logits``: dynamic absmax quantisation.

    Raises:
        ValueError: for bits outside 2 to 16, or an unknown granularity.
    """
    _check((bits,), granularity)

    def plan(call: AttentionCall) -> Change:
        whole = None if granularity == "row" else _largest(call, granularity)

        def change(logits: tuple[Tensor, ...], allowed: Tensor) -> tuple[Tensor, ...]:
            scales = [_peaks(x, allowed, (-1,)) for x in logits] if whole is None else whole
            return tuple(quantise(x, scale, bits) for x, scale in zip(logits, scales, strict=True))

        return change

    return plan


def _largest(call: AttentionCall, granularity: str) -> list[Tensor]:
    """The largest magnitude of each map, ``[B, H, 1, 1]`` or, of all heads and maps, ``[B, 1, 1, 1]``."""
    found: list[Tensor] = []
    for rows in call.blocks():
        keys = call.reach(rows)
        allowed = call.allowed(rows)[..., keys]
        peaks = [_peaks(x, allowed, (-2, -1)) for x in call.logits(rows, keys)]
        found = [torch.maximum(a, b) for a, b in zip(found, peaks, strict=True)] if found else peaks
    if granularity == "head":
        return found
    largest = torch.cat(found, dim=1).amax(1, keepdim=True)
    return [largest] * len(found)


def _peaks(logits: Tensor, allowed: Tensor, dims: tuple[int, ...]) -> Tensor:
    return logits.abs().masked_fill_(~allowed, 0.0).amax(dims, keepdim=True)


def _choice_scorer(
    lm: CausalLM, quantised: Callable[[], AbstractContextManager], bits: int, alone: bool
) -> Callable[[list[tuple[int, MultipleChoiceItem]]], list[dict]]:
    def score(numbered: list[tuple[int, MultipleChoiceItem]]) -> list[dict]:
        rows: list[dict] = []
        split = {}
        for place, (number, task) in enumerate(numbered):
            rows.append({**_CHOICE, "example": number, "bits": bits, "prompt": task.question, "score": None})
            try:
                split[place] = split_task(lm, task)
            except TooLong as error:
                rows[place]["skipped"] = f"task {number}: {error}"
        contexts, endings = [context for context, _, _ in split.values()], [tokens for _, tokens, _ in split.values()]
        with quantised():
            logprobs = continuation_logprobs(lm, contexts, endings, batch_size=1 if alone else None)
        for (place, (_, _, cut)), found in zip(split.items(), logprobs, strict=True):
            rows[place] |= {**_row(numbered[place][1], found), "cut": cut}
        return rows

    return score


class TooLong(UserError):
    """A text that has more tokens than the model supports."""


def split_task(lm: CausalLM, task: MultipleChoiceItem) -> tuple[list[int], list[list[int]], int]:
    """(context, the rest of each choice, tokens cut) in tokens.

    Each text is tokenised whole. The context is the common prefix of these texts and of the context alone, so the
    result does not depend on how a tokenizer joins words. If the model has too few positions, the context loses its
    beginning.

    Raises:
        TooLong: if an ending alone is too long for the model.
        ValueError: for an item without a token before its endings.
    """
    texts = [task.question, *(f"{task.question} {choice}" for choice in task.choices)]
    context, *wholes = [lm.prefix + ids.tolist() for ids in encode_all(lm.tokenizer, texts)]
    shared = min(common_prefix([context, *wholes]), min(map(len, wholes)) - 1)
    if not shared:
        raise UserError(f"the context {task.question[:60]!r} has no token before its endings; give a longer context")
    context, endings = context[:shared], [whole[shared:] for whole in wholes]
    start, room = len(lm.prefix), len(context)
    if lm.positions is not None:
        room = lm.positions - max(map(len, endings)) + 1 - start
    if room < 1:
        longest = max(map(len, endings))
        raise TooLong(f"a choice has {longest} tokens, more than the {lm.positions} positions of {lm.name}")
    cut = max(0, len(context) - start - room)
    return context[:start] + context[start + cut :], endings, cut


def _row(task: MultipleChoiceItem, logprobs: list[float]) -> dict:
    normalised = [value / len(choice) for value, choice in zip(logprobs, task.choices, strict=True)]
    got, plain = int(np.argmax(normalised)), int(np.argmax(logprobs))
    return {
        "expected": task.choices[task.answer], "got": task.choices[got],
        "score": float(got == task.answer), "plain": float(plain == task.answer), "logprobs": logprobs,
    }  # fmt: skip


def _loss_scorer(
    lm: CausalLM, ids: Tensor, quantised: Callable[[], AbstractContextManager], bits: int
) -> Callable[[list[int]], list[dict]]:
    def score(numbers: list[int]) -> list[dict]:
        with quantised():
            losses = lm.token_losses(ids[numbers])[:, first_of_text(lm, ids) - 1 :].double().mean(1)
        return [{"example": n, "bits": bits, "loss": loss} for n, loss in zip(numbers, losses.tolist(), strict=True)]

    return score


def _check(bits: Sequence[int], granularity: str) -> None:
    if granularity not in GRANULARITIES:
        raise UserError(f"granularity is {granularity!r}; accepted: {', '.join(map(repr, GRANULARITIES))}")
    wrong = [each for each in bits if not isinstance(each, int) or not 2 <= each <= 16]
    if wrong or not bits:
        raise UserError(f"bits are {list(bits)}; give whole numbers from 2 to 16")
