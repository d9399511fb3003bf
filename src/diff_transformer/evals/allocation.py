"""How much attention goes to the answer, and how much to the noise (section 3.4, Table 3, Figure 1).

    filler  [The magic number of Rome is 17.]  filler, other needles  Question: ... Answer: Rome is|
    noise            answer span                     noise                 neither           from here

From the last position of a retrieval prompt, the attention of every head is divided by the sum of its magnitudes, so
that maps whose rows sum to 1 (softmax) and to 1 - lambda (differential, with negative entries) are compared alike.
Reported is the share that falls on the answer's sentence and on the noise: the rest of the context, without the first
token (where softmax attention parks what it does not need) and without the question.
"""

from collections.abc import Sequence

import numpy as np
import torch

from diff_transformer.checks import require_positive
from diff_transformer.data.filler import Filler
from diff_transformer.data.needles import DEPTHS, make_needle_example
from diff_transformer.data.seeding import evaluation_rng
from diff_transformer.data.tokenizer import encode, token_spans
from diff_transformer.evals.lm import LanguageModel
from diff_transformer.evals.provenance import provenance
from diff_transformer.evals.types import Result


def evaluate_allocation(
    lm: LanguageModel,
    filler: Filler,
    *,
    depths: Sequence[float] = DEPTHS,
    length: int = 4096,
    samples: int = 20,
    needles: int = 1,
    digits: int = 2,
    seed: int = 0,
) -> Result:
    """Shares of attention on the answer and on the noise, by depth, averaged over heads, layers and samples.

    ``metrics``: ``answer_depth{percent}``, ``noise_depth{percent}``, and the means ``answer`` and ``noise``;
    ``best_head_answer`` is the largest share that any single head gives to the answer, averaged over samples.
    """
    require_positive(length=length, samples=samples, needles=needles)
    rows = []
    for depth in depths:
        for sample in range(samples):
            rng = evaluation_rng(seed, "allocation", needles, round(100 * depth), sample)
            options = {"length": length, "needles": needles, "queries": 1, "depth": depth, "digits": digits}
            example = make_needle_example(rng, filler, lm.tokenizer, **options)
            question_start = example.prompt.rindex("\nQuestion:")
            spans = [example.answer_spans[0], (question_start, len(example.prompt))]
            (start, end), (question, _) = token_spans(lm.tokenizer, example.prompt, spans)
            ids = torch.from_numpy(encode(lm.tokenizer, example.prompt))[None]
            shares = torch.stack(lm.last_row_attention(ids)).abs()  # [layers, heads, T]
            shares = shares / shares.sum(-1, keepdim=True)
            answer = shares[..., start:end].sum(-1)
            noise = shares[..., 1:question].sum(-1) - shares[..., max(1, start) : end].sum(-1)
            rows.append({
                "depth": depth, "sample": sample, "answer": answer.mean().item(), "noise": noise.mean().item(),
                "best_head_answer": answer.max().item(),
            })  # fmt: skip
    metrics = {}
    for name in ("answer", "noise"):
        for depth in depths:
            shares_here = [row[name] for row in rows if row["depth"] == depth]
            metrics[f"{name}_depth{round(100 * depth)}"] = float(np.mean(shares_here))
        metrics[name] = float(np.mean([row[name] for row in rows]))
    metrics["best_head_answer"] = float(np.mean([row["best_head_answer"] for row in rows]))
    details = {"length": length, "samples": samples, "needles": needles, "digits": digits, "seed": seed}
    return Result("allocation", lm.name, metrics, rows, provenance(**details))
