"""The pair at 33M parameters, on books: what of the small models' results stands at ten times their size and more?

Five sides, three seeds, then each side at twice its rate. What is compared was fixed before the first run, in
preregistration.md; README.md has the commands. Hardware: one H100-class GPU. Time: about fifteen minutes, by estimate.
"""

from typing import Any

from diff_transformer.lab.recipes.one_gpu import one_gpu
from diff_transformer.lab.stages import Stage
from diff_transformer.train.config import RunConfig

SEEDS = range(3)
# The root mean square of a head's output in each layer of the untrained Transformer of ``base``; and the weight with
# which DIFF's heads start there (``with_matched_scale(config, length=1024)``, of which 1 - lambda_init is taken).
OWN_SCALE = [0.06, 0.28, 0.38, 0.39, 0.40, 0.40, 0.41, 0.42]
MATCHED = [0.08, 0.44, 0.70, 0.88, 1.04, 1.20, 1.36, 1.52]
SIDES: dict[str, dict[str, Any]] = {
    "softmax": {"variant": "softmax"},
    "diff_norm1": {"variant": "diff", "head_norm_init": 1.0},
    "diff_matched": {"variant": "diff", "head_norm_init": MATCHED},
    "softmax_norm_own_scale": {"variant": "softmax_norm", "head_norm_init": OWN_SCALE},
    "diff_v2": {"variant": "diff_v2"},
}
# Of the prose study's sweep at width 128 (figures/prose), divided by 4 as the width is multiplied by 4: with Adam, the
# rate of a matrix falls as 1 / width (Tensor Programs V, arXiv 2203.03466). V2 was not swept: the Transformer's.
RATES = {
    "softmax": 5e-4,
    "diff_norm1": 5e-4,
    "diff_matched": 1e-3,
    "softmax_norm_own_scale": 1e-3,
    "diff_v2": 5e-4,
}


def base(corpus: str) -> RunConfig:
    """8 layers of width 512 with 4 DIFF heads of 64, rows of 1024 tokens, 500 steps of 64 rows: 33M tokens."""
    config = one_gpu()
    config.name = "scale"
    config.model |= {"hidden_size": 512, "num_attention_heads": 8}
    config.data.corpus, config.data.max_bytes = corpus, None
    config.data.mixture = {"text": 0.9, "needles": 0.1}
    config.optim.warmup_steps = 50
    config.train.steps, config.train.validate_every, config.train.checkpoint_every = 500, 100, 500
    config.train.checkpoint_keep = 1
    config.evaluation.needles, config.evaluation.samples = ((1, 1), (2, 2), (4, 2), (6, 2)), 40
    config.evaluation.more = {"long_nll": {"length": 4096, "samples": 44}}
    return config


def stages(corpus: str) -> list[Stage]:
    """``corpus``: a folder that ``prepare`` made of books, the held-out ones by other authors."""
    measure = ("associative_recall", "needle", "allocation", "outliers", "long_nll")
    twice = {side: 2 * rate for side, rate in RATES.items()}
    return [
        Stage({"books": base(corpus)}, SIDES, SEEDS, RATES, measure=measure),
        Stage({"books_twice": base(corpus)}, SIDES, SEEDS[:1], twice, measure=measure),
    ]
