"""Loss spikes at high learning rates, which users of the first version report: the pair and V2 over learning rates."""

from typing import Any

from diff_transformer.lab.recipes.desk_study import base
from diff_transformer.lab.spec import Choices, RunSpec, Study, seeds

LEARNING_RATES = (1e-3, 3e-3, 1e-2, 3e-2)
SIDES: dict[str, dict[str, Any]] = {
    "softmax": {"attention": "softmax"},
    "diff_norm1": {"attention": "diff", "head_norm_init": 1.0},
    "diff": {"attention": "diff", "head_norm_init": 0.1},
    "diff_v2": {"attention": "diff_v2"},
}


def stability_study(corpus: str) -> Study:
    """200 steps of the desk study's setting on prose alone, gradients not clipped, three seeds a rate.

    The record has, for each run, the gradient norm's median, its largest value and how many spikes there were (more
    than three times the median of the 20 before; every step is logged), and the final loss.

    Command: ``diff-transformer study stability --corpus FOLDER --out runs/stability``. Hardware: two CPU
    cores. Time: about twenty minutes.
    """

    def runs(_: Choices) -> list[RunSpec]:
        made = []
        for rate in LEARNING_RATES:
            for side, fields in SIDES.items():
                config = base(corpus)
                config.model |= fields
                config.data.mixture, config.data.loss = {"text": 1.0}, "tokens"
                config.optim.lr, config.optim.grad_clip = rate, 0.0
                config.train.steps, config.train.log_every = 200, 1
                made += seeds(f"lr{rate:g}", side, config, range(3), measured=False)
        return sorted(made, key=lambda cell: cell.seed)

    return Study("stability", [], runs)
