"""Attention maps of one example, small enough to travel inside the report."""

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


def explorer_entry(lm: CausalLM, filler: Filler, config: RunConfig) -> dict:
    """Both maps (softmax: the one map) of every layer and head over a retrieval prompt with two needles.

    Probabilities are written as bytes ``round(255 sqrt(p))``, row-major ``[layers, heads, T, T]``, in base64.
    """
    options = {"length": min(_LONGEST, config.data.length - 8), "digits": config.data.needles.digits}
    rng = evaluation_rng(config.evaluation.seed, "explorer")
    example = make_needle_example(rng, filler, lm.tokenizer, needles=2, queries=1, depth=0.25, **options)
    ids = torch.from_numpy(encode(lm.tokenizer, example.prompt))[None].to(lm.device)
    first, second, lambdas = [], [], []

    def keep(call: AttentionCall):
        maps = call.maps()
        first.append(maps[0][0])
        if call.lam is not None:
            second.append(maps[1][0])
            lambdas.append(float(call.lam))

    with tapped_attention(lm.model, keep), torch.inference_mode():
        lm.model(input_ids=ids, use_cache=False, logits_to_keep=1)
    (span,) = token_spans(lm.tokenizer, example.prompt, example.answer_spans)
    maps = torch.stack(first)
    entry = {
        "model": lm.name,
        "title": "Two needles, one asked for",
        "tokens": [lm.tokenizer.decode([i]) for i in ids[0].tolist()],
        "answer_span": list(span),
        "layers": maps.shape[0],
        "heads": maps.shape[1],
        "first": _bytes(maps),
        "answer": example.expected_completion,
        "generated": lm.generate([example.prompt], 6)[0],
    }
    if second:
        entry |= {"second": _bytes(torch.stack(second)), "lambda": lambdas}
    return entry


def _bytes(maps: torch.Tensor) -> str:
    coded = (255 * maps.float().clamp(0, 1).sqrt()).round().to(torch.uint8)
    return base64.b64encode(coded.cpu().contiguous().numpy().tobytes()).decode()
