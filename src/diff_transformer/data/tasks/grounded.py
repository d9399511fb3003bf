"""Documents with a question, or to be summarised: the answer must be grounded in the document.

``load_grounded`` reads rows with these columns. Of the sets of Table 4 these have them on the hub:
``EdinburghNLP/xsum``, ``abisee/cnn_dailymail``, ``alexfabbri/multi_news``, ``hotpotqa/hotpot_qa`` and
``framolfese/2WikiMultihopQA``.

    {"document", "summary"}, {"article", "highlights"}
    {"document", "question", "answers"}
    {"question", "answer", "context"}, the context as text, as columns or as [[title, sentences], ...]

Answers are a text, a list of texts, or {"text": [...]} as in SQuAD.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from diff_transformer.data.seeding import evaluation_rng
from diff_transformer.data.tasks.python_tasks import lookups, summaries
from diff_transformer.data.tasks.rows import SUFFIXES, rows_of, stem_of
from diff_transformer.data.tasks.types import GroundedItem
from diff_transformer.errors import UserError

UNANSWERABLE = "unanswerable"
ACCEPTED = f"'python', 'hub:OWNER/SET[?config=...&split=...]', or a file ({', '.join(SUFFIXES)})"


def load_grounded(data: str, *, samples: int | None = None, seed: int = 0) -> dict[str, list[GroundedItem]]:
    """The sets that ``data`` names, by the name of the file or set, or by the whole source for a second of one name.

    Args:
        data: "python" (made from the running Python's documentation), "hub:OWNER/SET", a file; or several of these,
            separated by commas.
        samples: items of each set, drawn by ``seed``; None for all, in their order.

    Raises:
        UserError: for a path that does not exist, an unknown format, or a set that cannot be downloaded.
    """
    sets: dict[str, list[GroundedItem]] = {}
    for source in filter(None, (part.strip() for part in data.split(","))):
        for name, items in _source(source, seed):
            if samples is not None:
                items = [items[i] for i in evaluation_rng(seed, "grounded", name).permutation(len(items))[:samples]]
            sets[source if name in sets else name] = items
    if not sets:
        raise UserError(f"data is {data!r}; give {ACCEPTED}")
    return sets


def _source(source: str, seed: int) -> Iterator[tuple[str, list[GroundedItem]]]:
    if source == "python":
        yield "python_summaries", summaries(seed)
        yield "python_lookups", lookups(seed)
    else:
        yield stem_of(Path(source.partition("?")[0])), _items(rows_of(source), source)


def _items(rows: list[dict], source: str) -> list[GroundedItem]:
    items = []
    for number, row in enumerate(rows):
        try:
            items.append(_item(row))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(
                f"row {number} of {source} cannot be read ({type(error).__name__}: {error}); accepted rows are "
                "{document, summary}, {article, highlights}, {document, question, answers} and {question, answer, "
                "context}"
            ) from None
    return items


def _item(row: dict) -> GroundedItem:
    for document, summary in (("document", "summary"), ("article", "highlights")):
        if document in row and summary in row:
            return GroundedItem("summary", row[document].strip(), references=(row[summary].strip(),))
    answers = row["answers"] if "answers" in row else row["answer"]
    answers = answers["text"] if isinstance(answers, dict) else answers
    answers = [answers] if isinstance(answers, str) else answers
    references = tuple(dict.fromkeys(answer.strip() for answer in answers if answer.strip()))
    if not references:
        raise ValueError("no answer")
    document = _passages(row["document"] if "document" in row else row["context"])
    return GroundedItem("question", document, row["question"].strip(), references)


def _passages(context: Any) -> str:
    """Titled paragraphs as text, from [[title, sentences], ...], {"title": [...], "sentences": [...]}, or text."""
    if isinstance(context, str):
        return context.strip()
    pairs = zip(context["title"], context["sentences"], strict=True) if isinstance(context, dict) else context
    return "\n\n".join(f"{title}\n{' '.join(s.strip() for s in sentences)}" for title, sentences in pairs)
