"""Memory that this process may still take on its machine."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

_LIMITS = {  # of a control group, version 1 and 2: the limit, what is used of it, what of that can be given back
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    "": ("memory.max", "memory.current", "inactive_file"),
}


def free_host_memory(root: Path = Path("/")) -> int:
    """Bytes that the machine has available, or fewer where a control group (a container's, say) leaves fewer.

    Where the system does not tell (it is no Linux), all of the machine's memory, or ``sys.maxsize``.
    """
    available = _values(root / "proc" / "meminfo").get("MemAvailable:")
    free = _physical() if available is None else 1024 * available
    return max(0, min([free, *_left_by_groups(root)]))


def _left_by_groups(root: Path) -> Iterator[int]:
    """What each control group around this process leaves."""
    for line in _lines(root / "proc" / "self" / "cgroup"):
        _, controllers, path = line.split(":", 2)
        kind = "memory" if "memory" in controllers.split(",") else controllers
        if kind not in _LIMITS:
            continue
        most, used, inactive = _LIMITS[kind]
        top = root / "sys" / "fs" / "cgroup" / kind
        group = top / path.lstrip("/")
        for folder in (group, *(parent for parent in group.parents if parent.is_relative_to(top))):
            limit, taken = _lines(folder / most), _lines(folder / used)
            if limit and taken and limit[0].isdigit() and taken[0].isdigit():
                yield int(limit[0]) - int(taken[0]) + _values(folder / "memory.stat").get(inactive, 0)


def _physical() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return sys.maxsize


def _values(path: Path) -> dict[str, int]:
    """``NAME NUMBER`` a line."""
    pairs = (line.split() for line in _lines(path))
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) > 1 and pair[1].isdigit()}


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
