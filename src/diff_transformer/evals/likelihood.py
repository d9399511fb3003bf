"""Exact log-probabilities of token sequences. Each token is read once, where the model can read a text in parts.

    contexts        shared tokens | rest of context 0 | its continuations
                                  | rest of context 1 | its continuations
                    read once       read once           scored in batches over copies of the context's cache

Only contexts of equal length share a batch, and continuations are padded on the right, so padding never precedes a
scored token. Every causal model therefore gives the same result as for the whole sequence alone, whatever its
positions, window or mask. Models without ``CausalLM.in_parts`` read every sequence whole.
"""

import copy
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from diff_transformer.errors import UserError
from diff_transformer.evals.lm import CausalLM, check_length, extend, rows_at_once

CHUNK = 1024  # tokens of a context per forward pass


@dataclass(frozen=True)
class Prefix:
    """A sequence that a model has read.

    Attributes:
        ids: its tokens.
        cache: the model's cache after them, batch size 1. Nothing modifies it.
        logits: of the next token, fp32 ``[V]``.
    """

    ids: tuple[int, ...]
    cache: Any
    logits: Tensor


@torch.inference_mode()
def read_prefix(lm: CausalLM, ids: Sequence[int]) -> Prefix | None:
    """Read ``ids`` in chunks, so that only the cache grows with the length.

    None for a model that cannot read a text in parts.

    Raises:
        ValueError: for no tokens, or more than the model supports.
    """
    check_length(lm, len(ids), "the context")
    if not lm.in_parts:
        return None
    logits, cache = _read(lm, torch.tensor([list(ids)]), None)
    return Prefix(tuple(ids), cache, logits[0])


@torch.inference_mode()
def continuation_logprobs(
    lm: CausalLM,
    contexts: Sequence[Sequence[int]],
    continuations: Sequence[Sequence[Sequence[int]]],
    *,
    prefix: Prefix | None = None,
    batch_size: int | None = None,
) -> list[list[float]]:
    """Log-probability (nats) of each continuation of each context: the sum over its tokens.

    Args:
        contexts: token ids, at least one each. Their common prefix is read once.
        continuations: for each context, any number of token sequences. An empty one has log-probability 0.
        prefix: from ``read_prefix``; used if every context begins with it.
        batch_size: sequences per forward pass, each with a copy of its cache; if None, ``lm.batch_size`` or what fits
            in 131,072 tokens.

    Raises:
        UserError: for an empty context, or a sequence longer than the model supports.
    """
    if not contexts:
        return []
    if not all(len(context) for context in contexts):
        raise UserError("a context needs at least one token; put the tokenizer's bos_token_id in front of it")
    longest = max(
        len(context) + max((len(tokens) - 1 for tokens in choices), default=0)
        for context, choices in zip(contexts, continuations, strict=True)
    )
    check_length(lm, longest, "the longest context with its continuation")
    batch_size = batch_size or rows_at_once(lm, longest)
    if not lm.in_parts:
        return _whole(lm, contexts, continuations, batch_size)
    shared = common_prefix(contexts)
    if prefix is None and len(contexts) > 1 and shared:
        prefix = read_prefix(lm, contexts[0][:shared])
    elif prefix is not None and (shared < len(prefix.ids) or tuple(contexts[0][: len(prefix.ids)]) != prefix.ids):
        prefix = None
    start = len(prefix.ids) if prefix else 0
    by_length = defaultdict(list)
    for index, context in enumerate(contexts):
        by_length[len(context)].append(index)
    logprobs = [[0.0] * len(tokens) for tokens in continuations]
    for group in by_length.values():
        for first in range(0, len(group), batch_size):
            part = group[first : first + batch_size]
            logits, cache = _rest(lm, [contexts[index][start:] for index in part], prefix)
            _score(lm, part, logits, cache, continuations, batch_size, logprobs)
    return logprobs


@torch.inference_mode()
def position_losses(lm: CausalLM, ids: Sequence[int]) -> Tensor:
    """Negative log-likelihood in nats of ``ids[1:]``, each given all tokens before it: fp32 ``[T - 1]``, on the CPU.

    The text is read in chunks over one cache. Memory is O(T) for the cache, plus the logits of one chunk. A model that
    cannot read a text in parts reads it whole.

    Raises:
        UserError: for more tokens than the model supports.
    """
    check_length(lm, len(ids) - 1, "the text")
    tokens = torch.tensor([list(ids)], device=lm.device)
    if not lm.in_parts:
        out = lm.model(input_ids=tokens[:, :-1], use_cache=False)
        return F.cross_entropy(out.logits[0].float(), tokens[0, 1:], reduction="none").cpu()
    losses, cache = [], None
    for start in range(0, tokens.shape[1] - 1, CHUNK):
        seen = tokens[:, start : min(start + CHUNK, tokens.shape[1] - 1)]
        out, cache = extend(lm.model, cache, seen)
        labels = tokens[0, start + 1 : start + 1 + seen.shape[1]]
        losses.append(F.cross_entropy(out.logits[0].float(), labels, reduction="none").cpu())
    return torch.cat(losses)


