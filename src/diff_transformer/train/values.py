"""Values of settings, as JSON gives them, against the annotations of their fields."""

import math
import types
from typing import Any, Union, get_args, get_origin

_NAMES = {int: "a whole number", float: "a finite number", bool: "true or false", str: "a text", type(None): "null"}
_EXAMPLES = {int: "1", float: "0.5", bool: "true", str: '"text"'}


def as_kind(kind: Any, value: Any, name: str) -> Any:
    """``value`` as the annotation ``kind`` has it: lists as tuples, whole numbers as floats where a float is wanted.

    Raises:
        ValueError: for a value of another kind, or a number that is not finite, with the setting's ``name``.
    """
    made, fits = _fitted(kind, value)
    if not fits:
        example = f", such as {_example(kind)}" if get_origin(kind) in (tuple, list, dict) else ""
        raise ValueError(f"{name} is {value!r}; give {_described(kind)}{example}")
    return made


def _fitted(kind: Any, value: Any) -> tuple[Any, bool]:
    """The value, and whether it is of that kind; whatever is no kind of JSON is left as it is."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return next((made for made in (_fitted(part, value) for part in parts) if made[1]), (value, False))
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
    if kind in (int, float) and isinstance(value, int | float) and not isinstance(value, bool):
        try:
            fits = math.isfinite(value) and (kind is float or value == int(value))
        except OverflowError:  # a whole number that no float holds
            fits = kind is int
        return (kind(value), True) if fits else (value, False)
    if kind is Any or not isinstance(kind, type):
        return value, True
    return value, isinstance(value, kind) and isinstance(value, bool) == (kind is bool)


def _described(kind: Any, *, many: bool = False) -> str:
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return " or ".join(_described(part) for part in parts)
    if origin in (tuple, list):
        count = "" if origin is list or parts[1:] == (...,) else f"{len(parts)} "
        return f"{'lists' if many else 'a list'} of {count}{_described(parts[0], many=True)}"
    if kind is dict or origin is dict:
        inner = f" with {_described(parts[1], many=True)}" if parts and parts[1] is not Any else ""
        return f"{'objects' if many else 'an object'}{inner}"
    if many:
        return {int: "whole numbers", float: "numbers", str: "texts"}.get(kind, "values")
    return _NAMES.get(kind, "an object")


def _example(kind: Any) -> str:
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (tuple, list):
        pair = parts if parts[1:] and parts[1:] != (...,) else (parts[0],)
        return f"[{', '.join(map(_example, pair))}]"
    if origin is dict:
        return f'{{"name": {_example(parts[1])}}}'
    return _EXAMPLES.get(kind, "{}")
