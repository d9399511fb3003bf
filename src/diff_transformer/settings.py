"""Settings from JSON and the command line: the one parser of ``--set``, for training runs and experiments alike.

``assign`` applies assignments such as ``optim.lr=1e-3`` to nested dictionaries; ``build`` makes a dataclass of one,
which pydantic checks against its annotations.
"""

import dataclasses
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from diff_transformer.checks import MAX_SEED, did_you_mean
from diff_transformer.errors import UserError

STRICT = ConfigDict(strict=True)  # neither 2.0 nor "2" is an int
PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Seed = Annotated[int, Field(ge=0, le=MAX_SEED)]
Depths = Annotated[tuple[Annotated[float, Field(ge=0, le=1)], ...], Field(min_length=1)]


def parse(assignment: str) -> tuple[str, Any]:
    """The key and the value of ``key=value``; the value is JSON (also ``.5``), Python's True, False or None, or a text.

    Raises:
        UserError: if there is no ``=``, or for a number that is not finite.
    """
    key, separator, text = assignment.partition("=")
    if not separator:
        raise UserError(f"{assignment!r} is not an assignment; write key=value, such as train.steps=100")
    try:
        value = json.loads(re.sub(r"^(-?)(?=\.\d)", r"\g<1>0", text))
    except ValueError:
        text = os.path.expanduser(text.strip())  # a shell expands ~ at the beginning of an argument alone
        value = {"True": True, "False": False, "None": None}.get(text, text)
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{key} is {value}; give a finite number")
    return key.strip(), value


def assign(values: dict[str, Any], assignments: Iterable[str], open_ended: Sequence[str] = ()) -> list[str]:
    """Set dotted keys of nested dictionaries in place: ``["optim.lr=1e-3", "data.mixture.text=0.5"]``.

    Args:
        open_ended: patterns of keys that need not be in ``values`` yet, nor what they are in: ``"data.mixture.*"``.

    Returns:
        The keys that were set.

    Raises:
        UserError: as ``parse``, or for a key that does not exist, naming the nearest ones.
    """
    assigned = []
    for assignment in assignments:
        path, value = parse(assignment)
        *parents, key = path.split(".")
        place: Any = values
        new = any(fnmatchcase(path, pattern) for pattern in open_ended)
        for parent in parents:
            if isinstance(place, dict):
                place = place.setdefault(parent, {}) if new else place.get(parent)
        if not isinstance(place, dict) or (key not in place and not new):
            raise unknown(path, _dotted(values))
        place[key] = value
        assigned.append(path)
    return assigned


def build(kind: Any, values: Mapping[str, Any], prefix: str = "") -> Any:
    """The dataclass ``kind`` with nested ``values``, which are those of JSON.

    Args:
        prefix: of the keys in messages, such as ``"train."``.

    Raises:
        UserError: for a key that is no field, naming the nearest, or a value that its field does not accept.
    """
    _refuse_unknown(kind, values, prefix)
    return validate(kind, values, prefix)


def validate(kind: Any, value: Any, name: str) -> Any:
    """``value``, one of JSON or a path, as the type ``kind`` with its constraints.

    Args:
        name: of the setting, or the prefix of its settings' names, for the message.

    Raises:
        UserError: for a value that is not of this type.
    """
    try:
        return _adapter(kind).validate_json(json.dumps(value, default=str), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    path, inner = [], value
    for key in first["loc"]:  # which goes on with the types of a union, or an item that is missing
        known = inner if isinstance(inner, dict) else range(len(inner)) if isinstance(inner, list | tuple) else ()
        if key in known:
            inner = inner[key]
            path.append(str(key))
    message = first["msg"].removeprefix("Value error, ")
    raise UserError(f"{name}{'.'.join(path)} is {inner!r}; {message[0].lower()}{message[1:]}")


def unknown(key: str, known: Iterable[str]) -> UserError:
    """The error for a key that does not exist, with the nearest one that does."""
    return UserError(f"no setting {key!r}{did_you_mean(key, known, 0.5)}")


def _refuse_unknown(kind: Any, values: Mapping[str, Any], prefix: str) -> None:
    fields = {field.name: field.type for field in dataclasses.fields(kind)}
    for key, value in values.items():
        if key not in fields:
            raise unknown(prefix + key, [prefix + name for name in fields])
        if dataclasses.is_dataclass(fields[key]) and isinstance(value, dict):
            _refuse_unknown(fields[key], value, f"{prefix}{key}.")


def _dotted(values: dict, prefix: str = "") -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _dotted(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


@cache
def _adapter(kind: Any) -> TypeAdapter:
    return TypeAdapter(kind)
