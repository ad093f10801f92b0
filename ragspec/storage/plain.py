"""Dataclasses as plain JSON values, and back, by the types of their fields."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")


def to_plain(value: Any) -> Any:
    """Return a dataclass, list, dictionary or scalar as JSON has it; only what `init` takes."""
    if is_dataclass(value):
        kept = [field.name for field in fields(value) if field.init]
        return {name: to_plain(getattr(value, name)) for name in kept}
    if isinstance(value, dict):  # copied first: other threads may be adding to it
        return {str(key): to_plain(each) for key, each in list(value.items())}
    if isinstance(value, list):
        return [to_plain(each) for each in value]
    return value


def from_plain(kind: type[T], value: Any) -> T:
    """Return what `to_plain` wrote of such a kind: a dataclass, list[T], dict[K, V] or scalar.

    Nothing is checked: whoever keeps values in a file keeps a hash of them, too.
    """
    outer, inner = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        return kind(**{name: from_plain(hints[name], each) for name, each in value.items()})
    if outer is dict:
        return {inner[0](key): from_plain(inner[1], each) for key, each in value.items()}  # type: ignore[return-value]
    if outer is list:
        return [from_plain(inner[0], each) for each in value]  # type: ignore[return-value]
    scalar: T = value
    return scalar
