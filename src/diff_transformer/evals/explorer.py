"""Attention maps of one text, small enough to travel inside the report."""

import base64

import torch

from diff_transformer.data.filler import Filler
from diff_transformer.data.needles import make_needle_example
from diff_transformer.data.seeding import evaluation_rng
from diff_transformer.data.tokenizer import encode, token_spans
from diff_transformer.evals.inside import AttentionCall, tapped_attention
from diff_transformer.evals.lm import CausalLM
from diff_transformer.train.config import RunConfig

_LONGEST = 112  # tokens: the maps grow with the square
_WRITTEN = 6  # tokens that the model continues with


def explorer_entry(lm: CausalLM, filler: Filler, config: RunConfig) -> dict:
    """``attention_entry`` of a retrieval prompt with two needles, one of which the question asks for."""
    options = {"length": min(_LONGEST, config.data.length - 8), "digits": config.data.needles.digits}
    rng = evaluation_rng(config.evaluation.seed, "explorer")
    example = make_needle_example(rng, filler, lm.tokenizer, needles=2, queries=1, depth=0.25, **options)
    (span,) = token_spans(lm.tokenizer, example.prompt, example.answer_spans)
    return attention_entry(
        lm, example.prompt, title="Two needles, one asked for", answer=example.expected_completion, answer_span=span
    )


def attention_entry(
    lm: CausalLM, text: str, *, title: str, answer: str = "", answer_span: tuple[int, int] = (0, 0)
) -> dict:
    """Both maps (softmax: its one map) of every layer and head over ``text``, in the format of the report's explorer.

    Probabilities are bytes ``round(255 sqrt(p))``, row-major ``[layers, heads, T, T]``, in base64. Heads that share a
    second map get a copy each. ``lambda`` is one number per layer. If it differs by head or token, it is the largest
    value, and the second map is scaled so that the product is what the layer subtracts.

    Args:
        title: title of the text on the page.
        answer: the expected continuation; empty if unknown.
        answer_span: tokens (start, end) to outline; empty for none.
    """
    ids = torch.from_numpy(encode(lm.tokenizer, text))[None].to(lm.device)  # [1, T]
    first, second, lambdas = [], [], []

    def keep(call: AttentionCall):
        maps = call.maps()
        first.append(maps[0][0])
        if call.lam is not None:
            subtracted, factor = _subtracted(call.lam, maps)
            second.append(subtracted)
            lambdas.append(factor)

    with tapped_attention(lm.model, keep), torch.inference_mode():
        lm.model(input_ids=ids, use_cache=False, logits_to_keep=1)
    maps = torch.stack(first)  # [L, H, T, T]
    room = lm.positions is None or ids.shape[1] + len(lm.prefix) + _WRITTEN <= lm.positions
    entry = {
        "model": lm.name,
        "title": title,
        "tokens": [lm.tokenizer.decode([i]) for i in ids[0].tolist()],
        "answer_span": list(answer_span),
        "layers": maps.shape[0],
        "heads": maps.shape[1],
        "first": _bytes(maps),
        "answer": answer,
        "generated": lm.generate([text], _WRITTEN)[0] if room else "",
    }
    if second:
        entry |= {"second": _bytes(torch.stack(second)), "lambda": lambdas}
    return entry


def _subtracted(lam: torch.Tensor, maps: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, float]:
    """The second map of each head, ``[H, T, T]``, and its factor."""
    second = maps[1].repeat_interleave(maps[0].shape[1] // maps[1].shape[1], dim=1)
    factor = float(lam.max())
    if lam.numel() > 1 and factor > 0:
        second = lam / factor * second
    return second[0], factor


def _bytes(maps: torch.Tensor) -> str:
    coded = (255 * maps.float().clamp(0, 1).sqrt()).round().to(torch.uint8)
    return base64.b64encode(coded.cpu().contiguous().numpy().tobytes()).decode()
