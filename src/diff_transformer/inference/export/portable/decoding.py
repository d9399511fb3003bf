"""An exported model decodes through ``diff_attention``: it has no native call for a whole layer."""

from typing import Any

DecodeWeights = Any


def decode_head(*arguments) -> None:
    """No call for a whole head is available."""
