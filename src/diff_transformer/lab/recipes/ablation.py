"""The seven rows of Table 6 as configurations at the scale of any recipe, and as the study ``ablation``."""

import copy
from typing import TYPE_CHECKING, Any

from diff_transformer.train.config import RunConfig

if TYPE_CHECKING:
    from diff_transformer.lab.stages import Stage

# name -> (name in the paper's table, whether heads are twice as wide and half as many, fields of the model)
ROWS: dict[str, tuple[str, bool, dict]] = {
    "transformer": ("Transformer", False, {"attention": "softmax"}),
    "transformer_wide": ("Transformer, half the heads, twice as wide", True, {"attention": "softmax"}),
    "transformer_wide_norm": (
        "Transformer, half the heads, twice as wide, head norm", True,
        {"attention": "softmax", "softmax_head_norm": True},
    ),
    "diff": ("DIFF", False, {}),
    "diff_no_norm": ("DIFF without head norm", False, {"head_norm": False, "head_norm_init": 1.0}),
    "diff_lambda_0.8": ("DIFF, lambda_init 0.8", False, {"lambda_init": 0.8}),
    "diff_lambda_0.5": ("DIFF, lambda_init 0.5", False, {"lambda_init": 0.5}),
}  # fmt: skip


def ablation_rows(base: RunConfig) -> dict[str, RunConfig]:
    """Seven runs that differ only in attention, by name, in the order of Table 6 [arXiv 2410.05258, sec. 3.8].

    Heads, sizes, data, steps, seed and learning rate come from ``base``; each row sets its own attention, head norm and
    lambda_init. All seven have the same matrices, so their parameter counts differ only by lambda and the head norm.

    Raises:
        ValueError: if a row's configuration is invalid, for example with an odd number of heads.
    """
    from diff_transformer.model.config import DiffTransformerConfig

    runs = {}
    for name, (_, wide, fields) in ROWS.items():
        run = copy.deepcopy(base)
        run.name = f"{base.name}-{name}"
        run.model = {**base.model, "attention": "diff", "head_norm": True, "lambda_init": "depth", **fields}
        if wide:
            given: dict[str, Any] = {**base.model, "attention": "diff"}
            plain = DiffTransformerConfig(**given)
            assert plain.num_key_value_heads is not None  # set by the configuration itself
            assert plain.head_dim is not None
            run.model |= {
                "num_attention_heads": plain.num_attention_heads // 2,
                "num_key_value_heads": plain.num_key_value_heads // 2,
                "head_dim": 2 * plain.head_dim,
            }
        model: dict[str, Any] = run.model
        DiffTransformerConfig(**model)
        runs[name] = run
    return runs


def stages(corpus: str) -> "list[Stage]":
    """The study of Table 6 at the demo's scale: every row with three seeds, its loss split into AR-Hit and Others."""
    from diff_transformer.lab.recipes.desk import demo
    from diff_transformer.lab.stages import Stage

    base = demo()
    base.data.corpus = corpus
    base.evaluation.recall_steps = 0
    sides = {name.replace("transformer", "softmax"): run.model for name, run in ablation_rows(base).items()}
    return [Stage({"ablation": base}, sides, range(3), measure=("associative_recall",))]
