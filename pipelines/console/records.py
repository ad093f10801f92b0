"""Command-line options as frozen records: each field declares a default, a help text and a check.

A command takes records as arguments; `takes_records` shows their fields to typer as options.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Any, get_type_hints


def takes_records(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose keyword arguments are the fields of the records it takes.

    Args:
        function: Takes dataclasses, whose fields carry `Annotated[..., typer.Option(...)]`, and
            ordinary arguments of typer.
    """
    types = get_type_hints(function, include_extras=True)
    records: dict[str, Any] = {name: kind for name, kind in types.items() if is_dataclass(kind)}
    parameters = []
    for name, parameter in signature(function).parameters.items():
        if name not in records:
            parameters.append(
                parameter.replace(annotation=types[name], kind=Parameter.KEYWORD_ONLY)
            )
            continue
        field_types = get_type_hints(records[name], include_extras=True)
        parameters += [
            Parameter(
                field.name,
                Parameter.KEYWORD_ONLY,
                default=field.default,
                annotation=field_types[field.name],
            )
            for field in fields(records[name])
        ]

    @wraps(function)
    def command(**values: Any) -> Any:
        for name, kind in records.items():
            values[name] = kind(**{field.name: values.pop(field.name) for field in fields(kind)})
        return function(**values)

    command.__signature__ = Signature(parameters)  # type: ignore[attr-defined] # read by typer
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command
