"""Frozen records <-> plain dicts, lists and scalars, driven by the records' own type hints.

In: a dataclass instance and its class, or the plain data of a file and the class it should be. Out:
plain data in the order of declaration, or an instance equal to the one encoded. Plain data of the
wrong shape raises `PlanError` naming the file, the field, what was found and what was expected.

Types understood: records, `tuple[X, ...]`, `tuple[X, Y]`, `dict[str, X]`, `X | None`, string
enumerations, `int`, `float` (finite), `bool`, `str`.
"""

from __future__ import annotations

import math
import sys
import types
import typing
from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import StrEnum
from functools import cache
from typing import Any, NoReturn, get_args, get_origin

from .errors import PlanError, did_you_mean
from .mesh import AXES, Mesh


@dataclass(frozen=True, slots=True)
class Place:
    """Where in a file we are: its name and a dotted path of fields."""

    source: str
    path: str = ""

    def field(self, name: object) -> Place:
        """The place of a field of the record here."""
        return Place(self.source, f"{self.path}.{name}" if self.path else str(name))

    def item(self, index: int) -> Place:
        """The place of an item of the list here."""
        return Place(self.source, f"{self.path}[{index}]")

    def fail(self, message: str) -> NoReturn:
        """Raise `PlanError` about this place."""
        raise PlanError(f"{self.source}: {self.path}{': ' if self.path else ''}{message}")

    def expected(self, what: str, found: Any, hint: str = "") -> NoReturn:
        """Raise `PlanError`: `what` was expected here and `found` is what there is."""
        self.fail(f"expected {what}, found {shown(found)}{hint}")


# --------------------------------------------------------------------------- records -> plain data


def encode(value: Any, hint: Any) -> Any:
    """`value` as plain data, each number normalised to its declared type."""
    if value is None:
        return None
    if is_dataclass(hint):
        return {name: encode(getattr(value, name), kind) for name, kind in _hints(hint).items()}
    match _shape(hint):
        case "optional":
            return encode(value, _not_none(hint))
        case "dict":
            return {str(key): encode(item, get_args(hint)[1]) for key, item in value.items()}
        case "tuple":
            kinds = _kinds(hint, len(value))
            return [encode(item, kind) for item, kind in zip(value, kinds, strict=True)]
    return _encode_scalar(value, hint)


def _encode_scalar(value: Any, hint: Any) -> Any:
    assert hint is not float or math.isfinite(value), value
    return str(value) if issubclass(hint, StrEnum) else hint(value)


# --------------------------------------------------------------------------- plain data -> records


def decode(raw: Any, hint: Any, place: Place) -> Any:
    """`raw` as a value of type `hint`. Raises `PlanError` at the first field that does not fit."""
    if is_dataclass(hint):
        return _decode_record(raw, hint, place)
    match _shape(hint):
        case "optional":
            return None if raw is None else decode(raw, _not_none(hint), place)
        case "dict":
            return _decode_dict(raw, hint, place)
        case "tuple":
            return _decode_tuple(raw, hint, place)
    if issubclass(hint, StrEnum):
        return _decode_word(raw, hint, place)
    return _decode_scalar(raw, hint, place)


def _decode_record(raw: Any, record: Any, place: Place) -> Any:
    hints = _hints(record)
    if not isinstance(raw, dict):
        place.expected(f"a mapping with {_listed(hints)}", raw)
    for key in raw:
        if key not in hints:
            place.fail(f"unknown field {key!r}{did_you_mean(str(key), hints)}; expected {_listed(hints)}")
    for name in _required(record):
        if name not in raw:
            place.fail(f"field {name!r} is missing; expected {_in_words(hints[name])}")
    values = {name: decode(item, hints[name], place.field(name)) for name, item in raw.items()}
    if check := _CHECKS.get(record):
        check(values, place)
    return record(**values)


