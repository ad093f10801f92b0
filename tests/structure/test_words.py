"""The field's own words: identifiers that the library does not use."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

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


@pytest.mark.parametrize("path", LIBRARY, ids=name)
def test_the_library_uses_the_words_of_the_field(path) -> None:  # type: ignore[no-untyped-def]
    assert refused(parse(path)) == []


@pytest.mark.parametrize(
    "code", ["found = 1", "def f(told): ...", "class TokenLaw: ...", "def _kept(): ...", "WAY = 2"]
)
def test_the_check_of_words_can_fail(code: str) -> None:
    assert refused(ast.parse(code))
