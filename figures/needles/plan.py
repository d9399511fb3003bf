"""The needle study: models that retrieve several needles from prose, by a curriculum that leads up to them.

Trained on needles alone, a model of this size names one of the numbers of its prompt at random. The curriculum teaches
it to copy first. Questions, outcomes and the order of the runs were fixed before the runs, in
preregistration.md.

Command: ``diff-transformer study needles --corpus FOLDER --out runs/needles --minutes 60``, repeated until it reports
that all runs are finished. Hardware: two CPU cores.
"""

import dataclasses
import sys
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
from recall import plan as recall
from recall.plan import CORE, MORE

from diff_transformer.lab.recipes.desk import demo
from diff_transformer.lab.stages import SWEPT, Stage
from diff_transformer.train.config import OptimConfig, RunConfig
from diff_transformer.train.data_config import NeedleConfig

# DIFF's heads start with the Transformer's RMS in that layer: ``matched_head_norm_init`` on rows of ``base``.
MATCHED = [0.12, 0.31]
# Planned after the core's runs: DIFF with a head norm that starts lower, and the Transformer with the same weights.
STARTS = {
    "diff": MORE["diff"],
    "diff_matched": {"variant": "diff", "head_norm_init": MATCHED},
    "softmax_norm_matched": {"variant": "softmax_norm", "head_norm_init": MATCHED},
}
OTHERS = {name: MORE[name] for name in ("diff_lambda0", "softmax_norm", "softmax_wide_norm1", "diff_v2")}
STAGES = {"the core": CORE, "other starts of the head norm": STARTS, "the other sides": OTHERS}
SIDES = CORE | STARTS | OTHERS
SEEDS = range(5)
LEARNING_RATES = (1e-3, 2e-3, 4e-3)
SETTING = "prose"
CELLS = ((1, 1), (2, 2), (4, 2), (6, 2), (8, 1))  # Table 2, and the cell of Figure 5
LENGTHS = (128, 256)
PHASES = (
    (700, {"copies": 1.0}),
    (500, {"copies": 0.5, "pairs": 0.5}),
    (1000, {"copies": 0.25, "pairs": 0.25, "clauses": 0.5}),
)
MIXTURE = {"copies": 0.25, "clauses": 0.25, "needles": 0.5}
STEPS = 3500  # of them 1300 with needles


def base(corpus: str) -> RunConfig:
    """Two layers of width 64, 4 maps of width 16, rows of 128 tokens; text that repeats, short facts, then needles."""
    config = demo()
    config.name = "needles"
    config.model |= {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": max(LENGTHS),
        "initializer_range": 0.05,
    }
    config.data.corpus, config.data.max_bytes = corpus, 8_000_000
    config.data.mixture, config.data.phases = dict(MIXTURE), PHASES
    config.data.needles = NeedleConfig(counts=(1, 2, 4, 6, 8), queries=(1, 2), questions=4, digits=1)
    config.optim = OptimConfig(betas=(0.9, 0.98), warmup_steps=50, final_lr_ratio=0.2)
    config.train = dataclasses.replace(
        config.train, steps=STEPS, batch_size=32, log_every=50, validate_every=50, checkpoint_every=700,
        checkpoint_keep=1, checkpoint_best=False, threads=1,
    )  # fmt: skip
    config.evaluation = dataclasses.replace(
        config.evaluation, needles=CELLS, needle_lengths=LENGTHS, samples=20, allocation_needles=4,
        allocation_samples=40, recall_steps=0, more={},
    )  # fmt: skip
    return config


shortfall = partial(recall.shortfall, curve="needles")


def stages(corpus: str) -> list[Stage]:
    """``corpus``: a folder of prose, with train/ and val/ inside."""
    config, made = base(corpus), []
    for sides in STAGES.values():
        made.append(recall.sweep("", config, sides, LEARNING_RATES, shortfall))
        made.append(Stage({SETTING: config}, sides, SEEDS, SWEPT, measure=("needle", "allocation")))
    return made
