"""Command-line options as frozen records: each field declares a type, a default, a help text.

A command takes one record, whose fields may be records again. `takes_records` shows a field that is
an `option` or `argument` as just that, and collects those that are a `setting` behind one option,
--set NAME=VALUE. So a command has few options, and its settings have types. An option
that commands share may be typer's `Annotated`.
"""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, field, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature
from operator import ge, le
from types import EllipsisType
from typing import Annotated, Any, TypeVar, cast, get_args, get_type_hints

from typer import Argument, Option, Typer
from typer.models import OptionInfo

from ragspec.errors import InputError
from ragspec.pipelines.console.terminal import Terminal
from ragspec.registry import did_you_mean

SET = "set_"  # the parameter of --set
T = TypeVar("T")
MARK = "mark"  # the key of a field's metadata


class Setting(OptionInfo):
    """The mark of a field that is set by --set NAME=VALUE, see `setting`."""


def setting(
    default: T | EllipsisType,
    text: str,
    *,
    least: float | None = None,
    most: float | None = None,
    parse: Callable[[str], object] = str,
) -> T:
    """Return a field that is set by --set NAME=VALUE.

    Args:
        parse: Returns the value of a text that pydantic does not read by the type alone.
    """
    return _marked(default, Setting(help=text, min=least, max=most, parser=parse))


def option(default: T | EllipsisType, text: str, *names: str, **details: Any) -> T:
    """Return a field that is an option of typer; `...` as default requires it."""
    return _marked(default, Option(*names, help=text, **details))


def argument(default: T | EllipsisType, text: str) -> T:
    """Return a field that is an argument of typer; `...` as default requires it."""
    return _marked(default, Argument(help=text))


def _marked(default: T | EllipsisType, mark: object) -> T:
    if isinstance(default, list):
        return cast(T, field(default_factory=default.copy, metadata={MARK: mark}))
    return cast(T, field(default=MISSING if default is ... else default, metadata={MARK: mark}))


def takes_records(function: Callable[[T], object]) -> Callable[..., object]:
    """Return a function of typer whose keyword arguments are the fields of a function's record.

    Its attribute `epilog` lists the settings; see `add_command`.
    """
    (record,) = (kind for name, kind in get_type_hints(function).items() if name != "return")
    every = list(declared(record))
    settings = {field.name: field for field in every if setting_of(field)}
    parameters = [field for field in every if not setting_of(field)]
    if settings:
        option = Option("--set", "-s", metavar="NAME=VALUE", help="A rarer setting; see below.")
        kind = Annotated[list[str], option]
        parameters.append(Parameter(SET, Parameter.KEYWORD_ONLY, default=[], annotation=kind))

    @wraps(function)
    def command(**values: Any) -> Any:
        values |= read_settings(values.pop(SET, ()), settings)
        options = _filled(record, values)
        if "torch" not in sys.modules and {"model", "embedder"} & values.keys():
            Terminal().note("starting ...")  # the import takes seconds
        return function(options)

    command.__signature__ = Signature(parameters)  # type: ignore[attr-defined] # read by typer
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    if settings:
        rows = "\n".join(map(_described, settings.values()))
        command.epilog = f"Settings of --set\n\n{rows}"  # type: ignore[attr-defined]
    return command


def add_command(app: Typer, command: Callable[..., object]) -> None:
    """Add a command to an application, under the function's name."""
    app.command(epilog=getattr(command, "epilog", None))(command)


def declared(record: Any) -> Iterator[Parameter]:
    """Yield the fields of a record as parameters, those of its records in their place."""
    types = get_type_hints(record, include_extras=True)
    for each in fields(record):
        kind = types[each.name]
        if is_dataclass(kind):
            yield from declared(kind)
            continue
        if MARK in each.metadata:
            kind = Annotated[kind, each.metadata[MARK]]
        default = each.default if each.default_factory is MISSING else each.default_factory()
        default = Parameter.empty if default is MISSING else default
        yield Parameter(each.name, Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def setting_of(field: Parameter) -> Setting | None:
    """Return the setting that marks a field, None without one."""
    marks = getattr(field.annotation, "__metadata__", ())
    return next((mark for mark in marks if isinstance(mark, Setting)), None)


def label(name: str) -> str:
    """Return the name of a field as the command line writes it."""
    return name.replace("_", "-")


def read_settings(pairs: Sequence[str], settings: Mapping[str, Parameter]) -> dict[str, object]:
    """Return the values of NAME=VALUE texts, and defaults, by name; raise InputError for others."""
    values: dict[str, object] = {name: field.default for name, field in settings.items()}
    for pair in pairs:
        name, sign, text = pair.partition("=")
        key = name.strip().replace("-", "_")
        if not sign or key not in settings:
            known = sorted(map(label, settings))
            meant = "" if key in settings else did_you_mean(label(key), known)
            raise InputError(
                f"got --set {pair}; expected NAME=VALUE with one of {', '.join(known)}.{meant}"
            )
        values[key] = read_value(settings[key], text)
    return values


def read_value(field: Parameter, text: str) -> object:
    """Return the value of a setting; raise InputError for another type or beyond the limits."""
    from pydantic import Field, TypeAdapter, ValidationError

    (setting,) = field.annotation.__metadata__
    kind: Any = Annotated[get_args(field.annotation)[0], Field(ge=setting.min, le=setting.max)]
    try:
        return TypeAdapter(kind).validate_python((setting.parser or str)(text))
    except ValidationError as error:
        reason = error.errors()[0]["msg"].lower()
        raise InputError(f"got --set {label(field.name)}={text}: {reason}.") from error


def check_limits(record: object) -> None:
    """Raise InputError if a field of a record is outside the limits that it declares."""
    for each in declared(type(record)):
        (mark,), value = each.annotation.__metadata__, getattr(record, each.name)
        for limit, fits, words in ((mark.min, ge, "at least"), (mark.max, le, "at most")):
            if None not in (value, limit) and not fits(value, limit):
                raise InputError(f"{each.name} is {value}; expected {words} {limit:g}.")


def split(text: str) -> tuple[str, ...]:
    """Return the values of a text, which are separated by commas."""
    return tuple(each.strip() for each in text.split(",") if each.strip())


def split_drafters(text: str) -> list[str]:
    """Return the drafters that a text joins by +; the longest path that exists counts as one."""
    names, rest = list[str](), text.split("+")
    while rest:
        starts = ["+".join(rest[:n]) for n in range(len(rest), 0, -1)]
        names.append(next((x for x in starts if os.path.exists(os.path.expanduser(x))), rest[0]))
        rest = rest[names[-1].count("+") + 1 :]
    return names


def byte_count(text: str) -> int:
    """Return the bytes of a text such as 2GiB or 500MB."""
    from pydantic import ByteSize, TypeAdapter

    return TypeAdapter(ByteSize).validate_python(text)


def _described(field: Parameter) -> str:
    """Return the line of a setting in a help text."""
    (setting,) = field.annotation.__metadata__
    default = "" if field.default in (None, ()) else field.default
    if isinstance(default, bool):
        default = "yes" if default else "no"
    return f"[bold cyan]{label(field.name)}[/bold cyan]={default}  {setting.help}"


def _filled(record: Any, values: Mapping[str, object]) -> Any:
    """Return a record of the values by name, which are also those of its records."""
    types = [(each.name, get_type_hints(record)[each.name]) for each in fields(record)]
    return record(**{n: _filled(k, values) if is_dataclass(k) else values[n] for n, k in types})
