"""What ``backend="auto"`` means on a GPU in an exported model: what the package says if it is installed, else SDPA."""

from typing import Any

from diff_transformer.inference.export.portable.installed import installed
from diff_transformer.ops.call import Call


def look_up(call: Call) -> tuple[str, Any]:
    """The backend and its variant."""
    return ("sdpa", None) if installed() is None else ("triton", "auto")


def check_environment() -> None:
    """The package checks its own variables."""
