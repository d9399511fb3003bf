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


def one_gpu_16k() -> RunConfig:
    """The pair of ``one_gpu`` continued at 16K tokens with a rotary base of 640,000 (section 3.3, at this size).

    Command: ``diff-transformer train --recipe one_gpu_16k --set train.initial_model=FOLDER --set data.corpus=BOOKS
    --out runs/one_gpu_16k``, where FOLDER is the DIFF model of ``one_gpu``. For the matched Transformer, give its
    folder, another ``--out`` and ``--set model.attention=softmax --set model.head_norm_init=1.0``.
    Then ``diff-transformer eval needle --model runs/one_gpu_16k/model --set cells=[[4,1]]
    --set lengths=[4096,8192,16384] --out runs/needle_16k.json``. Hardware: one H100-class GPU. Time: 2 minutes a model
    (``model.cost``); not measured. Expected: unknown, not yet run.
    """
    config = one_gpu()
    config.name = "one_gpu_16k"
    config.model |= {
        "max_position_embeddings": 16_384,
        "rope_parameters": {"rope_type": "default", "rope_theta": 640_000.0},
    }
    config.data.length = 16_384
    config.optim.lr, config.optim.warmup_steps = 2e-4, 20
    config.train.steps, config.train.batch_size = 200, 4
    config.train.validate_every, config.train.validation_rows, config.train.checkpoint_every = 50, 8, 100
    config.train.activation_checkpointing = "selective"
    config.train.loss_chunk = 4096
    config.evaluation.needles = ((4, 1), (8, 1))
    return config
