"""An exported model decodes through ``diff_attention``: it has no native call for a whole layer."""

from typing import Any

MAX_DECODE_ROWS = 0  # the largest number of queries for which the native call is tried
Head = Any


def supports(*arguments) -> bool:
    """Whether the native call can compute these arguments: never."""
    return False


def decode(*arguments):
    """Never called, since ``supports`` is False."""
    raise NotImplementedError("an exported model has no native call for a whole layer; call diff_attention")
