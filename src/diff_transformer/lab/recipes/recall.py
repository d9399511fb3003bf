"""Key-value recall alone: what small models learn in minutes, beside those of a comparison and in studies."""

from diff_transformer.lab.spec import side_model
from diff_transformer.train.config import NO_CORPUS, DataConfig, OptimConfig, RecallConfig, RunConfig, TrainConfig

QUESTIONS = 16  # of a row
NOISE_SYMBOLS = 2
# DIFF's heads start with the Transformer's RMS in that layer: ``with_matched_scale`` on rows of ``recall``.
MATCHED = [0.2, 0.49]
# That RMS. The norm of a Transformer's head, or without lambda, is not multiplied by 1 - lambda_init.
OWN_SCALE = [0.16, 0.32]


def recall(pairs: int, noise: int) -> RunConfig:
    """Two layers of width 64, 4 maps of width 16, on rows of recall alone; bytes serve as symbols.

    1000 steps take half a minute to two minutes of one core. The feed-forward is as wide as the model: recall does not
    need it, and at 8/3 it would be most of the cost. In trials with noise of 32 symbols instead of 2, or at a rate of
    3e-3, a model learned which values a row has, and nothing else in 1500 steps.

    Args:
        pairs: of a row.
        noise: tokens for each pair.
    """
    return RunConfig(
        name="recall",
        model={
            "vocab_size": 258,
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 4096,
            "initializer_range": 0.05,
            "attention": "diff",
        },
        data=DataConfig(
            corpus=NO_CORPUS,
            tokenizer="bytes",
            length=pairs * (2 + noise) + 2 * QUESTIONS,
            mixture={"recall": 1.0},
            recall=RecallConfig(pairs=pairs, symbols=max(16, pairs), noise_symbols=NOISE_SYMBOLS, questions=QUESTIONS),
        ),
        optim=OptimConfig(betas=(0.9, 0.98), warmup_steps=50),
        train=TrainConfig(
            steps=1000,
            batch_size=32,
            log_every=25,
            validate_every=25,
            validation_rows=64,
            checkpoint_every=500,
            checkpoint_keep=1,
            threads=1,
        ),
    )


def recall_run(side: str, train: TrainConfig, steps: int) -> RunConfig:
    """A small model on recall alone, beside each model of a comparison (``evaluation.recall_steps``).

    4 pairs with 4 noise tokens each, at the rate that the recall study's sweep chose for the Transformer and for DIFF;
    over five seeds the control does about as well there as at its best rate. In this setting of its grid the two differ
    soonest. Head norms start at the Transformer's scale: from 1, as published, the control (the Transformer +
    head norm) learns nothing at any rate of the sweep.
    """
    config = recall(4, 4)
    config.optim.lr = 5e-4
    config.train.steps, config.train.seed, config.train.threads = steps, train.seed, train.threads
    config.model["head_norm_init"] = MATCHED
    config.model |= side_model(config, side)
    if config.model.get("softmax_head_norm"):
        config.model["head_norm_init"] = OWN_SCALE
    return config
