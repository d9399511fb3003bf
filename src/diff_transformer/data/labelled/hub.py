"""Labelled sets from the Hugging Face hub, through the ``datasets`` package where it is installed."""

from typing import Any

from diff_transformer.data.labelled.tables import LABEL_COLUMNS, TEXT_COLUMNS, from_pairs
from diff_transformer.data.labelled.trec import trec_words
from diff_transformer.data.labelled.types import Labelled, LabelledSet, make_example

SETS = {  # name -> repository, configuration, label column
    "trec": ("CogComp/trec", None, "coarse_label"),
    "trec-fine": ("CogComp/trec", None, "fine_label"),
    "banking77": ("PolyAI/banking77", None, "label"),
    "clinic150": ("clinc/clinc_oos", "plus", "intent"),
    "clinic150-small": ("clinc/clinc_oos", "small", "intent"),
}
_CONVERTED = "refs/convert/parquet"  # where the hub keeps sets whose loading script is no longer run


def load_hub_labelled(name: str) -> LabelledSet:
    """The set ``name``: one of ``SETS``, or ``OWNER/NAME`` with a text and a label column, ``:CONFIG`` behind it.

    Raises:
        ValueError: without the ``datasets`` package or the network (saying what to do), for a set without a "train" and
            a "test" (or "validation") side, or without a text and a label column.
    """
    repository, config, column = SETS[name] if name in SETS else (*_split(name), None)
    sides = _download(repository, config)
    asked = next((side for side in ("test", "validation") if side in sides), None)
    if "train" not in sides or asked is None:
        raise ValueError(f"{repository} has the sides {', '.join(sides)}; it needs train, and test or validation")
    train, test = (_examples(sides[side], column, repository) for side in ("train", asked))
    names = ("Question", "Type") if repository == "CogComp/trec" else ("Query", "Intent")
    return LabelledSet(f"hub:{name}", tuple(train), tuple(test), *(names if name in SETS else ("Text", "Label")))


def _split(name: str) -> tuple[str, str | None]:
    repository, _, config = name.partition(":")
    if "/" not in repository:
        raise ValueError(f"no labelled set hub:{name}; there are: {', '.join(SETS)}, or OWNER/NAME[:CONFIG]")
    return repository, config or None


def _download(repository: str, config: str | None) -> Any:
    try:
        from datasets import load_dataset
    except ImportError:
        raise ValueError("a set from the hub needs the package datasets: pip install datasets") from None
    try:
        try:
            return load_dataset(repository, config)
        except RuntimeError as error:
            if "script" not in str(error):
                raise
            return load_dataset(repository, config, revision=_CONVERTED)
    except (OSError, ValueError, RuntimeError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"{repository} cannot be had from the hub ({reason}); connect to the network once, after which it is "
            "cached, or give the path of the files, or data=python"
        ) from error


def _examples(rows: Any, column: str | None, where: str) -> list[Labelled]:
    columns = list(rows.column_names)
    text = next((name for name in TEXT_COLUMNS if name in columns), None)
    label = column if column in columns else next((name for name in LABEL_COLUMNS if name in columns), None)
    if text is None or label is None:
        raise ValueError(f"{where} has the columns {', '.join(columns)}; it needs a text and a label")
    names = getattr(rows.features[label], "names", None)
    labels = [names[value] if names and isinstance(value, int) else str(value) for value in rows[label]]
    if label in ("coarse_label", "fine_label"):
        fine = label == "fine_label"
        return [make_example(t, trec_words(code, fine=fine)) for t, code in zip(rows[text], labels, strict=True)]
    return from_pairs(zip(rows[text], labels, strict=True), where)
