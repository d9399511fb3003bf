"""Studies by name: functions from a corpus to a plan of many runs."""

from collections.abc import Callable
from typing import Any

from diff_transformer.checks import require_known
from diff_transformer.lab.recipes.answer_study import answer_study
from diff_transformer.lab.recipes.desk_study import base, desk_study
from diff_transformer.lab.recipes.needle_study import needle_study
from diff_transformer.lab.recipes.one_gpu import one_gpu
from diff_transformer.lab.recipes.prose_study import prose_study
from diff_transformer.lab.recipes.recall_study import recall_confirmation, recall_study
from diff_transformer.lab.spec import Choices, RunSpec, Study, seeds

SIZES = ((256, 4), (512, 6), (768, 8), (1024, 8))  # of the ladder: width, layers; 16 maps each
LEARNING_RATES = (1e-3, 3e-3, 1e-2, 3e-2)  # learning rates of the stability study
STABILITY_SIDES: dict[str, dict[str, Any]] = {
    "softmax": {"attention": "softmax"},
    "diff_norm1": {"attention": "diff", "head_norm_init": 1.0},
    "diff": {"attention": "diff", "head_norm_init": 0.1},
    "diff_v2": {"attention": "diff_v2"},
}


def ladder_study(corpus: str) -> Study:
    """Figure 3 on one GPU: four sizes from 7M to 117M parameters, 33M tokens each, on text alone; one seed.

    Command: ``diff-transformer study ladder --corpus FOLDER --out runs/ladder --jobs 1``, then ``diff-transformer eval
    scaling --set runs=runs/ladder --out runs/ladder.json``. Hardware: one H100-class GPU. Time: a quarter of an hour
    at 25 % of 989 TFLOP/s; not measured. With at least 150 MB of text, no text is repeated.
    """

    def runs(_: Choices) -> list[RunSpec]:
        made = []
        for width, layers in SIZES:
            for attention in ("softmax", "diff"):
                config = one_gpu()
                config.name = "ladder"
                config.model |= {"hidden_size": width, "num_hidden_layers": layers, "attention": attention}
                config.data.corpus, config.data.mixture, config.data.loss = corpus, {"text": 1.0}, "tokens"
                config.train.steps, config.train.validate_every = 500, 50
                made += seeds(f"width{width}", attention, config, range(1), measured=False)
        return made

    return Study("ladder", [], runs)


def stability_study(corpus: str) -> Study:
    """Loss spikes at high learning rates, which users of the first version report: the pair and V2 at four rates.

    Each run is 200 steps of the desk study's setting on prose alone, without gradient clipping. Each rate has three
    seeds.

    The record of a run holds its final loss, the median and largest gradient norm, and the number of spikes (norms
    above three times the median of the 20 before; every step is logged).

    Command: ``diff-transformer study stability --corpus FOLDER --out runs/stability``. Hardware: two CPU
    cores. Time: about twenty minutes.
    """

    def runs(_: Choices) -> list[RunSpec]:
        made = []
        for rate in LEARNING_RATES:
            for side, fields in STABILITY_SIDES.items():
                config = base(corpus)
                config.model |= fields
                config.data.mixture, config.data.loss = {"text": 1.0}, "tokens"
                config.optim.lr, config.optim.grad_clip = rate, 0.0
                config.train.steps, config.train.log_every = 200, 1
                made += seeds(f"lr{rate:g}", side, config, range(3), measured=False)
        return sorted(made, key=lambda cell: cell.seed)

    return Study("stability", [], runs)


STUDIES: dict[str, Callable[[str], Study]] = {
    "desk": desk_study,
    "prose": prose_study,
    "recall": recall_study,
    "recall_confirmation": recall_confirmation,
    "answers": answer_study,
    "needles": needle_study,
    "ladder": ladder_study,
    "stability": stability_study,
}


def study(name: str, corpus: str = "python") -> Study:
    """The plan of the study called ``name`` on ``corpus`` (as ``data.corpus`` of a run).

    Raises:
        ValueError: for a name that is not in ``STUDIES``.
    """
    require_known("study", name, STUDIES)
    return STUDIES[name](corpus)
