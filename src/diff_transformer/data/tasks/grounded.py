"""Documents with a question, or to be summarised: the answer must be grounded in the document.

``load_grounded`` reads the six sets of Table 4 as they are published:

    XSum, MultiNews             {"document", "summary"}
    CNN/DailyMail               {"article", "highlights"}
    HotpotQA, 2WikiMultihopQA   {"question", "answer", "context"}, the context as [[title, sentences], ...] or columns;
                                and few-shot prompt files (.txt: "Wikipedia Title:" paragraphs, "Q:", "A:")
    Qasper                      papers by id with "full_text" and "qas", or the rows of the hub
    anything else               {"document", "question", "answers"}, or without a question: {"document", "summary"}
"""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from diff_transformer.checks import require_positive
from diff_transformer.data.seeding import evaluation_rng
from diff_transformer.data.tasks.files import SUFFIXES, as_rows, read_records, read_text, stem
from diff_transformer.data.tasks.hub import hub_rows
from diff_transformer.data.tasks.python_tasks import lookups, summaries
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
ACCEPTED = (
    f"'python', 'hub:NAME' (NAME one of {', '.join(HUB)}, all, or OWNER/SET), or a file ({', '.join(SUFFIXES)}; .txt "
    "of prompts) or a folder of them"
)


def load_grounded(data: str, *, samples: int | None = None, seed: int = 0) -> dict[str, list[GroundedItem]]:
    """The sets that ``data`` names, by name.

    Args:
        data: "python" (made from the running Python's documentation), "hub:xsum", "hub:all" (the six sets of Table 4),
            "hub:OWNER/SET", a file, a folder of files; or several of these, separated by commas.
        samples: items of each set, drawn by ``seed``; None for all, in their order.

    Raises:
        FileNotFoundError: for a path that does not exist.
        ValueError: for an unknown format, naming the known ones, or a set that cannot be downloaded.
    """
    require_positive(samples=samples)
    sets: dict[str, list[GroundedItem]] = {}
    for source in filter(None, (part.strip() for part in data.split(","))):
        for name, items in _source(source, seed):
            if name in sets:
                raise UserError(f"two sets are called {name!r} in {data!r}; rename one of the files")
            if not items:
                raise UserError(f"{source} holds no items; give {ACCEPTED}")
            sets[name] = items if samples is None else _draw(items, samples, seed, name)
    if not sets:
        raise UserError(f"data is {data!r}; give {ACCEPTED}")
    return sets


def _draw(items: list[GroundedItem], samples: int, seed: int, name: str) -> list[GroundedItem]:
    order = evaluation_rng(seed, "grounded", name).permutation(len(items))
    return [items[i] for i in order[:samples]]


def _source(source: str, seed: int) -> Iterator[tuple[str, list[GroundedItem]]]:
    if source == "python":
        yield "python_summaries", summaries(seed)
        yield "python_lookups", lookups(seed)
    elif source.startswith("hub:"):
        name = source.removeprefix("hub:")
        for each in HUB if name == "all" else [name]:
            repository, configuration, split, revision = HUB.get(each, (each, None, None, None))
            rows = hub_rows(repository, configuration, split=split, revision=revision)
            yield each.rsplit("/", 1)[-1], _items(rows, source)
    elif Path(source).is_dir():
        files = sorted(p for p in Path(source).iterdir() if p.name.lower().endswith((*SUFFIXES, ".txt")))
        if not files:
            raise UserError(f"the folder {source} holds none of {', '.join(SUFFIXES)}, .txt; give {ACCEPTED}")
        for path in files:
            yield stem(path), _file(path)
    elif Path(source).exists():
        yield stem(source), _file(Path(source))
    else:
        raise UserError(f"data {source!r} does not exist; give {ACCEPTED}")


def _file(path: Path) -> list[GroundedItem]:
    if path.name.lower().endswith(".txt"):
        return list(_prompts(read_text(path), path))
    value = read_records(path)
    if isinstance(value, dict) and all(isinstance(paper, dict) and "qas" in paper for paper in value.values()):
        value = [{"id": paper_id, **paper} for paper_id, paper in value.items()]  # Qasper as published
    return _items(as_rows(value, path), path)


def _items(rows: Iterable[dict], source: object) -> list[GroundedItem]:
    items = []
    for number, row in enumerate(rows):
        try:
            items += _row(row, str(row.get("id", row.get("_id", number))))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            raise UserError(
                f"row {number} of {source} cannot be read ({reason}); accepted rows are {_FORMATS}"
            ) from None
    return items


