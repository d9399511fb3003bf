"""Whether a model got all of its weights from its files: transformers fills what is missing with random numbers."""

import logging
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

from diff_transformer.checks import listed


def require_all_weights(name: object, model: Any, found: Mapping[str, Any]) -> None:
    """Check that nothing of ``model``, read from ``name``, is as it was initialised.

    Weights that are tied to others and those that the model's class can do without are not missing.

    Args:
        found: what ``from_pretrained`` gives with ``output_loading_info``.

    Raises:
        ValueError: with the first of the weights that are missing or of another shape, and how many there are.
    """
    wrong = misfits(found, unexpected=False)
    if wrong:
        raise ValueError(
            f"the weights in {name} are not all of those that {type(model).__name__} has by its config.json: {wrong}. "
            "They would be random; give a causal language model with the config.json and all the files that it was "
            "saved with"
        )


def misfits(found: Mapping[str, Any], *, unexpected: bool = True) -> str:
    """What ``from_pretrained`` found missing, of another shape and, with ``unexpected``, not of the model, in words."""
    shapes = [f"{key} {tuple(there)} (expected {tuple(here)})" for key, there, here in found["mismatched_keys"]]
    kinds = {"missing": found["missing_keys"], "of another shape": shapes}
    if unexpected:
        kinds["not of the model"] = found["unexpected_keys"]
    return "; ".join(f"{len(names)} {kind}: {listed(sorted(names))}" for kind, names in kinds.items() if names)


@contextmanager
def reports_held_back() -> Generator[list[logging.LogRecord]]:
    """In the context what transformers reports of its loading is kept in the list; what is left there at the end is
    said then."""
    logger, records = logging.getLogger("transformers.modeling_utils"), []

    def keep(record: logging.LogRecord) -> bool:
        records.append(record)
        return False

    logger.addFilter(keep)
    try:
        yield records
    finally:
        logger.removeFilter(keep)
        for record in records:
            logger.handle(record)
