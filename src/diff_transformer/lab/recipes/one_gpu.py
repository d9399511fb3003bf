"""A pair of the 125M class for one GPU."""

from diff_transformer.train.config import (
    DataConfig,
    EvaluationConfig,
    NeedleConfig,
    OptimConfig,
    RunConfig,
    TrainConfig,
)


def one_gpu() -> RunConfig:
    """8 layers of width 1024, 8 DIFF heads of 64 (the authors advise at least 8): 117M parameters, 131M tokens.

    Command: ``diff-transformer compare --recipe one_gpu --set data.corpus=FOLDER --out runs/one_gpu``. Hardware: one
    H100-class GPU. Time: 7 minutes a model at 25 % of 989 TFLOP/s (``model.cost``); not measured.
    Give it at least 70 MB of text; with less, it repeats the text many times. Expected: unknown, not yet run.
    """
    return RunConfig(
        name="one_gpu",
        model={
            "attention": "diff",
            "vocab_size": 16_384,
            "hidden_size": 1024,
            "num_hidden_layers": 8,
            "num_attention_heads": 16,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": True,
            "head_norm_init": 0.1,
        },
        data=DataConfig(
            length=1024,
            mixture={"text": 0.7, "needles": 0.3},
            loss="sources",
            needles=NeedleConfig(counts=(1, 2, 4, 6), queries=(1, 2), questions=4, digits=2),
        ),
        optim=OptimConfig(lr=6e-4, betas=(0.9, 0.95), warmup_steps=200),
        train=TrainConfig(
            steps=2000,
            batch_size=64,
            precision="bf16-mixed",
            validate_every=200,
            validation_rows=128,
            checkpoint_every=500,
            compile=True,
        ),
        evaluation=EvaluationConfig(needles=((1, 1), (2, 2), (4, 2), (6, 2)), samples=50, more={"long_nll": {}}),
    )
