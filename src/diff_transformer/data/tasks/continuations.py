"""Texts with four endings, of which one is right: rows of HellaSwag; offline, descriptions of names of Python."""

import re

from diff_transformer.data.seeding import evaluation_rng
from diff_transformer.data.tasks.python_tasks import descriptions
from diff_transformer.data.tasks.rows import rows_of
from diff_transformer.data.tasks.types import MultipleChoiceItem
from diff_transformer.errors import UserError


def load_continuations(data: str, *, seed: int = 0) -> list[MultipleChoiceItem]:
    """The tasks that ``data`` names: those of a file in its order, others in an order drawn by ``seed``.

    Args:
        data: "python" (``descriptions``); a file of HellaSwag's rows; or "hub:NAME", such as "hub:Rowan/hellaswag".

    Raises:
        UserError: for a path that does not exist, another format, or a set on the hub that cannot be downloaded.
    """
    if data == "python":
        return descriptions(seed)
    hub = data.startswith("hub:")
    items = [_item(row, data) for row in rows_of(data, split="validation" if hub else None)]
    return [items[i] for i in evaluation_rng(seed, "order").permutation(len(items))] if hub else items


def _item(row: dict, source: str) -> MultipleChoiceItem:
    try:
        context = f"{row['activity_label']}: {row['ctx']}" if row.get("activity_label") else row["ctx"]
        endings, label = tuple(map(_clean, row["endings"])), int(row["label"])
        return MultipleChoiceItem(_clean(context), endings, range(len(endings)).index(label))
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise UserError(
            f"a row of {source} is not in the format of HellaSwag, {{ctx, endings, label}} ({error!r})"
        ) from None


def _clean(text: str) -> str:
    """HellaSwag's WikiHow texts without markup: "[title]" becomes the end of a sentence, other brackets are removed."""
    text = re.sub(r"\s*\[(?:title|header)\]\s*", ". ", text.strip())
    text = re.sub(r"\[[^\]]*\]", "", text)
    return re.sub(r"\s{2,}", " ", text).strip().removeprefix(". ")
