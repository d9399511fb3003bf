"""The desk study: does differential attention help at a scale that two CPU cores can reach?

The study trains matched pairs on novels with hidden needles, over several seeds. Each side gets its learning rate from
the same sweep. Head norms start at 1 (as published) or at 0.1 (below softmax attention's output at the start).

Command: ``diff-transformer study desk --corpus FOLDER --out runs/desk --minutes 60``, repeated until it reports that
all runs are finished. Hardware: two CPU cores. Time: about fourteen hours in total.
"""

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

from diff_transformer.lab.recipes.desk import demo
from diff_transformer.lab.record import Record
from diff_transformer.lab.stages import SWEPT, Rate, Stage
from diff_transformer.train.config import RunConfig

LEARNING_RATES = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3)
MANY, FEW = range(5), range(3)
REST = range(3, 5)  # more seeds, for settings that turned out to need as many as the main one
# Sides of the main setting, each with its own learning rate.
SIDES: dict[str, dict[str, Any]] = {
    "softmax": {"attention": "softmax"},
    "diff": {"attention": "diff", "head_norm_init": 0.1},
    "diff_norm1": {"attention": "diff", "head_norm_init": 1.0},
    "diff_v2": {"attention": "diff_v2"},
}
PAPER = ("softmax", "diff", "diff_norm1")
# DIFF at the Transformer's learning rate. The sweep chooses rates by the loss on prose after 600 steps. DIFF's rate
# turned out too high to learn retrieval, so every other setting trains all its models at the Transformer's rate.
SAME_RATE: dict[str, dict[str, Any]] = {"diff_same_rate": SIDES["diff"]}
# The reverse: the Transformer at DIFF's learning rate.
DIFF_RATE: dict[str, dict[str, Any]] = {"softmax_diff_rate": SIDES["softmax"]}
# The Transformer + head norm, on its own heads. (Table 6 has it with half the heads, twice as wide.)
NORMED: dict[str, dict[str, Any]] = {
    "softmax_norm": {"attention": "softmax", "softmax_head_norm": True, "head_norm_init": 0.1}
}
# Each head's output starts with the Transformer's RMS in that layer: ``with_matched_scale`` of ``base``, rounded.
MATCHED = [0.19, 0.59, 0.9]
ABLATIONS: dict[str, dict[str, Any]] = {
    "diff_matched": {"attention": "diff", "head_norm_init": MATCHED},
    "diff_no_norm": {"attention": "diff", "head_norm": False, "head_norm_init": 1.0},
    "diff_lambda_0.8": {"attention": "diff", "head_norm_init": 0.1, "lambda_init": 0.8},
    "diff_lambda_0.5": {"attention": "diff", "head_norm_init": 0.1, "lambda_init": 0.5},
    "diff_norm0.3": {"attention": "diff", "head_norm_init": 0.3},
    "diff_norm0.03": {"attention": "diff", "head_norm_init": 0.03},
    "softmax_wide_norm": {
        "attention": "softmax", "num_attention_heads": 4, "softmax_head_norm": True, "head_norm_init": 0.1,
    },
}  # fmt: skip


def final_loss(record: Record) -> float:
    """The last validation loss, nats a token: what a sweep minimises."""
    return record.metrics["validation_loss"]


def base(corpus: str) -> RunConfig:
    """The main setting: 3 layers of width 128, 8 maps of width 16, half prose, half needles.

    1500 steps of 16 rows of 128 tokens take about seven minutes on one core, including the experiments.
    """
    config = demo()
    config.name = "desk"
    config.model = {
        **config.model, "num_hidden_layers": 3, "max_position_embeddings": 1024, "head_norm_init": 1.0,
    }  # fmt: skip
    config.data.corpus, config.data.max_bytes = corpus, 8_000_000
    config.data.mixture = {"text": 0.5, "needles": 0.5}
    config.data.needles.queries = (1, 2)
    config.train.steps, config.train.validate_every, config.train.checkpoint_every = 1500, 50, 250
    config.train.threads = 1
    config.evaluation = dataclasses.replace(
        config.evaluation,
        needles=((1, 1), (2, 1), (4, 1), (4, 2)),
        samples=50,
        recall_steps=0,
        more={
            "long_nll": {"samples": 12, "length": 512},
            "quantization": {"samples": 100, "rows": 64},
            "many_shot": {"samples": 24, "order_seeds": 5},
        },
    )
    return config


def stages(corpus: str) -> list[Stage]:
    """``corpus``: a folder or archive of novels (train/ and val/ inside), or any text."""
    plain = base(corpus)
    brief = _brief(plain)
    wide, long = _resized(brief, hidden_size=256, num_hidden_layers=4), _longer(brief, 3)
    maps4, pair, paper = _resized(brief, num_attention_heads=4), _some("softmax", "diff"), _some(*PAPER)

    def compared(name: str, config: RunConfig, seeds, sides: Mapping = pair, rates: Rate = "softmax") -> Stage:
        return Stage({name: config}, sides, seeds, rates)

    return [
        Stage({"": _longer(plain, 0.4)}, SIDES, (100,), LEARNING_RATES, "sweep/lr{rate:g}", (), final_loss),
        compared("novels", plain, MANY, paper, SWEPT),
        compared("novels", plain, MANY, SAME_RATE),
        compared("novels", plain, FEW, _some("diff_v2"), SWEPT),
        compared("ablation", brief, FEW, ABLATIONS),
        compared("maps4", maps4, FEW, _some("softmax")),
        compared("ablation", brief, FEW, NORMED),
        compared("python", _brief(base("python")), FEW),
        compared("narrow", _resized(brief, hidden_size=64, num_hidden_layers=2), FEW, paper),
        compared("maps4", maps4, FEW, _some("diff")),
        compared("maps16", _resized(brief, num_attention_heads=16), FEW),
        compared("ablation", brief, FEW, DIFF_RATE, "diff"),
        compared("ablation", brief, REST, {**NORMED, "softmax_wide_norm": ABLATIONS["softmax_wide_norm"]}),
        compared("wide", wide, FEW),
        compared("wide", wide, FEW, NORMED),
        compared("long", long, FEW),
        compared("wide", wide, FEW, _some("diff_norm1")),
        compared("long", long, FEW, _some("diff_norm1")),
        compared("long", long, FEW, NORMED),
    ]


def _some(*names: str) -> dict[str, dict[str, Any]]:
    return {name: SIDES[name] for name in names}


def _longer(config: RunConfig, times: float) -> RunConfig:
    config = copy.deepcopy(config)
    config.train.steps = round(config.train.steps * times)
    return config


def _resized(config: RunConfig, **fields) -> RunConfig:
    config = copy.deepcopy(config)
    config.model |= fields
    return config


def _brief(config: RunConfig) -> RunConfig:
    """``config`` without the two slowest experiments, quantisation and many-shot classification."""
    config = copy.deepcopy(config)
    config.evaluation.more = {"long_nll": config.evaluation.more["long_nll"]}
    return config
