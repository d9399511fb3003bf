"""Rows of a data set on the Hugging Face hub, through ``datasets``, which is imported at the first use."""

from typing import Any, cast

from diff_transformer.errors import UserError

SPLITS = ("test", "validation", "dev", "train")


def hub_rows(
    repository: str, configuration: str | None = None, *, split: str | None = None, revision: str | None = None
) -> list[dict]:
    """All rows of one split of ``repository``: ``split``, or else the first existing one of test, validation, train.

    Raises:
        ValueError: if ``datasets`` is not installed, or the set is not cached and cannot be downloaded.
    """
    try:
        import datasets
    except ImportError:
        raise UserError(
            f"reading {repository} from the hub needs `pip install datasets`; or give the set as a local file"
        ) from None
    try:
        found = cast(Any, datasets.load_dataset(repository, configuration, split=split, revision=revision))
    except Exception as error:  # the type depends on the library's version and on where it fails
        raise UserError(
            f"{repository} is not in the cache of `datasets` and cannot be downloaded "
            f"({type(error).__name__}: {(str(error) or 'no reason given').splitlines()[0]}); connect this machine, or "
            "give the set as a local file, or data=python"
        ) from error
    if split is None:
        names = [name for name in SPLITS if name in found] or list(found)
        found = found[names[0]]
    return list(found)
