"""The field's own words: refused identifiers, unique class names, help texts that say enough."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from typer.main import get_command

from ragspec.pipelines.cli.app import app
from tests.structure.test_house import LIBRARY, name, parse

REFUSED = {
    word
    for line in (
        "told tell found given made asked kept shown drawn drawing own seen lying lined apart",
        "anew brought meet hear dare whose wanted law laws manners wording reading flight",
        "landed ticket reach outlook worth pace ground tops pieces placing disarm surprise",
        "way",
    )
    for word in line.split()
}
# The field's own uses of these words.
FIELD = frozenset({"ModelNotFoundError", "InFlightStep"})


def words(identifier: str) -> set[str]:
    parts = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", identifier)
    return {part.lower() for part in parts}


def identifiers(tree: ast.AST) -> Iterator[str]:
    """Yield what a module names itself: functions, classes, arguments and variables."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg


def refused(tree: ast.AST) -> list[str]:
    return [each for each in identifiers(tree) if words(each) & REFUSED and each not in FIELD]


def test_the_library_uses_the_words_of_the_field() -> None:
    assert {name(path): refused(parse(path)) for path in LIBRARY if refused(parse(path))} == {}


@pytest.mark.parametrize(
    "code", ["found = 1", "def f(told): ...", "class TokenLaw: ...", "def _kept(): ...", "WAY = 2"]
)
def test_the_check_of_words_can_fail(code: str) -> None:
    assert refused(ast.parse(code))


def test_each_class_name_is_unique() -> None:
    classes = Counter(
        node.name
        for path in LIBRARY
        for node in ast.walk(parse(path))
        if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in classes.items() if count > 1] == []


def help_texts(command: Any, path: str = "ragspec") -> Iterator[tuple[str, str]]:
    """Yield the help of a command, of its options and of the commands below."""
    yield path, command.help or ""
    for parameter in command.params:
        if parameter.name != "help":
            yield f"{path} {parameter.name}", getattr(parameter, "help", None) or ""
    for each, below in getattr(command, "commands", {}).items():
        yield from help_texts(below, f"{path} {each}")


def test_each_help_text_has_three_words() -> None:
    texts = dict(help_texts(get_command(app)))
    assert len(texts) > 100
    assert [where for where, text in texts.items() if len(text.split()) < 3] == []
