"""Questions with choices: published sets, rows of one simple format, and tasks from Python's documentation.

published   rows of ARC, BoolQ, HellaSwag, OpenBookQA, PIQA or WinoGrande, with the columns of the set on the hub; of
            ARC and OpenBookQA also as they are published: {"question": {"stem", "choices": [...]}, "answerKey": "B"}
simple      {"question": "...", "choices": ["...", ...], "answer": 0}, the answer as an index from 0, as a letter from
            A, or as the choice itself

lm-evaluation-harness asks published questions by its own task (``evals/harness.py``).
"""

import re
from pathlib import Path
from typing import Any

from diff_transformer.data.tasks.files import SUFFIXES, as_rows, read_records, stem
from diff_transformer.data.tasks.python_tasks import descriptions, names
from diff_transformer.data.tasks.types import MultipleChoiceItem, MultipleChoiceSet, PublishedSet
from diff_transformer.errors import UserError

ACCEPTED = f"'python', or a file ({', '.join(SUFFIXES)}) or a folder of them"
_PART = re.compile(r"(?i)(?:^|[-_. ])(train|dev|val|valid|validation|test)$")
_SHOTS_FROM = ("train", "dev", "val", "valid", "validation")
# The harness's task of a published set, by a column that other sets do not have.
_TASKS = {
    "endings": "hellaswag", "goal": "piqa", "passage": "boolq", "option1": "winogrande", "question_stem": "openbookqa",
    "answerKey": "arc_easy",
}  # fmt: skip


def load_multiple_choice(data: str, *, seed: int = 0) -> dict[str, MultipleChoiceSet | PublishedSet]:
    """The tasks that ``data`` names, by name.

    Args:
        data: "python" (made from the running Python's documentation), a file, or a folder. In a folder, files whose
            names differ only in -Train, -Dev, -Test (or val, valid, validation) are parts of one task: the last part
            with answers is scored, and few-shot examples come from the first.

    Raises:
        FileNotFoundError: for a path that does not exist.
        ValueError: for an unknown format, naming the known ones, or two files of one name.
    """
    if data == "python":
        return {"python_descriptions": _halved(descriptions(seed)), "python_names": _halved(names(seed))}
    path = Path(data)
    if path.is_file():
        return {stem(path): _task(stem(path), {"": path})}
    if not path.is_dir():
        raise UserError(f"data {data!r} does not exist; give {ACCEPTED}")
    parts: dict[str, dict[str, Path]] = {}
    for file in sorted(path.iterdir()):
        if file.name.lower().endswith(SUFFIXES):
            part = _PART.search(stem(file))
            task = parts.setdefault(_PART.sub("", stem(file)) or path.resolve().name, {})
            of = part[1].lower() if part else ""
            if of in task:
                raise UserError(f"{task[of]} and {file.name} are the same part of one task; rename or remove one")
            task[of] = file
    if not parts:
        raise UserError(f"the folder {data} holds no file that is read; give {ACCEPTED}")
    return {name: _task(name, files) for name, files in parts.items()}


def _task(name: str, files: dict[str, Path]) -> MultipleChoiceSet | PublishedSet:
    order = [part for part in ("", "test", *reversed(_SHOTS_FROM)) if part in files]
    rows = {part: as_rows(read_records(files[part]), files[part]) for part in order}
    answered = [part for part in order if not _unanswered(rows[part])] or order[:1]
    scored, shots = answered[0], [part for part in _SHOTS_FROM if part in answered[1:]][:1]
    column = next((key for key in _TASKS if key in (rows[scored] or [{}])[0]), None)
    if column is None:
        parts = [_each(_simple, rows[part], files[part]) for part in (scored, *shots)]
        return MultipleChoiceSet(*parts)
    task = "openbookqa" if "openbook" in name.lower() else _TASKS[column]
    return PublishedSet(task, *(_each(_columns, rows[part], files[part]) for part in (scored, *shots)))


def _unanswered(rows: list[dict]) -> bool:
    """True for rows of a published set without right answers, as of a test that its authors score themselves."""
    known = [row.get(key) for row in rows[:1] for key in ("label", "answer", "answerKey")]
    return bool(rows) and all(answer in (None, "") for answer in known)


def _halved(items: list[MultipleChoiceItem]) -> MultipleChoiceSet:
    """Keep a quarter of the items as few-shot examples, so that no prompt shows the answer to a later question."""
    kept = len(items) - len(items) // 4
    return MultipleChoiceSet(items[:kept], items[kept:])


def _each(read, rows: list[dict], file: Path) -> list:
    """``read`` of every row; ValueError for a row that it does not read, naming the row, the file and the formats."""
    items = []
    for number, row in enumerate(rows):
        try:
            items.append(read(row))
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise UserError(
                f"row {number} of {file} cannot be read ({type(error).__name__}: {error}); accepted rows are "
                "{question, choices, answer}, and those of ARC, BoolQ, HellaSwag, OpenBookQA, PIQA and WinoGrande with "
                "the columns that the sets have on the hub"
            ) from None
    return items


def _columns(row: dict) -> dict:
    """A published row with the hub's columns."""
    if "endings" in row:
        context = {"ctx_a": row["ctx"], "ctx_b": ""} if "ctx_a" not in row else {}
        return {"activity_label": "", **row, **context, "label": str(_place(int(row["label"]), row["endings"]))}
    if "passage" in row:
        return {**row, "label": int(row["label"] if "label" in row else row["answer"])}
    if "goal" in row:
        return {**row, "label": _place(int(row["label"]), [row["sol1"], row["sol2"]])}
    if "option1" in row:
        if not row["sentence"].partition("_")[2].strip():
            raise UserError(f"the sentence {row['sentence']!r} has no _ with text after it")
        return row
    question: Any = row.get("question_stem", row.get("question"))
    choices: Any = row.get("choices")
    if isinstance(question, dict):
        question, choices = question["stem"], question["choices"]
    if isinstance(choices, list):
        choices = {key: [choice[key] for choice in choices] for key in ("text", "label")}
    if row["answerKey"] not in choices["label"]:
        raise UserError(f"the answer {row['answerKey']!r} is none of {', '.join(choices['label'])}")
    return {"question": question, "question_stem": question, "choices": choices, "answerKey": row["answerKey"]}


def _simple(row: dict) -> MultipleChoiceItem:
    question, choices = row["question"], row["choices"]
    if not isinstance(question, str) or not question.strip() or not all(isinstance(c, str) and c for c in choices):
        raise UserError("the question and the choices must be texts that are not empty")
    return MultipleChoiceItem(question.strip(), tuple(choices), _place(row["answer"], choices))


def _place(answer: int | str, choices: list[str]) -> int:
    letters = [chr(ord("A") + place) for place in range(len(choices))]
    if isinstance(answer, str):
        if answer in choices:
            return choices.index(answer)
        if answer.strip().upper() in letters:
            return letters.index(answer.strip().upper())
        if not answer.strip().isdigit():
            raise UserError(f"the answer {answer!r} is none of the {len(choices)} choices, nor their place or letter")
        answer = int(answer)
    if isinstance(answer, bool) or not 0 <= answer < len(choices):
        raise UserError(f"the answer {answer!r} is not a place among {len(choices)} choices")
    return answer
