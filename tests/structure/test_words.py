"""Words of the field: refused identifiers, unique class names, help texts of three words."""

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
# Uses of these words in the field.
FIELD = frozenset({"InFlightStep", "connection_made"})


def words(identifier: str) -> set[str]:
    return {part.lower() for part in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", identifier)}


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


SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Yields):$")
ERRORS_IN_PROSE = re.compile(r"\braises (an? )?`?[A-Z]\w+")


def prose(docstring: str) -> str:
    """Return a docstring without its sections."""
    lines, inside = [], False
    for line in docstring.splitlines():
        inside = bool(SECTION.match(line)) or (inside and (not line or line.startswith(" ")))
        lines += [] if inside else [line]
    return "\n".join(lines)


def parameters(node: ast.AST) -> Iterator[str]:
    """Yield the parameters of a function, or of a class, and its fields."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        yield from (each.arg for each in (*node.args.args, *node.args.kwonlyargs))
    elif isinstance(node, ast.ClassDef):
        for each in node.body:
            if isinstance(each, ast.AnnAssign):
                yield ast.unparse(each.target)
            elif isinstance(each, ast.FunctionDef) and each.name == "__init__":
                yield from parameters(each)


def without_section(node: Any) -> list[str]:
    """Return what a docstring describes in prose: parameters by name, and errors."""
    text = prose(ast.get_docstring(node) or "")
    named = r"(?<![\w`/]){}(, \w+)*( \w+)?( \[[^\]]*\])?: "
    inline = [each for each in parameters(node) if re.search(named.format(re.escape(each)), text)]
    return inline + [match[0] for match in ERRORS_IN_PROSE.finditer(text)]


def public(tree: ast.Module | ast.ClassDef) -> Iterator[Any]:
    """Yield the public functions, classes and methods of a module."""
    for node in tree.body:
        title = getattr(node, "name", "_")
        if not title.startswith("_") or title == "__init__":
            yield node
            yield from public(node) if isinstance(node, ast.ClassDef) else ()


def test_docstrings_describe_parameters_and_errors_in_sections() -> None:
    bad = {
        f"{name(path)} {node.name}": without_section(node)
        for path in LIBRARY
        for node in public(parse(path))
    }
    assert {where: what for where, what in bad.items() if what} == {}


@pytest.mark.parametrize(
    "text", ["Do. size: how many.", "Do.\n\nsize [n]: of all.", "Do; raises InputError for 0."]
)
def test_the_check_of_docstrings_can_fail(text: str) -> None:
    assert without_section(ast.parse(f'def f(size): """{text}"""').body[0])
    sections = "Do.\n\n    Args:\n        size: How many.\n\n    Raises:\n        InputError: 0.\n"
    assert not without_section(ast.parse(f'def f(size):\n    """{sections}"""').body[0])
