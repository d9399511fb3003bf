"""The seven rows of Table 6 as configurations, at the scale of any recipe."""

import copy
from typing import Any

from diff_transformer.train.config import RunConfig

# name -> (how the paper's table calls it, whether heads are twice as wide and half as many, fields of the model)
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
    """Seven runs that differ in their attention alone, by name, in the order of Table 6 [arXiv 2410.05258, sec. 3.8].

    Heads, sizes, data, steps, seed and learning rate are those of ``base``; its attention, head norm and lambda_init
    are not. All seven have the same matrices, so parameters agree to within lambda and the head norm.

    Raises:
        ValueError: if a row's configuration cannot be, as with an odd number of heads.
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
        made: dict[str, Any] = run.model
        DiffTransformerConfig(**made)
        runs[name] = run.validate()
    return runs
