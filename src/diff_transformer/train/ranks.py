"""The agreement of a run's processes: which of them prints and writes, and what each of them says.

This module imports no PyTorch at the top, so that commands that only ask for ``is_first`` start fast.
"""

import os
from collections.abc import Callable
from typing import Any


def is_first() -> bool:
    """True if this is rank 0 of the processes that torchrun started, or a process alone: the one that prints."""
    return os.environ.get("RANK", "0") == "0"


def on_first_rank(fabric, action: Callable[[], Any]) -> Any:
    """Call ``action`` on rank 0 alone; return its result, or raise its exception, on every rank."""
    if getattr(fabric, "world_size", 1) == 1:
        return action()
    outcome = None
    if fabric.is_global_zero:
        try:
            outcome = action()
        except Exception as error:
            outcome = error
    outcome = fabric.broadcast(outcome)
    if isinstance(outcome, Exception):
        raise outcome
    return outcome