def common_prefix(sequences: Sequence[Sequence[int]]) -> int:
    """Length of the longest common prefix of ``sequences`` (at least one)."""
    lists = [list(sequence) for sequence in sequences]
    first, last = min(lists), max(lists)  # all others lie between them in lexicographic order
    length = min(len(first), len(last))
    return next((i for i in range(length) if first[i] != last[i]), length)


def _whole(lm: CausalLM, contexts: Sequence, continuations: Sequence, batch_size: int) -> list[list[float]]:
    """``continuation_logprobs`` with one pass over every sequence, padded on the right."""
    totals = [[0.0] * len(choices) for choices in continuations]
    places = [(i, j) for i, choices in enumerate(continuations) for j, tokens in enumerate(choices) if len(tokens)]
    places.sort(key=lambda place: len(contexts[place[0]]) + len(continuations[place[0]][place[1]]))
    for start in range(0, len(places), batch_size):
        batch = places[start : start + batch_size]
        sequences = [torch.tensor([*contexts[i], *continuations[i][j]]) for i, j in batch]
        losses = lm.token_losses(torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)).double()
        for (i, j), sequence, row in zip(batch, sequences, losses, strict=True):
            totals[i][j] = -row[len(contexts[i]) - 1 : len(sequence) - 1].sum().item()
    return totals


def _rest(lm: CausalLM, rests: list[Sequence[int]], prefix: Prefix | None) -> tuple[Tensor, Any]:
    """Logits ``[B, V]`` after ``prefix`` and each of ``rests`` (of one length), and the cache."""
    cache = None
    if prefix is not None:
        cache = _rows(prefix.cache, 1, [0] * len(rests), lm.device)
        if not rests[0]:
            return prefix.logits.expand(len(rests), -1), cache
    return _read(lm, torch.tensor([list(rest) for rest in rests]), cache)


def _read(lm: CausalLM, ids: Tensor, cache: Any) -> tuple[Tensor, Any]:
    """Logits ``[B, V]`` after ``ids [B, T]`` and the cache, which is ``cache`` itself, longer."""
    logits = torch.empty(0)
    for part in ids.to(lm.device).split(CHUNK, dim=1):
        out, cache = extend(lm.model, cache, part, logits_to_keep=1)
        logits = out.logits[:, -1].float()
    return logits, cache


def _score(
    lm: CausalLM, part: list[int], logits: Tensor, cache: Any, continuations: Sequence, batch_size: int, found: list
) -> None:
    """Fill in ``found`` for the contexts ``part``, whose last logits are ``logits [B, V]``."""
    first = logits.log_softmax(-1).cpu()
    longer = []
    for row, index in enumerate(part):
        for choice, tokens in enumerate(continuations[index]):
            if len(tokens):
                found[index][choice] = first[row, tokens[0]].item()
            if len(tokens) > 1:
                longer.append((len(tokens), row, choice))
    longer.sort()
    for start in range(0, len(longer), batch_size):
        batch = longer[start : start + batch_size]
        sequences = [torch.tensor(list(continuations[part[row]][choice])) for _, row, choice in batch]
        tokens = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True).to(lm.device)  # [b, longest]
        copied = _rows(cache, len(part), [row for _, row, _ in batch], lm.device)
        out = extend(lm.model, copied, tokens[:, :-1])[0].logits.float()
        logprobs = out.gather(-1, tokens[:, 1:, None])[..., 0] - out.logsumexp(-1)  # [b, longest - 1]
        for (length, row, choice), values in zip(batch, logprobs.double().cpu(), strict=True):
            found[part[row]][choice] += values[: length - 1].sum().item()


def _rows(cache: Any, entries: int, rows: list[int], device: torch.device) -> Any:
    """A new cache with the batch entries ``rows`` of ``cache``, which has ``entries`` of them and stays unchanged.

    It is the cache of a model with ``in_parts``: an update of its layers allocates new tensors and leaves the old ones.
    """
    copied = copy.copy(cache)
    copied.layers = [copy.copy(layer) for layer in cache.layers]
    if rows != list(range(entries)):
        copied.reorder_cache(torch.tensor(rows, device=device))
    return copied
