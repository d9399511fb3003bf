"""Numbers of an experiment's rows, for tests."""

import numpy as np

from diff_transformer.evals.types import Result
from diff_transformer.lab.evaluate import run_eval
from diff_transformer.lab.rows import read_file


def mean(result, column="score", **where):
    """The mean of a column over the rows whose columns have the values ``where``."""
    where = {"experiment": result.experiment, **where}
    rows = [{"experiment": result.experiment, **row} for row in result.rows]
    chosen = [row[column] for row in rows if all(row.get(key) == value for key, value in where.items())]
    return float(np.mean([value for value in chosen if value is not None]))


def ratio(result, slice):
    """The mean loss of a slice of ``associative_recall``."""
    return sum(row[f"{slice}_sum"] for row in result.rows) / sum(row[f"{slice}_count"] for row in result.rows)


def measured(name, lm, settings, out, **more):
    """``run_eval``, with the rows and the facts of its file."""
    record = run_eval(name, lm, settings, out, **more)
    rows = [row for row in read_file(out) if row["experiment"] != "about"]
    return Result(name, rows, record.rows.about(name))
