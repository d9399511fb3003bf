"""Settings from text and JSON: the one parser of ``--set``, for training runs and experiments alike.

``parse`` reads an assignment such as ``optim.lr=1e-3``. ``assign`` applies assignments to nested dictionaries,
``build`` makes a dataclass of one, ``as_kind`` checks the kind of one value, and ``check_rules`` the values themselves,
by the ``Rule`` in each field's annotation. Errors name the setting, the value and what is accepted; for a setting that
does not exist, they name the nearest that do.
"""

import dataclasses
import difflib
import json
import math
import numbers
import types
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin

from diff_transformer.errors import UserError

_NAMES = {int: "a whole number", float: "a finite number", bool: "true or false", str: "a text", type(None): "null"}
_EXAMPLES = {int: "1", float: "0.5", bool: "true", str: '"text"'}


def parse(assignment: str, example: str) -> tuple[str, Any]:
    """The key and the value of ``key=value``; the value is JSON, or else a text.

    Args:
        example: of an assignment, for the message.

    Raises:
        ValueError: if there is no ``=``.
    """
    key, separator, text = assignment.partition("=")
    if not separator:
        raise UserError(f"{assignment!r} is not an assignment; write key=value, for example {example}")
    return key.strip(), value_of(text.strip())


def value_of(text: str) -> Any:
    """A value written as JSON, as Python's True, False or None, or else as plain text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # no JSON, a number of thousands of digits, or thousands of brackets
        return {"True": True, "False": False, "None": None}.get(text, text)


def assign(
    values: dict[str, Any],
    assignments: Iterable[str],
    *,
    example: str,
    open_ended: Sequence[str] = (),
    renamed: Mapping[str, str] | None = None,
) -> list[str]:
    """Set dotted keys of nested dictionaries in place: ``["optim.lr=1e-3", "data.mixture.text=0.5"]``.

    Args:
        values: changed in place.
        example: of an assignment, for the message.
        open_ended: patterns of keys that need not be in ``values`` yet, such as ``"data.mixture.*"``.
        renamed: deprecated keys and their new names.

    Returns:
        The keys that were set, by their new names.

    Raises:
        ValueError: for an assignment without ``=``, or a key that does not exist, naming the nearest ones.
    """
    assigned = []
    for assignment in assignments:
        path, value = parse(assignment, example)
        path = current_name(path, renamed or {})
        *parents, key = path.split(".")
        place = values
        for parent in parents:
            place = place.get(parent)
            if not isinstance(place, dict):
                raise unknown(path, _dotted(values))
        if key not in place and not any(fnmatchcase(path, pattern) for pattern in open_ended):
            raise unknown(path, _dotted(values))
        place[key] = value
        assigned.append(path)
    return assigned


def build(
    kind: Any,
    values: Mapping[str, Any],
    *,
    prefix: str = "",
    renamed: Mapping[str, str] | None = None,
    removed: Collection[str] = (),
) -> Any:
    """The dataclass ``kind`` with nested ``values``, each checked against its field's annotation.

    Args:
        prefix: of the keys in messages, such as ``"train."``.
        renamed: deprecated dotted keys and their new names.
        removed: dotted keys of older files, which are left out.

    Raises:
        ValueError: for a key that is no field, naming the nearest, or a value of another kind.
    """
    fields = {field.name: field for field in dataclasses.fields(kind)}
    made = {}
    for given, value in values.items():
        if prefix + given in removed:
            continue
        key = current_name(prefix + given, renamed or {}).removeprefix(prefix)
        if key not in fields:
            raise unknown(prefix + key, [prefix + name for name in fields], count=1, cutoff=0.6)
        if dataclasses.is_dataclass(fields[key].type) and isinstance(value, dict):
            made[key] = build(fields[key].type, value, prefix=f"{prefix}{key}.", renamed=renamed, removed=removed)
        else:
            made[key] = as_kind(fields[key].type, value, prefix + key)
    return kind(**made)


def current_name(key: str, renamed: Mapping[str, str]) -> str:
    """``key``, or its new name with a DeprecationWarning."""
    if key not in renamed:
        return key
    warnings.warn(f"{key} is now {renamed[key]}; use the new name", DeprecationWarning, stacklevel=4)
    return renamed[key]


def unknown(key: str, known: Iterable[str], *, count: int = 3, cutoff: float = 0.4) -> ValueError:
    """The error for a key that does not exist, with the nearest ones that do."""
    near = difflib.get_close_matches(key, list(known), n=count, cutoff=cutoff)
    return ValueError(f"no setting {key!r}" + (f"; the nearest: {', '.join(near)}" if near else ""))


def _dotted(values: dict, prefix: str = "") -> Iterable[str]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _dotted(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


class Rule(NamedTuple):
    """A constraint of a setting's values, in the annotation of its field: ``steps: PositiveInt = 1000``.

    holds: says whether a value is accepted; advice: what is, as the end of the message.
    """

    holds: Callable[[Any], Any]
    advice: str


POSITIVE = Rule(lambda value: value is None or value > 0, "it must be positive")
_NOT_NEGATIVE = Rule(lambda value: value >= 0, "it must not be negative")
PositiveInt = Annotated[int, POSITIVE]
PositiveFloat = Annotated[float, POSITIVE]
NonNegativeInt = Annotated[int, _NOT_NEGATIVE]
NonNegativeFloat = Annotated[float, _NOT_NEGATIVE]


def one_of(*names: str) -> Rule:
    """The rule of a setting that takes one of ``names``."""
    return Rule(names.__contains__, f"accepted: {', '.join(map(repr, names))}")


def check_rules(settings: Any, prefix: str = "") -> None:
    """Raise ValueError for the first field of a dataclass, and of those in it, whose value breaks its ``Rule``."""
    for field in dataclasses.fields(settings):
        name, value = prefix + field.name, getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            check_rules(value, f"{name}.")
        for rule in getattr(field.type, "__metadata__", ()):
            try:
                holds = rule.holds(value)
            except TypeError:
                raise UserError(f"{name} is {value!r}; give {_described(field.type)}") from None
            if not holds:
                raise UserError(f"{name} is {value!r}; {rule.advice}")


def fit_kinds(settings: Any, prefix: str = "") -> None:
    """Give each field of a dataclass, and of those in it, its value ``as_kind`` of the annotation."""
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            fit_kinds(value, f"{prefix}{field.name}.")
        else:
            setattr(settings, field.name, as_kind(field.type, value, prefix + field.name))


def as_kind(kind: Any, value: Any, name: str, hint: str = "") -> Any:
    """``value`` as the annotation ``kind`` has it: lists as tuples, whole numbers as floats where a float is wanted.

    Args:
        name: of the setting, for the message.
        hint: what to give, for the message; by default a description of ``kind``.

    Raises:
        ValueError: for a value of another kind, or a number that is not finite.
    """
    made, fits = _fitted(kind, value)
    if not fits and hint:
        raise UserError(f"{name} is {value!r}; give {hint}")
    if not fits:
        compound = get_origin(_bare(kind)) in (tuple, list, dict)
        example = f", such as {_example(kind)}" if compound else ""
        raise UserError(f"{name} is {value!r}; give {_described(kind)}{example}")
    return made


def _fitted(kind: Any, value: Any) -> tuple[Any, bool]:
    """The value, and whether it is of that kind. A value whose kind JSON does not have is left as it is."""
    kind = _bare(kind)
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return next((made for made in (_fitted(part, value) for part in parts) if made[1]), (value, False))
    if kind is tuple:
        return _frozen(value), isinstance(value, list | tuple)
    if origin in (tuple, list):
        if not isinstance(value, list | tuple):
            return value, False
        wanted = [parts[0]] * len(value) if origin is list or parts[1:] == (...,) else parts
        made = [_fitted(part, item) for part, item in zip(wanted, value, strict=False)]
        return origin(item for item, _ in made), len(wanted) == len(value) and all(fits for _, fits in made)
    if origin is dict:
        if not isinstance(value, dict):
            return value, False
        made = {key: _fitted(parts[1], item) for key, item in value.items()}
        return {key: item for key, (item, _) in made.items()}, all(fits for _, fits in made.values())
    if kind in (int, float) and isinstance(value, numbers.Real) and not isinstance(value, bool):
        try:
            fits = math.isfinite(value) and (kind is float or value == int(value))
        except OverflowError:  # a whole number that no float holds
            fits = kind is int
        return (kind(value), True) if fits else (value, False)
    if kind is Any or not isinstance(kind, type):
        return value, True
    return value, isinstance(value, kind) and isinstance(value, bool) == (kind is bool)


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


def _described(kind: Any, *, many: bool = False) -> str:
    kind = _bare(kind)
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return " or ".join(_described(part) for part in parts)
    if origin in (tuple, list):
        fixed = origin is tuple and parts[1:] != (...,)
        if fixed and len(set(map(str, parts))) > 1:
            items = " and ".join(map(_described, parts))
        else:
            items = f"{len(parts)} " * fixed + _described(parts[0], many=True)
        return f"{'lists' if many else 'a list'} of {items}"
    if kind is dict or origin is dict:
        inner = f" with {_described(parts[1], many=True)}" if parts and parts[1] is not Any else ""
        return f"{'objects' if many else 'an object'}{inner}"
    if many:
        return {int: "whole numbers", float: "numbers", str: "texts"}.get(kind, "values")
    return _NAMES.get(kind, "an object")


def _bare(kind: Any) -> Any:
    """A kind without its rule."""
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _example(kind: Any) -> str:
    kind = _bare(kind)
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (tuple, list):
        pair = parts if parts[1:] and parts[1:] != (...,) else (parts[0],)
        return f"[{', '.join(map(_example, pair))}]"
    if origin is dict:
        return f'{{"name": {_example(parts[1])}}}'
    return _EXAMPLES.get(kind, "{}")
