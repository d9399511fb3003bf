"""Key-value recall in noise: accuracy, accuracy at longer rows, and where the question attends.

    n k1 v1 n n k2 v2 n  |  k2 -> v2 ?   k1 -> v1 ?

Rows and tokens are those of ``data/kv_recall_task.py``; evaluation rows differ from every training row. In longer rows
the noise grows, and pairs and questions stay the same. Attention is that of the first question's position, where the
model has to find the value of that key.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from diff_transformer.data.kv_recall_task import (
    RecallRows,
    RecallTask,
    RecallVocabulary,
    make_recall_batch,
    recall_vocabulary,
)
from diff_transformer.data.seeding import evaluation_rng
from diff_transformer.evals.allocation import attention_shares
from diff_transformer.evals.lm import CausalLM, check_length, max_positions, rows_at_once
from diff_transformer.evals.samples import ALL, Samples
from diff_transformer.evals.types import Result
from diff_transformer.settings import NonNegativeInt, PositiveInt, Seed

ATTENDED = 32  # rows whose attention is read
LONGER = (2, 4)  # multiples of the length


@dataclass(frozen=True)
class Settings:
    """Rows of recall; those of a run that trained on it are in its ``data.recall``."""

    # Tokens of a row; longer ones have two and four times as many, if the model has as many positions.
    length: PositiveInt = 64
    # Key-value pairs of a row.
    pairs: PositiveInt = 4
    # Tokens that serve as keys, and as values; a quarter of the vocabulary, at most 256, by default.
    symbols: PositiveInt | None = None
    # Tokens that serve as noise; all others by default.
    noise_symbols: PositiveInt | None = None
    # Keys asked for, drawn with replacement; 0 asks for each once.
    questions: NonNegativeInt = 0
    # Share of the noise that looks like keys.
    distractors: float = 0.0
    # Rows of each length.
    samples: PositiveInt = 256
    # Seed of the rows.
    seed: Seed = 0


QUICK = {"samples": 32}


def amount(settings: Settings, config: Any) -> tuple[int, int]:
    """Rows of all lengths, and their tokens."""
    times = [1, *_longer(settings.length, getattr(config, "max_position_embeddings", None))]
    return len(times) * settings.samples, sum(times) * settings.length * settings.samples


def _longer(length: int, positions: int | None) -> list[int]:
    """The multiples of ``LONGER`` that a model with so many positions supports."""
    return [times for times in LONGER if times * length <= (positions or math.inf)]


def run(lm: CausalLM, settings: Settings, samples: Samples) -> Result:
    """Key-value recall with ``settings``, at the length and at longer ones."""
    vocabulary = recall_vocabulary(lm.tokenizer, settings.symbols, settings.noise_symbols)
    task = RecallTask(settings.length, settings.pairs, settings.questions, settings.distractors)
    task.check(vocabulary)
    longer = _longer(settings.length, max_positions(lm))
    return evaluate_recall(lm, vocabulary, task, samples, rows=settings.samples, longer=longer, seed=settings.seed)


def evaluate_recall(
    lm: CausalLM,
    vocabulary: RecallVocabulary,
    task: RecallTask,
    samples: Samples = ALL,
    *,
    rows: int = 256,
    longer: Sequence[int] = LONGER,
    seed: int = Settings.seed,
) -> Result:
    """Accuracy over all questions of ``rows`` rows of ``task``, and the attention on the answer and on the noise.

    Args:
        longer: multiples of the length, each measured on as many rows.

    Returns:
        For each length a row for each of ``rows``: ``hits`` of its ``questions``. The table ``recall_first`` is about
        the first question of the rows of the trained length: ``right``, 0 or 1; and of the first 32, whose attention is
        read, ``answer`` and ``noise``, the shares of a head's attention, by magnitude, on the value asked for and on
        the noise tokens, averaged over heads and layers.

    Raises:
        ValueError: for a length that the model does not support, or a task that does not fit the vocabulary.
    """
    rows_of_lengths: list[dict] = []
    for times in (1, *longer):
        scaled = replace(task, length=times * task.length)
        check_length(lm, scaled.length, "a row")
        batch = make_recall_batch(evaluation_rng(seed, "recall", times), vocabulary, scaled, rows)
        size = rows_at_once(lm, scaled.length)
        found = samples.rows(f"{scaled.length} tokens", range(rows), partial(_hits, lm, batch), batch_size=size)
        hits = np.stack([row["hits"] for row in found])  # [rows, questions]
        same = {"length": scaled.length, "questions": hits.shape[1]}
        rows_of_lengths += [{"example": place, **same, "hits": hit} for place, hit in enumerate(hits.sum(1).tolist())]
        if times == 1:
            attention = [*_attention(lm, batch, vocabulary, task), *({} for _ in range(ATTENDED, rows))]
            first = [
                {"experiment": "recall_first", "example": place, "right": float(right), **of}
                for place, (right, of) in enumerate(zip(hits[:, 0], attention, strict=True))
            ]
    return Result("recall", rows_of_lengths + first, {"chance": 1 / task.pairs})


def _hits(lm: CausalLM, rows: RecallRows, places: Sequence[int]) -> list[dict]:
    """Which questions of the rows at ``places`` the model answers right."""
    ids, answers = rows.ids[[*places]], rows.answers[[*places]]
    guesses = lm.predictions(torch.from_numpy(ids)).numpy()
    right = np.take_along_axis(guesses, answers - 1, axis=1) == np.take_along_axis(ids, answers, axis=1)
    return [{"hits": of_row} for of_row in right]


def _attention(
    lm: CausalLM, rows: RecallRows, vocabulary: RecallVocabulary, task: RecallTask
) -> Iterator[dict[str, float]]:
    for ids, source in zip(rows.ids[:ATTENDED], rows.sources[:ATTENDED, 0], strict=True):
        place = torch.arange(task.context + 1)
        noise = torch.from_numpy(np.append(_noise(ids[: task.context], vocabulary), False))
        layers = lm.last_row_attention(torch.from_numpy(ids[None, : task.context + 1]))
        # The first token, which softmax attention uses as a sink, is not noise.
        yield attention_shares(layers, place == int(source), noise & (place > 0))[0]


def _noise(context: np.ndarray, vocabulary: RecallVocabulary) -> np.ndarray:
    """True if each token of the context belongs to no pair: a noise token, or a key that no value follows."""
    is_value = np.isin(context, vocabulary.values)
    return ~is_value & ~np.append(is_value[1:], False)
