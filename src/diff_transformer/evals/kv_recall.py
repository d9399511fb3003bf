"""Key-value recall in noise: accuracy, accuracy at longer rows, and where the question attends.

    n k1 v1 n n k2 v2 n  |  k2 -> v2 ?   k1 -> v1 ?

Rows and tokens are those of ``data/kv_recall_task.py``; evaluation rows differ from every training row. In longer rows
the noise grows, and pairs and questions stay the same. Attention is that of the first question's position, where the
model has to find the value of that key.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace

import numpy as np
import torch
from torch import Tensor

from diff_transformer.checks import require_positive
from diff_transformer.data.kv_recall_task import RecallRows, RecallTask, RecallVocabulary, make_recall_batch
from diff_transformer.data.seeding import evaluation_rng
from diff_transformer.evals.lm import LanguageModel, check_length, settings_of_lm
from diff_transformer.evals.provenance import provenance
from diff_transformer.evals.types import Result

ATTENDED = 32  # rows whose attention is read
LONGER = (2, 4)  # multiples of a row's length


def evaluate_recall(
    lm: LanguageModel,
    vocabulary: RecallVocabulary,
    task: RecallTask,
    *,
    rows: int = 256,
    longer: Sequence[int] = LONGER,
    seed: int = 0,
) -> Result:
    """Accuracy over all questions of ``rows`` rows of ``task``, and the attention on the answer and on the noise.

    Args:
        longer: multiples of the length, each measured on as many rows.

    ``metrics``: ``accuracy``, ``accuracy_2x``, ...; ``chance``, of a guess among the values in the context;
    ``first_question``, the accuracy on the first question of a row; ``answer`` and ``noise``, the shares of a head's
    attention, by magnitude, on the value asked for and on the noise tokens, averaged over heads, layers and rows;
    ``best_head_answer``; and ``answer_mean_map``, ``noise_mean_map``, the shares of the map averaged over the heads of
    a layer before magnitudes are taken. ``rows``: hits by length.

    Raises:
        ValueError: for a length that the model does not support, or a task that does not fit the vocabulary.
    """
    require_positive(rows=rows)
    metrics, kept = {"chance": 1 / task.pairs}, []
    for times in (1, *longer):
        scaled = replace(task, length=times * task.length)
        check_length(lm, scaled.length, "a row")
        made = make_recall_batch(evaluation_rng(seed, "recall", times), vocabulary, scaled, rows)
        hits = _hits(lm, made)  # [rows, questions]
        longer_by = "" if times == 1 else f"_{times}x"
        metrics["accuracy" + longer_by] = float(hits.mean())
        kept.append({"length": scaled.length, "questions": hits.shape[1], "hits": hits.sum(1).tolist()})
        if times == 1:
            metrics["first_question"] = float(hits[:, 0].mean())
            metrics |= _attention(lm, made, vocabulary, task)
    details = {**asdict(task), "samples": rows, "seed": seed}
    return Result("recall", lm.name, metrics, kept, provenance(**details, **settings_of_lm(lm)))


def _hits(lm: LanguageModel, rows: RecallRows) -> np.ndarray:
    guesses = lm.predictions(torch.from_numpy(rows.ids)).numpy()
    right = np.take_along_axis(rows.ids, rows.answers, axis=1)
    return np.take_along_axis(guesses, rows.answers - 1, axis=1) == right


def _attention(lm: LanguageModel, rows: RecallRows, vocabulary: RecallVocabulary, task: RecallTask) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for ids, source in zip(rows.ids[:ATTENDED], rows.sources[:ATTENDED, 0], strict=True):
        noise = torch.from_numpy(_noise(ids[: task.context], vocabulary))
        layers = lm.last_row_attention(torch.from_numpy(ids[None, : task.context + 1]))
        heads = [_shares(layer, int(source), noise) for layer in layers]
        means = [_shares(layer.mean(0, keepdim=True), int(source), noise) for layer in layers]
        for name, shares in (("", heads), ("_mean_map", means)):
            for part, place in (("answer", 0), ("noise", 1)):
                found.setdefault(part + name, []).append(torch.cat([of[place] for of in shares]).mean().item())
        found.setdefault("best_head_answer", []).append(max(of[0].max().item() for of in heads))
    return {name: float(np.mean(values)) for name, values in found.items()}


def _noise(context: np.ndarray, vocabulary: RecallVocabulary) -> np.ndarray:
    """True if each token of the context belongs to no pair: a noise token, or a key that no value follows."""
    is_value = np.isin(context, vocabulary.values)
    return ~is_value & ~np.append(is_value[1:], False)


def _shares(row: Tensor, answer: int, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Shares of ``row [heads, T]`` by magnitude on the position ``answer`` and on the noise: each [heads].

    The first token, which softmax attention uses as a sink, is not noise.
    """
    size = row.double().abs()
    size = size / size.sum(-1, keepdim=True)
    noise = noise.clone()
    noise[0] = False
    return size[:, answer], size[:, : len(noise)][:, noise].sum(-1)
