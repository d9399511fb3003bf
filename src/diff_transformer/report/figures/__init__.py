"""The figures of the page, in order. Each module builds one Figure from the results, or None without data."""

from diff_transformer.report import explorer
from diff_transformer.report.figures import (
    ablation,
    allocation,
    gradient_flow,
    hallucination,
    harness,
    lambdas,
    long_nll,
    loss_slices,
    losses,
    many_shot,
    needles,
    outliers,
    quantization,
    recall,
    scaling,
    throughput,
    variants,
)

IN_ORDER = (
    losses,
    variants,
    scaling,
    lambdas,
    long_nll,
    recall,
    needles,
    allocation,
    explorer,
    many_shot,
    outliers,
    quantization,
    loss_slices,
    ablation,
    harness,
    hallucination,
    gradient_flow,
    throughput,
)
