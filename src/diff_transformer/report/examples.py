"""Single examples of an experiment as a table: prompt, expected, got, score, and what else a row holds."""

import json

from diff_transformer.report.markup import Html, table
from diff_transformer.report.numbers import number
from diff_transformer.report.series import Series

SHOWN = 120  # rows of an experiment, all models together
COLUMNS = 9
_FIRST = ("prompt", "expected", "got", "score")
_LONG, _SHORT = 320, 160  # characters of a prompt's end, and of any other text's beginning


def examples_table(models: list[Series]) -> tuple[Html, str] | None:
    """The table, and in words how many of how many rows it shows; None where no model has rows.

    The rows are spread evenly over what each model has, so that every part of the experiment is seen.
    """
    of = [(one, one.rows()) for one in models]
    total = sum(len(rows) for _, rows in of)
    if not total:
        return None
    chosen = [(one, row) for one, rows in of for row in _spread(rows, max(1, SHOWN // len(models)))]
    keys = list(dict.fromkeys(key for _, row in chosen for key in row))
    columns = [k for k in _FIRST if k in keys] + [k for k in keys if k not in _FIRST]
    head: list[object] = ["model", *columns[:COLUMNS]]
    body: list[list[object]] = [
        [one.label, *(_cell(row.get(key), key == "prompt") for key in columns[:COLUMNS])] for one, row in chosen
    ]
    words = f"{len(chosen)} of {total:,}" if len(chosen) < total else f"all {total:,}"
    return table(head, body, "Examples", numeric=False, class_="examples"), words


def _spread(rows: list[dict], count: int) -> list[dict]:
    if len(rows) <= count:
        return rows
    return [rows[len(rows) * i // count] for i in range(count)]


def _cell(value: object, is_prompt: bool) -> str:
    if value is None:
        return ""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return number(value)
    words = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if is_prompt:
        return words if len(words) <= _LONG else f"… {words[-_LONG:]}"
    return words if len(words) <= _SHORT else f"{words[:_SHORT]} …"
