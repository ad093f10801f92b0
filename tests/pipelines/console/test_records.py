from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from ragspec.errors import InputError
from ragspec.pipelines.console import records


@dataclass(frozen=True, slots=True)
class Place:
    device: str = records.setting("auto", "Device of the model.")
    layers: int | None = records.setting(None, "Layers on it.", least=1, most=9)


@dataclass(frozen=True, slots=True)
class Options:
    place: Place
    text: str = records.argument(..., "A text.")
    times: int = records.option(1, "How often to print it.")
    folder: Path | None = records.setting(None, "Folder to write to.")
    loud: bool = records.setting(True, "Whether to print.")
    tags: tuple[str, ...] = records.setting((), "Tags.", parse=records.split)

    def __post_init__(self) -> None:
        if self.times == 0:
            raise InputError("times is 0")


def run(*words: str) -> Any:
    app, calls = typer.Typer(), []

    @records.takes_records
    def command(options: Options) -> None:
        """Note the options."""
        calls.append(options)

    records.add_command(app, command)
    result = CliRunner().invoke(app, list(words))
    return calls[0] if calls else result


def test_fields_are_arguments_options_and_settings() -> None:
    assert run("hi") == Options(Place(), "hi")
    words = ("-s", "layers=3", "--set", "folder=a/b", "-s", "loud=no", "-s", "device=a=b")
    result = run("hi", "--times", "2", *words)
    assert result == Options(Place("a=b", 3), "hi", 2, Path("a/b"), False)
    assert str(run("hi", "--times", "0").exception) == "times is 0"


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ("devise=cpu", "one of device, folder, layers, loud, tags. Did you mean 'device'?"),
        ("device", "expected NAME=VALUE"),
        ("layers=x", "got --set layers=x: input should be a valid integer"),
        ("layers=0", "greater than or equal to 1"),
        ("layers=10", "less than or equal to 9"),
        ("loud=perhaps", "got --set loud=perhaps"),
    ],
)
def test_a_wrong_setting_is_named(pair: str, message: str) -> None:
    error = run("hi", "-s", pair).exception
    assert isinstance(error, InputError) and message in str(error)


def test_the_help_lists_settings_with_their_defaults() -> None:
    output = run("--help").output
    for line in ("device=auto", "layers=", "loud=yes", "Folder to write to."):
        assert line in output
    assert "--device" not in output and "--times" in output and "()" not in output


def test_nested_records_are_declared_in_order() -> None:
    assert [field.name for field in records.declared(Options)] == [
        "device", "layers", "text", "times", "folder", "loud", "tags",
    ]  # fmt: skip
