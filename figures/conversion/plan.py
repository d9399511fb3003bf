"""Is converting a pretrained model worth it? Conversions of SmolLM2-135M against training it as it is.

Six sides go on from one model and start with its logits; each has the learning rate of its own sweep. What is tested
was fixed before the runs, in preregistration.md.

Commands: ``python figures/conversion/plan.py SMOLLM2`` writes the models that training starts from to runs/initial;
then ``diff-transformer study conversion --corpus BOOKS --out runs/conversion --minutes 60``, repeated until it reports
that all runs are finished. Hardware: two CPU cores with bf16 instructions. Time: about five hours.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))
from prose.plan import final_loss

from diff_transformer.lab.recipes.desk import uptrain
from diff_transformer.lab.stages import SWEPT, Stage
from diff_transformer.lab.uptrain import ARMS, read_source
from diff_transformer.train.config import RunConfig

INITIAL = Path("runs/initial")
SIDES = ("attention", "lora", "wider", "diff_v2", "diff_v3", "dex")
PRIMARY = ("attention", "lora", "diff_v2", "diff_v3", "dex")  # sides of the primary outcomes, which run first
RATES = {name: (3e-4, 1e-3, 3e-3, 1e-2) if name == "lora" else (1e-4, 3e-4, 1e-3) for name in SIDES}
SWEEP_SEEDS, SEEDS = (90,), range(8)
MEASURE = ("associative_recall", "ruler")


def base(corpus: str) -> RunConfig:
    """24 steps of 4 rows of 512 tokens: books, needles in books and key-value facts."""
    config = uptrain()
    config.name = "conversion"
    tokenizer = str(INITIAL / "softmax")
    config.data.corpus, config.data.max_bytes, config.data.length, config.data.tokenizer = corpus, None, 512, tokenizer
    config.data.mixture = {"text": 0.4, "needles": 0.4, "recall": 0.2}
    config.data.needles.counts, config.data.needles.queries = (1, 2, 4, 6), (1, 2)
    config.optim.warmup_steps = 5
    train = config.train
    train.precision = "bf16-mixed"
    train.steps, train.batch_size, train.validate_every, train.checkpoint_every = 24, 4, 24, 24
    train.validation_rows, train.checkpoint_keep = 16, 1
    config.evaluation.loss_rows = 32
    config.evaluation.more = {"ruler": {"tasks": ["niah_multiquery"], "lengths": [1024], "samples": 24}}
    return config


def side(name: str) -> dict[str, Any]:
    """The model that a side starts from, and the weights that it trains: those of attention, or its own choice."""
    made, weights = ARMS[name]
    return {"train.initial_model": str(INITIAL / made), "train.weights": weights or "attention"}


def stages(corpus: str) -> list[Stage]:
    """``corpus``: a folder of books with train/ and val/ inside, val/ by other authors."""
    books, measured = {"books": base(corpus)}, {"books": base(corpus)}
    measured["books"].train.validation_rows = 1  # only the sweep's score reads them
    first = {name: side(name) for name in PRIMARY}
    rest = {name: side(name) for name in SIDES if name not in PRIMARY}
    source = {"source": {"train.initial_model": str(INITIAL / "softmax")}}

    def both(sides: dict[str, dict[str, Any]]) -> list[Stage]:
        return [
            Stage(books, sides, SWEEP_SEEDS, RATES, "sweep/{setting}_lr{rate:g}", (), final_loss),
            Stage(measured, sides, SEEDS, SWEPT, measure=MEASURE),
        ]

    return [*both(first), Stage(measured, source, (0,), measure=MEASURE), *both(rest)]


if __name__ == "__main__":
    read_source(sys.argv[1], SIDES).write(INITIAL.parent)
