"""Runs for a desk: two CPU cores, minutes to half an hour."""

from diff_transformer.train.config import (
    DataConfig,
    EvaluationConfig,
    NeedleConfig,
    OptimConfig,
    RecallConfig,
    RunConfig,
    TrainConfig,
)


def debug() -> RunConfig:
    """The smallest run that executes every part of the code; it learns next to nothing.

    Command: ``diff-transformer compare --recipe debug --out runs/debug``. Hardware: anything. Time: seconds a model.
    """
    return RunConfig(
        name="debug",
        model=_model("debug", head_norm_init=0.1),
        data=DataConfig(
            max_bytes=200_000,
            length=96,
            mixture={"text": 0.5, "needles": 0.25, "recall": 0.25},
            needles=NeedleConfig(counts=(1, 2), queries=(1,), questions=2, digits=1),
            recall=RecallConfig(pairs=2),
        ),
        optim=OptimConfig(lr=3e-3, warmup_steps=5),
        train=TrainConfig(
            steps=20, batch_size=8, log_every=5, validate_every=10, validation_rows=8, checkpoint_every=10, threads=1
        ),
        evaluation=EvaluationConfig(
            needles=((1, 1), (2, 1)),
            samples=4,
            allocation_samples=3,
            loss_rows=16,
            outlier_rows=8,
            throughput_repeats=3,
            more={"long_nll": {"samples": 3}},
        ),
    )


def demo() -> RunConfig:
    """The matched pair on the running Python's own library, with hidden needles and key-value recall mixed in.

    Prose, answers and recall each have their own share of the loss (``data.loss="sources"``). In trials with a mean
    over all tokens, neither model found a single needle after about 1000 steps. Recall is learned by the small models
    beside each side, which train on it alone (``evaluation.recall_steps``). Without recall in the mixture and in 1200
    steps, DIFF finds 0.90 of single needles instead of 0.99 (one run).

    Command: ``make demo``. Hardware: two CPU cores. Time: 5 to 13 minutes, once installed.
    """
    return RunConfig(
        name="demo",
        model=_model("demo"),
        data=DataConfig(
            max_bytes=4_000_000,
            length=128,
            mixture={"text": 0.35, "needles": 0.5, "recall": 0.15},
            loss="sources",
            needles=NeedleConfig(counts=(1, 1, 2, 4), queries=(1,), questions=4, digits=1),
            recall=RecallConfig(pairs=8, symbols=32),
        ),
        optim=OptimConfig(lr=2e-3, warmup_steps=50),
        train=TrainConfig(
            steps=1500, batch_size=16, log_every=10, validate_every=100, validation_rows=64, checkpoint_every=200,
            threads=1,
        ),
        evaluation=EvaluationConfig(
            needles=((1, 1), (2, 1), (4, 1)),
            recall_steps=550,
            more={
                "long_nll": {"samples": 48},
                "quantization": {"samples": 24, "rows": 64},
                "gradient_flow": {"samples": 32},
            },
        ),
    )  # fmt: skip


def novels() -> RunConfig:
    """The matched pair on a folder of books, needles and recall mixed in.

    Command: ``diff-transformer compare --recipe novels --set data.corpus=FOLDER --out runs/novels``. Hardware: two CPU
    cores. Time: 17 to 26 minutes (figures/novels).
    """
    config = demo()
    config.name = "novels"
    config.data.corpus = "novels"
    config.data.max_bytes = 30_000_000
    config.train.steps = 8000
    config.train.validate_every = 300
    return config


def uptrain() -> RunConfig:
    """Continued training of a saved model on text: of a Transformer beside what it converts to, or of any one model.

    ``--set model.FIELD`` may change fields that leave the weights unchanged. Warm-up and decay start again, so give a
    learning rate below the model's highest one; the measured runs used half of it.

    Command: ``diff-transformer compare --from MODEL --corpus TEXTS --out runs/uptrain``; for one model
    ``diff-transformer train --recipe uptrain --set train.initial_model=FOLDER --set data.tokenizer=FOLDER --set
    data.corpus=TEXTS --out runs/uptrain``. Hardware: for the demo's size one core. Time: a minute a model.
    Expected: figures/uptraining.
    """
    return RunConfig(
        name="uptrain",
        model={},
        data=DataConfig(max_bytes=8_000_000, length=128),
        optim=OptimConfig(lr=1e-3, warmup_steps=20),
        train=TrainConfig(
            steps=400,
            batch_size=8,
            validate_every=50,
            validation_rows=128,
            checkpoint_every=400,
            threads=1,
            loss_chunk=512,
        ),
        evaluation=EvaluationConfig(more={"long_nll": {}, "quantization": {}}),
    )


def _model(name: str, **fields) -> dict:
    from diff_transformer.model.presets import PRESETS

    return {"attention": "diff", **PRESETS[name], **fields}
