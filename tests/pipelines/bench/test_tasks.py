"""Tasks made on the spot: what is to be quoted stands in the prompt, code is cut in a function."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from ragspec.pipelines.bench.prompts import FIXED_NEW_TOKENS
from ragspec.pipelines.bench.tasks import (
    QuoteTask,
    code_items,
    cut_in_function,
    edit_items,
    library_files,
    quotation,
    quotation_items,
    window,
)
from ragspec.retrievers.search.documents import Document
from tests.support import tiny

WORDS = [f"word{i}" for i in range(400)]
TEXT = " ".join(WORDS)
DOCUMENT = Document(name="d", title="Words", text=TEXT)
CUE = "word200 word201"
GOLD = " word202 word203 word204"
START = TEXT.index(GOLD) + 1
TASK = QuoteTask("q", "Quote what begins so.", CUE, START, START + len(GOLD) - 1)
LONG = "def long(x):\n" + "".join(f"    x += {i}\n" for i in range(20)) + "    return x\n"


@pytest.mark.parametrize("number", range(5))
def test_a_quotation_can_be_copied_from_its_prompt(number: int) -> None:
    prompt, begun, gold = quotation(tiny.tokenizer(), DOCUMENT, TASK, number, room=300)
    assert begun == f" [1] {CUE}"
    assert gold == GOLD
    ((start, end, hit, _),) = prompt.spans
    shown = tiny.tokenizer().decode(prompt.token_ids[start:end])
    assert hit == 0
    assert CUE + GOLD in shown
    assert shown in TEXT
    assert set(shown.split()) <= set(WORDS)  # cut between words
    assert 240 <= end - start <= 300


def test_quotations_stand_at_different_places() -> None:
    places = [
        quotation(tiny.tokenizer(), DOCUMENT, TASK, number, 300)[0].text.index(CUE)
        for number in range(5)
    ]
    assert len(set(places)) == 5


def test_the_whole_document_may_be_shown() -> None:
    prompt, _, _ = quotation(tiny.tokenizer(), DOCUMENT, TASK, room=0)
    assert TEXT in prompt.text


@pytest.mark.parametrize(("start", "end"), [(0, 7), (len(TEXT) - 7, len(TEXT))])
def test_windows_end_with_the_text(start: int, end: int) -> None:
    first, last = window(tiny.tokenizer(), TEXT, start, end, 100, 50)
    assert 0 <= first <= start
    assert end <= last <= len(TEXT)


def test_quotation_items_have_been_begun() -> None:
    (item,) = quotation_items(tiny.tokenizer(), {"d": DOCUMENT}, [("d", TASK)], 300)
    assert item.fixed
    assert item.new_tokens == FIXED_NEW_TOKENS
    text = tiny.tokenizer().decode(item.prompt)
    assert text.endswith(f"\n\n{CUE}")
    ((start, end, _, _),) = item.spans
    assert CUE + GOLD in tiny.tokenizer().decode(item.prompt[start:end])


def test_code_is_cut_inside_the_longest_function(tmp_path: Path) -> None:
    path = tmp_path / "code.py"
    path.write_text("x = 1\ndef short():\n    return 1\n" + LONG, encoding="utf-8")
    text = cut_in_function(path)
    assert text is not None
    assert path.read_text(encoding="utf-8").startswith(text)
    assert text.endswith("\n")
    body = ast.parse(text).body[-1]
    assert isinstance(body, ast.FunctionDef)
    assert body.name == "long"
    assert 8 <= len(body.body) <= 12


@pytest.mark.parametrize("text", ["x = 1\n", "def f():\n    return 1\n", "def f(:\n", "\0"])
def test_files_without_a_long_function_are_passed_over(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(text, encoding="utf-8")
    (tmp_path / "b.py").write_text(LONG, encoding="utf-8")
    assert cut_in_function(tmp_path / "a.py") is None
    assert cut_in_function(tmp_path / "missing.py") is None
    items = code_items(tiny.tokenizer(), sorted(tmp_path.glob("*.py")), 5, room=40)
    assert [item.id for item in items] == ["1-b"]
    assert len(items[0].prompt) == 40


def test_the_library_of_the_interpreter_is_there() -> None:
    files = library_files()
    assert len(files) > 100
    assert not [path for path in files if "site-packages" in path.parts or "test" in path.parts]
    items = code_items(tiny.tokenizer(), files, 3)
    assert len({item.id for item in items}) == 3


def test_edits_ask_for_a_text_again_with_a_word_of_it_changed() -> None:
    texts = [
        ("none", "All words are short here."),
        ("twice", "The garden is green. A garden is a place."),
        ("more", "Nothing comes back. Nothing at all."),
    ]
    tokenizer = tiny.tokenizer(chat=True)
    items = edit_items(tokenizer, texts, 2)
    assert [item.id for item in items] == ["twice", "more"]
    shown = tokenizer.decode(list(items[0].prompt))
    assert 'put "lantern" for "garden"' in shown and texts[1][1] in shown
    assert shown.startswith("<user> ") and shown.endswith("<assistant> ")
    assert not items[0].fixed and items[0].temperature == 0.0
    assert len(edit_items(tokenizer, texts, 1)) == 1
