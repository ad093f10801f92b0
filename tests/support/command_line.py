"""The command line as a user types it, and what it writes."""

import json
from typing import Any, NamedTuple

import pytest

from ragspec.pipelines.cli.app import main

Capture = pytest.CaptureFixture[str]


class Output(NamedTuple):
    out: str
    err: str


def output_of(capsys: Capture, *arguments: object, code: int = 0) -> Output:
    """Run a command that ends with this code; return what it alone writes."""
    capsys.readouterr()
    ended = main([*map(str, arguments)])
    output = Output(*capsys.readouterr())
    assert ended == code, output.err
    return output


def run(capsys: Capture, *arguments: object) -> dict[str, Any]:
    """Run a command that succeeds; return the one object that it prints."""
    out = output_of(capsys, *arguments, "--json").out
    assert out.count("\n") == 1
    result: dict[str, Any] = json.loads(out)
    return result
