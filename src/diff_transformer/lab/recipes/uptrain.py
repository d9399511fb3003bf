"""Going on from a trained model: a converted one, or the same on other data."""

from diff_transformer.train.config import DataConfig, OptimConfig, RunConfig, TrainConfig


def uptrain() -> RunConfig:
    """More training of any saved model, on text: what follows ``diff-transformer convert --to diff``.

    The model is that of the folder, unless ``--set model.FIELD`` changes a field that leaves its weights as they are.
    Warm-up and decay begin anew, so give a learning rate below the highest that the model was trained with: half of it
    in the measured runs.

    Command: ``diff-transformer train --recipe uptrain --set train.initial_model=FOLDER --set data.tokenizer=FOLDER
    --set data.corpus=TEXTS --out runs/uptrain``. Hardware: for the demo's size one core. Time: a minute.
    Expected: figures/uptraining.
    """
    return RunConfig(
        name="uptrain",
        model={},
        data=DataConfig(max_bytes=8_000_000, length=128),
        optim=OptimConfig(lr=1e-3, warmup_steps=20),
        train=TrainConfig(
            steps=400, batch_size=8, validate_every=50, validation_rows=128, checkpoint_every=400, threads=1
        ),
    )
