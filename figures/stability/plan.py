"""Loss spikes at high learning rates, which users of the first version report: the pair and V2 at four rates.

Each run is 200 steps of the desk study's setting on prose alone, without gradient clipping. Each rate has three seeds.
The record of a run holds its final loss, the median and largest gradient norm, and the number of spikes (norms above
three times the median of the 20 before; every step is logged).

Command: ``diff-transformer study stability --corpus FOLDER --out runs/stability``. Hardware: two CPU cores. Time: about
twenty minutes.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
from desk.plan import base

from diff_transformer.lab.stages import Stage

LEARNING_RATES = (1e-3, 3e-3, 1e-2, 3e-2)
SIDES = {
    "softmax": {"attention": "softmax"},
    "diff_norm1": {"attention": "diff", "head_norm_init": 1.0},
    "diff": {"attention": "diff", "head_norm_init": 0.1},
    "diff_v2": {"attention": "diff_v2"},
}


def stages(corpus: str) -> list[Stage]:
    """``corpus``: any text."""
    settings = {}
    for rate in LEARNING_RATES:
        config = settings[f"lr{rate:g}"] = base(corpus)
        config.data.mixture, config.data.loss = {"text": 1.0}, "tokens"
        config.optim.lr, config.optim.grad_clip = rate, 0.0
        config.train.steps, config.train.log_every = 200, 1
    return [Stage(settings, SIDES, range(3), measure=())]
