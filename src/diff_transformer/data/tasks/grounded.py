"""Documents with a question, or to be summarised: the answer must be grounded in the document.

``load_grounded`` reads rows with the columns that the six sets of Table 4 have on the hub:

    XSum, MultiNews             {"document", "summary"}
    CNN/DailyMail               {"article", "highlights"}
    HotpotQA, 2WikiMultihopQA   {"question", "answer", "context"}, the context as columns or [[title, sentences], ...]
    Qasper                      {"title", "abstract", "full_text", "qas"}
    others                      {"document", "question", "answers"}
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from diff_transformer.data.seeding import evaluation_rng
from diff_transformer.data.tasks.python_tasks import lookups, summaries
from diff_transformer.data.tasks.rows import SUFFIXES, rows_of, stem_of
from diff_transformer.data.tasks.types import GroundedItem
from diff_transformer.errors import UserError

HUB = {  # name -> repository, configuration, split, revision
    "xsum": ("EdinburghNLP/xsum", None, "test", None),
    "cnn_dailymail": ("abisee/cnn_dailymail", "3.0.0", "test", None),
    "multi_news": ("alexfabbri/multi_news", None, "test", "refs/convert/parquet"),
    "qasper": ("allenai/qasper", None, "test", "refs/convert/parquet"),
    "hotpotqa": ("hotpotqa/hotpot_qa", "distractor", "validation", None),
    "2wikimultihopqa": ("framolfese/2WikiMultihopQA", None, "validation", None),
}
UNANSWERABLE = "unanswerable"
ACCEPTED = f"'python', 'hub:NAME' (NAME one of {', '.join(HUB)}, all, or OWNER/SET), or a file ({', '.join(SUFFIXES)})"


def load_grounded(data: str, *, samples: int | None = None, seed: int = 0) -> dict[str, list[GroundedItem]]:
    """The sets that ``data`` names, by name.

    Args:
        data: "python" (made from the running Python's documentation), "hub:xsum", "hub:all" (the six sets of Table 4),
            "hub:OWNER/SET", a file; or several of these, separated by commas.
        samples: items of each set, drawn by ``seed``; None for all, in their order.

    Raises:
        UserError: for a path that does not exist, an unknown format, or a set that cannot be downloaded.
    """
    sets: dict[str, list[GroundedItem]] = {}
    for source in filter(None, (part.strip() for part in data.split(","))):
        for name, items in _source(source, seed):
            if samples is not None:
                items = [items[i] for i in evaluation_rng(seed, "grounded", name).permutation(len(items))[:samples]]
            sets[name] = items
    if not sets:
        raise UserError(f"data is {data!r}; give {ACCEPTED}")
    return sets


def _source(source: str, seed: int) -> Iterator[tuple[str, list[GroundedItem]]]:
    if source == "python":
        yield "python_summaries", summaries(seed)
        yield "python_lookups", lookups(seed)
    elif source.startswith("hub:"):
        name = source.removeprefix("hub:")
        for each in HUB if name == "all" else [name]:
            repository, config, split, revision = HUB.get(each, (each, None, None, None))
            rows = rows_of(f"hub:{repository}", config=config, split=split, revision=revision)
            yield each.rsplit("/", 1)[-1], _items(rows, source)
    else:
        yield stem_of(Path(source)), _items(rows_of(source), source)


def _items(rows: list[dict], source: object) -> list[GroundedItem]:
    items = []
    for number, row in enumerate(rows):
        try:
            items += _row(row, str(row.get("id", row.get("_id", number))))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(
                f"row {number} of {source} cannot be read ({type(error).__name__}: {error}); accepted rows are "
                "{document, summary}, {article, highlights}, {document, question, answers}, {question, answer, "
                "context} and Qasper's, {full_text, qas}"
            ) from None
    return items


def _row(row: dict, name: str) -> list[GroundedItem]:
    if "qas" in row:
        return list(_paper(row, name))
    for document, summary in (("document", "summary"), ("article", "highlights")):
        if document in row and summary in row:
            # MultiNews separates the articles of a cluster by five bars.
            text = "\n\n".join(part.strip() for part in row[document].split("|||||") if part.strip())
            return [GroundedItem("summary", text, references=(row[summary].strip(),), id=name)]
    answers = row["answers"] if "answers" in row else row["answer"]
    answers = [answers] if isinstance(answers, str) else answers
    references = tuple(dict.fromkeys(answer.strip() for answer in answers if answer.strip()))
    if not references:
        raise ValueError("no answer")
    document = _passages(row["document"] if "document" in row else row["context"])
    return [GroundedItem("question", document, row["question"].strip(), references, id=name)]


def _passages(context: Any) -> str:
    """Titled paragraphs as text, from [[title, sentences], ...], {"title": [...], "sentences": [...]}, or text."""
    if isinstance(context, str) and context.lstrip().startswith(("[[", "{")):
        context = json.loads(context)
    if isinstance(context, str):
        return context.strip()
    pairs = context
    if isinstance(context, dict):
        pairs = zip(context["title"], context["sentences"], strict=True)
    return "\n\n".join(f"{title}\n{' '.join(s.strip() for s in sentences)}" for title, sentences in pairs)


def _paper(row: dict, name: str) -> Iterator[GroundedItem]:
    """The questions of a Qasper paper."""
    sections = zip(row["full_text"]["section_name"], row["full_text"]["paragraphs"], strict=True)
    parts = [row["title"], row["abstract"], *("\n".join([title or "", *paragraphs]) for title, paragraphs in sections)]
    document = "\n\n".join(part.strip() for part in parts if part.strip())
    asked = zip(row["qas"]["question"], row["qas"]["answers"], strict=True)
    for number, (question, answers) in enumerate(asked):
        references = tuple(dict.fromkeys(_paper_answer(answer) for answer in answers["answer"]))
        yield GroundedItem("question", document, question.strip(), references, id=f"{name}-{number}")


def _paper_answer(answer: dict) -> str:
    if answer["unanswerable"]:
        return UNANSWERABLE
    if answer["extractive_spans"]:
        return ", ".join(answer["extractive_spans"])
    return answer["free_form_answer"].strip() or ("yes" if answer["yes_no"] else "no")
