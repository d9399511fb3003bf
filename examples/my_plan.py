"""A study of your own: DIFF and the Transformer at two widths, each at the best of three learning rates.

diff-transformer study examples/my_plan.py --corpus FOLDER --out runs/mine --minutes 60
"""

from diff_transformer.lab.recipes import recipe
from diff_transformer.lab.record import Record
from diff_transformer.lab.stages import SWEPT, Stage

SIDES = {
    "softmax": {"attention": "softmax"},
    "diff": {"attention": "diff", "head_norm_init": 0.1},
    "control": {"variant": "softmax_norm", "head_norm_init": 0.1},  # of equal cost
}


def final_loss(record: Record) -> float:
    """The last validation loss: what the sweep minimises."""
    return record.metrics["validation_loss"]


def stages(corpus: str) -> list[Stage]:
    """A sweep of learning rates with a seed of its own, then three seeds at the rate that it chose for each side."""
    settings = {}
    for width in (64, 128):
        config = settings[f"width{width}"] = recipe("demo")
        config.data.corpus = corpus
        config.model["hidden_size"], config.model["num_attention_heads"] = width, width // 16
    sweep = {"width64": settings["width64"]}
    measure = ("associative_recall", "needle")
    return [
        Stage(sweep, SIDES, (100,), (1e-3, 2e-3, 4e-3), "sweep/lr{rate:g}", measure=(), score=final_loss),
        Stage(settings, SIDES, range(3), SWEPT, measure=measure),
    ]
