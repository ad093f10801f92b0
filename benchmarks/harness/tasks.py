"""Text tasks built from files: quotations from long documents, edits, code cut in functions."""

from __future__ import annotations

import ast
import re
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragspec.pipelines.answering.prompt import Prompt, build_prompt
from ragspec.pipelines.bench.prompts import FIXED_NEW_TOKENS, BenchItem, turn_ids
from ragspec.retrievers.search.documents import Document
from ragspec.retrievers.search.fusion import Hit
from ragspec.retrievers.search.passages import Passage, split_document

QUOTATION = "quotation"
CODE = "code"
EDITS = "edits"
EDIT = 'Write the text below again, word for word, but put "{new}" for "{word}".\n\n{text}'
NEW_WORD, LONG_WORD, NEW_TOKENS = "lantern", re.compile(r"[A-Za-z]{6,}"), 160
CONTEXT_TOKENS = 1500
_CHARS_A_TOKEN = 8  # more than the tokens of prose have: longer texts are cut afterwards
_MIN_LINES = 12
_SKIPPED = {"test", "tests", "idlelib", "site-packages", "dist-packages", "lib2to3", "__pycache__"}


@dataclass(frozen=True, slots=True)
class QuoteTask:
    """A passage to quote.

    Attributes:
        query: Request to quote the passage.
        cue: First words of the passage.
        start, end: Characters of the document to generate after the cue.
    """

    id: str
    query: str
    cue: str
    start: int
    end: int


def quotation(
    tokenizer: Any, document: Document, task: QuoteTask, number: int = 0, room: int = CONTEXT_TOKENS
) -> tuple[Prompt, str, str]:
    """Return a prompt over the text around a passage, the passage's start, and the rest of it.

    Args:
        tokenizer: Tokenizer of the target.
        document: Document of the passage.
        task: Passage to quote.
        number: Number of the task, which varies the position of the passage in the prompt.
        room: Approximate tokens of the document in the prompt; 0 for the whole document.
    """
    begin = max(0, document.text.rfind(task.cue, 0, task.start))
    start, end = 0, len(document.text)
    if room:
        start, end = window(tokenizer, document.text, begin, task.end, room, number * 37 % 100)
    passage = Passage(0, start, end, document.title, document.text[start:end])
    prompt = build_prompt(tokenizer, task.query, [Hit(document, passage, 1.0)])
    return prompt, f" [1] {task.cue}", document.text[begin + len(task.cue) : task.end]


def window(
    tokenizer: Any, text: str, start: int, end: int, room: int, before: int
) -> tuple[int, int]:
    """Return the range of characters of about `room` tokens around a passage, cut between words.

    Args:
        tokenizer: Tokenizer of the target.
        text: Text of the document.
        start, end: Characters of the passage.
        room: Approximate tokens of the range.
        before: Percent of the other tokens that are before the passage.
    """
    size = len(tokenizer(text[start:end], verbose=False)["input_ids"])
    spare = max(0, room - size)
    first = _tokens_back(tokenizer, text, start, spare * before // 100)
    last = _tokens_on(tokenizer, text, end, spare - spare * before // 100)
    return first, last


def _tokens_on(tokenizer: Any, text: str, start: int, count: int) -> int:
    """Return the end of a word about `count` tokens after `start`."""
    piece = text[start : start + _CHARS_A_TOKEN * count]
    ids = tokenizer(piece, verbose=False)["input_ids"][:count]
    end = start + len(tokenizer.decode(ids, skip_special_tokens=True))
    while start < end < len(text) and not text[end].isspace():
        end -= 1
    return min(max(end, start), len(text))


def _tokens_back(tokenizer: Any, text: str, end: int, count: int) -> int:
    """Return the start of a word about `count` tokens before `end`."""
    if count < 1:
        return end
    piece = text[max(0, end - _CHARS_A_TOKEN * count) : end]
    ids = tokenizer(piece, verbose=False)["input_ids"][-count:]
    start = max(0, end - len(tokenizer.decode(ids, skip_special_tokens=True)))
    while 0 < start < end and not text[start - 1].isspace():
        start += 1
    return start


def quotation_items(
    tokenizer: Any,
    documents: dict[str, Document],
    tasks: Iterable[tuple[str, QuoteTask]],
    room: int = CONTEXT_TOKENS,
) -> list[BenchItem]:
    """Return items of (name of a document, task) pairs: the text and the start of a quotation.

    The prompts hold no question, since a model would end its answer, and small models that must
    continue for a fixed length then loop.
    """
    items = []
    for number, (name, task) in enumerate(tasks):
        prompt, _, _ = quotation(tokenizer, documents[name], task, number, room)
        start, end = prompt.spans[0][:2]
        ids = (*prompt.token_ids[start:end], *plain_ids(tokenizer, f"\n\n{task.cue}"))
        spans = ((0, end - start, 0, 0),)
        items.append(BenchItem(task.id, QUOTATION, ids, FIXED_NEW_TOKENS, True, spans=spans))
    return items


def edit_items(
    tokenizer: Any, texts: Iterable[tuple[str, str]], count: int, words: int = 90
) -> list[BenchItem]:
    """Return greedy items that ask for a copy of a text with one word replaced.

    Args:
        tokenizer: Tokenizer of the target.
        texts: Pairs of id and text. An item uses the first piece with a long word twice.
        count: Most items.
        words: Approximate words of a piece.
    """
    items: list[BenchItem] = []
    for name, text in texts:
        for passage in split_document(Document(name, name, text), words=words):
            counts = Counter(word.lower() for word in LONG_WORD.findall(passage.text))
            twice = [word for word, times in counts.items() if times > 1]
            if twice:
                request = EDIT.format(word=twice[0], new=NEW_WORD, text=passage.text)
                ids = tuple(turn_ids(tokenizer, request))
                items.append(BenchItem(name, EDITS, ids, NEW_TOKENS))
                break
        if len(items) == count:
            break
    return items


def code_items(
    tokenizer: Any, files: Sequence[Path], count: int, room: int = CONTEXT_TOKENS // 2
) -> list[BenchItem]:
    """Return items that continue a function, one for each of `count` files spread evenly.

    The prompt is the last `room` tokens before the middle of the file's longest function. A file
    without a long function is replaced by the next file.
    """
    items: list[BenchItem] = []
    at = 0
    for i in range(count):
        at = max(at, i * len(files) // count)
        while at < len(files):
            text, name = cut_in_function(files[at]), f"{at}-{files[at].stem}"
            at += 1
            if text is not None:
                ids = tuple(plain_ids(tokenizer, text[-_CHARS_A_TOKEN * room :])[-room:])
                items.append(BenchItem(name, CODE, ids, FIXED_NEW_TOKENS, fixed=True))
                break
    return items


def cut_in_function(path: Path) -> str | None:
    """Return a file's text up to the middle of its longest function; None without one."""
    try:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
    except (OSError, SyntaxError, ValueError):
        return None
    longest = max(_functions(tree), key=lambda span: span[1] - span[0], default=(0, 0))
    if longest[1] - longest[0] < _MIN_LINES:
        return None
    return "\n".join(text.split("\n")[: sum(longest) // 2]) + "\n"


def _functions(tree: ast.AST) -> Iterator[tuple[int, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.end_lineno or node.lineno


def library_files() -> list[Path]:
    """Return the Python files of the interpreter's standard library without its tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return sorted(
        path for path in root.rglob("*.py") if not _SKIPPED & set(path.relative_to(root).parts)
    )


def plain_ids(tokenizer: Any, text: str) -> Sequence[int]:
    """Return the token ids of a text without special tokens."""
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids
