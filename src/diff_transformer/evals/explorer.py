"""Attention maps of one text, small enough to travel inside the report."""

import base64
from typing import Any

import numpy as np
import torch

from diff_transformer.data.filler import Filler
from diff_transformer.data.kv_recall_task import make_recall_batch
from diff_transformer.data.needles import make_needle_example
from diff_transformer.data.seeding import evaluation_rng
from diff_transformer.data.tokenizer import encode, token_spans
from diff_transformer.evals.attention_call import AttentionCall
from diff_transformer.evals.attention_tap import tapped_attention
from diff_transformer.evals.lm import CausalLM
from diff_transformer.train.config import RunConfig
from diff_transformer.train.training_data import recall_source

_LONGEST = 112  # tokens: the maps grow with the square
_WRITTEN = 6  # tokens that the model continues with


def explorer_entries(lm: CausalLM, filler: Filler | None, config: RunConfig) -> list[dict]:
    """``attention_entry`` of prompts with one needle and with two, one of which is asked for; without ``filler``, of a
    row of recall as in training. A prompt that is too long for the page in this tokenizer is left out."""
    if filler is None:
        return [_recall_entry(lm, config)]
    options: dict[str, Any] = {"length": min(_LONGEST, config.data.length - 8), "digits": config.data.needles.digits}
    entries = []
    for needles, title in ((1, "One needle"), (2, "Two needles, one asked for")):
        rng = evaluation_rng(config.evaluation.seed, "explorer")
        try:
            example = make_needle_example(rng, filler, lm.tokenizer, needles=needles, queries=1, depth=0.25, **options)
        except ValueError:
            continue
        (span,) = token_spans(lm.tokenizer, example.prompt, example.answer_spans)
        ids = encode(lm.tokenizer, example.prompt)
        entries.append(attention_entry(lm, ids, title=title, answer=example.expected_completion, answer_span=span))
    return entries


def _recall_entry(lm: CausalLM, config: RunConfig) -> dict:
    """A row of recall as in training, up to the first question. Its tokens are shown as k1, v1, and noise as a dot."""
    source = recall_source(config, lm.tokenizer)
    rng = evaluation_rng(config.evaluation.seed, "explorer", "recall")
    (ids,), (answers,), (sources,) = make_recall_batch(rng, source.vocabulary, source.task, 1)
    place, asked = int(sources[0]), int(answers[0])
    values = [i for i in ids[:asked].tolist() if i in set(source.vocabulary.values)]
    named = {value: f"v{n}" for n, value in enumerate(values, 1)}
    named |= {int(ids[ids.tolist().index(value) - 1]): f"k{n}" for n, value in enumerate(values, 1)}
    title, answer = "Key-value recall in noise", named[int(ids[asked])]
    return attention_entry(lm, ids[:asked], title=title, answer=answer, answer_span=(place, place + 1), named=named)


def attention_entry(
    lm: CausalLM,
    ids: np.ndarray,
    *,
    title: str,
    answer: str,
    answer_span: tuple[int, int],
    named: dict[int, str] | None = None,
) -> dict:
    """Both maps (softmax: its one map) of every layer and head over ``ids [T]``, in the format of explorer.js.

    The tokens that the tokenizer puts in front of a text come first.

    Probabilities are bytes ``round(255 sqrt(p))`` of the lower triangles, row by row, ``[layers, heads, T (T + 1) /
    2]``, in base64. Heads that share a second map get a copy each. ``lambda`` is one number per layer. If it differs by
    head or token, it is the largest value, and the second map is scaled so that the product is what the layer
    subtracts.

    Args:
        title: title of the text on the page.
        answer: the expected continuation.
        answer_span: tokens (start, end) to outline.
        named: what to show for tokens, by id, and a dot for all others; the tokens' own texts if None. One token is
            then generated instead of six.
    """
    shift = len(lm.prefix) if named is None else 0
    ids = np.concatenate([np.array(lm.prefix[:shift], dtype=ids.dtype), ids])
    tokens = torch.from_numpy(ids)[None].to(lm.device)  # [1, T]
    first, second, lambdas = [], [], []

    def keep(call: AttentionCall):
        maps = call.maps()
        first.append((maps[0] if call.first is None else call.first * maps[0])[0])
        if call.lam is not None:
            subtracted, factor = _subtracted(call.lam, maps)
            second.append(subtracted)
            lambdas.append(factor)

    with tapped_attention(lm.model, keep), torch.inference_mode():
        lm.model(input_ids=tokens, use_cache=False, logits_to_keep=1)
    maps = torch.stack(first)  # [L, H, T, T]
    prompt, count = ids.tolist(), _WRITTEN if named is None else 1
    room = lm.positions is None or len(prompt) + count <= lm.positions
    new = lm.continued([prompt], count)[0].tolist() if room else []

    def shown(token: int) -> str:
        return lm.tokenizer.decode([token]) if named is None else named.get(token, "·")

    entry = {
        "title": title,
        "tokens": [shown(token) for token in ids.tolist()],
        "span": [place + shift for place in answer_span],
        "layers": maps.shape[0],
        "heads": maps.shape[1],
        "first": _packed(maps),
        "lambda": lambdas or [0.0] * len(first),
        "answer": answer,
        "generated": shown(new[0]) if named is not None and new else lm.tokenizer.decode(new, skip_special_tokens=True),
    }
    return entry | ({"second": _packed(torch.stack(second))} if second else {})


def _subtracted(lam: torch.Tensor, maps: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, float]:
    """The second map of each head, ``[H, T, T]``, and its factor."""
    second = maps[1].repeat_interleave(maps[0].shape[1] // maps[1].shape[1], dim=1)
    factor = float(lam.max())
    if lam.numel() > 1 and factor > 0:
        second = lam / factor * second
    return second[0], factor


def _packed(maps: torch.Tensor) -> str:
    coded = (255 * maps.float().clamp(0, 1).sqrt()).round().to(torch.uint8).cpu().numpy()
    return base64.b64encode(coded[..., *np.tril_indices(coded.shape[-1])].tobytes()).decode()
