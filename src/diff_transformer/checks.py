"""Checks of sizes, names and settings, with messages that say what is accepted."""

import difflib
import importlib.util
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from diff_transformer.errors import UserError

MAX_SEED = 2**32 - 1
LOWEST_TEMPERATURE = 1e-5  # below it the likeliest token is taken: logits over less exceed what fp32 holds
_SHOWN = 8  # names in a message, at most


def require_positive(**sizes: float | None) -> None:
    """Raise UserError for the first of ``sizes`` that is neither positive nor None."""
    for name, value in sizes.items():
        if value is not None and not value > 0:
            raise UserError(f"{name} is {value}; it must be positive")


def read_json(path: Path, advice: str = "restore it from a copy") -> Any:
    """The value of a JSON file.

    Raises:
        FileNotFoundError: if there is none.
        UserError: if it is not JSON in UTF-8, or nested too deeply; ends with ``advice``.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as reason:
        raise UserError(f"{path} is not JSON ({first_line(reason)}); {advice}") from None


def listed(names: Sequence[str]) -> str:
    """Names for a message: the first few, and how many more."""
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def first_line(error: BaseException) -> str:
    """The first line of another library's exception, with its type if the text alone does not explain it."""
    if type(error).__name__.startswith("StrictDataclass") and error.__cause__:  # of huggingface_hub
        error = error.__cause__
    kind, text = type(error).__name__, str(error).strip()
    if not text:
        return kind
    line = text.splitlines()[0]
    return f"{kind}: {line}" if isinstance(error, LookupError | AttributeError | TypeError) else line


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """`` (did you mean 'demo'?)`` if ``name`` is close to one of ``known``; else an empty string."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f" (did you mean {near[0]!r}?)" if near else ""


def require_device(device: str) -> None:
    """Raise UserError unless PyTorch has this device here."""
    import torch

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # of a name that it does not know; of one that is not there
        raise UserError(f"device is {device!r}, which is missing ({first_line(error)}); give cpu or another") from None


def require_known(kind: str, name: str, known: Iterable[str], more: str = "") -> None:
    """Raise UserError if ``name`` is not in ``known``, with the nearest name, all names, and ``more``."""
    known = list(known)
    if name not in known:
        raise UserError(f"no {kind} {name!r}{did_you_mean(name, known)}; there are: {', '.join(known)}{more}")


def differences(first: dict, second: dict, prefix: str = "") -> list[str]:
    """The dotted paths where two nested dictionaries differ, with both values, a line each."""
    lines = []
    for key in sorted(set(first) | set(second)):
        a, b = first.get(key), second.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            lines += differences(a, b, f"{prefix}{key}.")
        elif a != b:
            lines.append(f"{prefix}{key}: {a!r} against {b!r}")
    return lines


def require_extra(extra: str, purpose: str, *packages: str) -> None:
    """Raise UserError if one of ``packages`` is not installed, with the command that installs them.

    Args:
        extra: of this distribution, that has the packages. purpose: what needs them, as the subject of a sentence.
    """
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise UserError(
            f"{purpose} needs {' and '.join(missing)}; install with: pip install 'diff-transformer[{extra}]'"
        )