_FORMATS = (
    "{document, summary}, {article, highlights}, {document, question, answers}, {question, answer, context} and "
    "{full_text, qas}"
)


def _row(row: dict, name: str) -> list[GroundedItem]:
    if "qas" in row:
        return list(_paper(row, name))
    for document, summary in (("document", "summary"), ("article", "highlights")):
        if document in row and summary in row:
            return [GroundedItem("summary", _joined(row[document]), references=(row[summary].strip(),), id=name)]
    document = row.get("document", row.get("context"))
    if document is None or "question" not in row:
        raise UserError(f"it has the fields {', '.join(sorted(row)) or 'none'}")
    return [GroundedItem("question", _passages(document), row["question"].strip(), _answers(row), id=name)]


def _joined(document: str) -> str:
    """A document as one text; MultiNews separates the articles of a cluster by five bars."""
    return "\n\n".join(part.strip() for part in document.split("|||||") if part.strip())


def _answers(row: dict) -> tuple[str, ...]:
    answers = row.get("answers", row.get("answer"))
    answers = [answers] if isinstance(answers, str) else answers
    if not answers or not all(isinstance(answer, str) and answer.strip() for answer in answers):
        raise UserError("it has no answers as text")
    return tuple(dict.fromkeys(answer.strip() for answer in answers))


def _passages(context: Any) -> str:
    """Titled paragraphs as text, from [[title, sentences], ...], {"title": [...], "sentences": [...]}, or text."""
    if isinstance(context, str) and context.lstrip().startswith(("[[", "{")):
        context = json.loads(context)
    if isinstance(context, str):
        return context.strip()
    if isinstance(context, dict):
        pairs = zip(context["title"], context["sentences"], strict=True)
    else:
        pairs = [(part["title"], part["sentences"]) if isinstance(part, dict) else part for part in context]
    return "\n\n".join(f"{title}\n{' '.join(s.strip() for s in sentences)}" for title, sentences in pairs)


def _paper(row: dict, name: str) -> Iterator[GroundedItem]:
    """The questions of a Qasper paper."""
    parts = [row.get("title") or "", row.get("abstract") or ""]
    parts += ["\n".join([title or "", *paragraphs]) for title, paragraphs in _sections(row["full_text"])]
    document = "\n\n".join(part.strip() for part in parts if part.strip())
    for number, (question, answers) in enumerate(_asked(row["qas"])):
        references = tuple(dict.fromkeys(_paper_answer(answer) for answer in answers))
        yield GroundedItem("question", document, question.strip(), references, id=f"{name}-{number}")


def _sections(full_text: Any) -> list[tuple[str | None, list[str]]]:
    """Title and paragraphs of each section, from a list as published or the hub's columns."""
    if isinstance(full_text, dict):
        return list(zip(full_text["section_name"], full_text["paragraphs"], strict=True))
    return [(section["section_name"], section["paragraphs"]) for section in full_text]


def _asked(qas: Any) -> list[tuple[str, list[dict]]]:
    """Each question with its annotators' answers, from a list as published or the hub's columns."""
    if isinstance(qas, dict):
        return [(q, answers["answer"]) for q, answers in zip(qas["question"], qas["answers"], strict=True)]
    return [(asked["question"], [each["answer"] for each in asked["answers"]]) for asked in qas]


def _paper_answer(answer: dict) -> str:
    if answer["unanswerable"]:
        return UNANSWERABLE
    if answer["extractive_spans"]:
        return ", ".join(answer["extractive_spans"])
    if answer["free_form_answer"]:
        return answer["free_form_answer"].strip()
    return "yes" if answer["yes_no"] else "no"


def _prompts(text: str, path: Path) -> Iterator[GroundedItem]:
    """The items of a file of few-shot prompts: titled paragraphs, ``Q: ...``, ``A: ... So the answer is: ...``."""
    blocks = re.split(r"(?m)^# METADATA:.*\n", text)[1:] or [text]
    for number, block in enumerate(blocks):
        found = re.search(r"(?ms)^Q: (?P<question>.+?)\n+A: (?P<answer>.+)", block)
        if found is None:
            raise UserError(f"prompt {number} of {path} has no lines 'Q: ...' and 'A: ...'; give {ACCEPTED}")
        document = re.sub(r"(?m)^Wikipedia Title: ", "", block[: found.start()]).strip()
        answer = found["answer"].strip().rsplit("the answer is:", 1)[-1].strip().removesuffix(".")
        yield GroundedItem("question", document, found["question"].strip(), (answer,), id=str(number))
