"""The figures of the page, in order. Each module turns the results into one Figure, or None without its data."""

from diff_transformer.report.figures import (
    allocation,
    explorer,
    lambdas,
    loss_slices,
    losses,
    needles,
    outliers,
    throughput,
)

IN_ORDER = (losses, lambdas, needles, allocation, explorer, outliers, loss_slices, throughput)