def _decode_dict(raw: Any, hint: Any, place: Place) -> dict[str, Any]:
    if not isinstance(raw, dict):
        place.expected(_in_words(hint), raw)
    item_type = get_args(hint)[1]
    return {decode(key, str, place): decode(item, item_type, place.field(key)) for key, item in raw.items()}


def _decode_tuple(raw: Any, hint: Any, place: Place) -> tuple[Any, ...]:
    kinds = _kinds(hint, len(raw)) if isinstance(raw, list) else ()
    if not isinstance(raw, list) or len(kinds) != len(raw):
        place.expected(_in_words(hint), raw)
    return tuple(
        decode(item, kind, place.item(i)) for i, (item, kind) in enumerate(zip(raw, kinds, strict=True))
    )


def _decode_word(raw: Any, enum: type[StrEnum], place: Place) -> StrEnum:
    words = [member.value for member in enum]
    if raw not in words:
        place.expected(_in_words(enum), raw, did_you_mean(str(raw), words))
    return enum(raw)


def _decode_scalar(raw: Any, hint: Any, place: Place) -> Any:
    accepted = (int, float) if hint is float else (hint,)
    if type(raw) not in accepted or (hint is float and not abs(raw) <= sys.float_info.max):
        place.expected(_in_words(hint), raw)
    return hint(raw)


def _check_mesh(values: dict[str, Any], place: Place) -> None:
    for axis in AXES:
        if values.get(axis, 1) < 1:
            place.field(axis).expected("a size of at least 1", values[axis])
    order = values.get("order", AXES)
    if sorted(order) != sorted(AXES):
        place.field("order").expected(f"each of {', '.join(AXES)} once", list(order))


_CHECKS: dict[Any, Callable[[dict[str, Any], Place], None]] = {Mesh: _check_mesh}
"""Rules of a record beyond its types, checked before it is made."""


# --------------------------------------------------------------------------- types and words


@cache
def _hints(record: Any) -> dict[str, Any]:
    """Field name -> type, in the order of declaration."""
    hints = typing.get_type_hints(record)
    return {field.name: hints[field.name] for field in fields(record)}


@cache
def _required(record: Any) -> tuple[str, ...]:
    return tuple(f.name for f in fields(record) if f.default is MISSING and f.default_factory is MISSING)


@cache
def _shape(hint: Any) -> str:
    """`optional`, `dict`, `tuple`, or empty for a scalar."""
    shapes = {typing.Union: "optional", types.UnionType: "optional", dict: "dict", tuple: "tuple"}
    return shapes.get(get_origin(hint), "")


@cache
def _not_none(hint: Any) -> Any:
    """The one other member of an optional type."""
    (kind,) = (kind for kind in get_args(hint) if kind is not types.NoneType)
    return kind


def _kinds(hint: Any, length: int) -> tuple[Any, ...]:
    """The type of each item of a tuple: `tuple[X, ...]` repeats X."""
    kinds = get_args(hint)
    return (kinds[0],) * length if kinds[-1] is Ellipsis else kinds


_SCALARS_IN_WORDS = {int: "a whole number", float: "a finite number", bool: "true or false", str: "text"}


def _in_words(hint: Any) -> str:
    """What a field of this type takes, for messages."""
    if is_dataclass(hint):
        return f"a mapping with {_listed(_hints(hint))}"
    match _shape(hint):
        case "optional":
            return f"{_in_words(_not_none(hint))} or null"
        case "dict":
            return "a mapping"
        case "tuple":
            kinds = get_args(hint)
            return "a list" if kinds[-1] is Ellipsis else f"a list of {len(kinds)}"
    return _SCALARS_IN_WORDS.get(hint) or f"one of {', '.join(member.value for member in hint)}"


def _listed(names: Iterable[str]) -> str:
    return "the fields " + ", ".join(names)


def shown(value: Any) -> str:
    """What was found, in a few words."""
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        return f"a mapping of {len(value)}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
