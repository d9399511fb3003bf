"""The figures of the page, in order. Each module builds one Figure from the results, or None without data.

``build`` calls a module, so that a figure that fails does not take the page with it.
"""

import logging
from types import ModuleType

from diff_transformer.report import explorer
from diff_transformer.report.figure import Figure
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
from diff_transformer.report.load import ResultsError
from diff_transformer.report.markup import tag
from diff_transformer.report.models import Results

logger = logging.getLogger("diff_transformer")

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


def build(module: ModuleType, results: Results) -> Figure | None:
    """The figure of ``module``; if it cannot be drawn, a figure without charts that gives the error.

    Raises:
        ResultsError: if the results themselves cannot be shown.
    """
    try:
        return module.build(results)
    except ResultsError:
        raise
    except Exception as error:
        name = module.__name__.rpartition(".")[2]
        logger.warning("the figure %s cannot be drawn", name, exc_info=True)
        said = tag("p", f"This figure cannot be drawn: {type(error).__name__}: {error}", class_="small")
        return Figure(f"undrawn-{name}", name.replace("_", " ").capitalize(), (), "", said)
