"""The items of a benchmark: prompts by category, or pictures.

Retrieval drafting gains where an answer copies and little on free text, so that categories are
compared separately: questions over documents ("docqa"), continuations of a text ("free", a fixed
number of new tokens), and the categories of a user's file.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ragspec.errors import DocumentError
from ragspec.pipelines.console.texts import Row, read_rows
from ragspec.types import Tokenizer

if TYPE_CHECKING:
    from ragspec.drafters.base import SourceText
    from ragspec.engine.engine import Engine
    from ragspec.pipelines.answering.docqa import DocQA

FIXED_NEW_TOKENS = 96
FREE_TEMPERATURE = 0.8
DOCQA = "docqa"
FREE = "free"


@dataclass(frozen=True, slots=True)
class BenchItem:
    """One prompt, or one picture.

    Attributes:
        id, category: Its name, unique in its category, and the group of its row. The name of a
            picture is its number.
        prompt: Token ids.
        new_tokens: The most tokens to generate.
        fixed: Ignore end tokens and generate exactly `new_tokens`.
        temperature: 0 is greedy. Free text is sampled: small models loop when greedy, and a loop
            says nothing about speed.
        spans, texts: Source texts, as `Engine.generate` takes them.
    """

    id: str
    category: str
    prompt: tuple[int, ...]
    new_tokens: int
    fixed: bool = False
    temperature: float = 0.0
    spans: tuple[tuple[int, int, int, int], ...] = ()
    texts: "tuple[SourceText, ...]" = ()


def docqa_items(qa: "DocQA", questions: Iterable[tuple[str, str]]) -> list[BenchItem]:
    """Return items of (id, question) pairs, with the prompts that DocQA builds."""
    prompts = [(name, qa.prompt(question)) for name, question in questions]
    return [
        BenchItem(name, DOCQA, each.token_ids, 160, spans=each.spans, texts=each.layout)
        for name, each in prompts
    ]


def bundled_items(engine: "Engine") -> list[BenchItem]:
    """Return the items that ship with the project: its guide's questions, and free text."""
    from ragspec.models.resolve import STARTER
    from ragspec.pipelines.answering.docqa import DocQA

    guide = STARTER / "guide"
    qa = DocQA.from_documents(guide, engine=engine, top_k=3)
    lines = (STARTER / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    questions = [(str(i), json.loads(line)["question"]) for i, line in enumerate(lines)]
    texts = [(path.stem, path.read_text(encoding="utf-8")) for path in sorted(guide.glob("*.md"))]
    return docqa_items(qa, questions) + free_items(engine.tokenizer, texts)


def free_items(
    tokenizer: Tokenizer, texts: Iterable[tuple[str, str]], length: int = 128
) -> list[BenchItem]:
    """Return items that continue the first `length` tokens of each (id, text)."""
    items = []
    for name, text in texts:
        ids = tuple(tokenizer(text[: 8 * length])["input_ids"][:length])
        if len(ids) == length:
            items.append(BenchItem(name, FREE, ids, FIXED_NEW_TOKENS, True, FREE_TEMPERATURE))
    return items


def read_turns(path: Path) -> dict[tuple[str, str], str]:
    """Return prompts by category and id; raise DocumentError for a bad or repeated row.

    Rows are {id, category, prompt}, or those of Spec-Bench, of which the first turn counts.
    """
    turns: dict[tuple[str, str], str] = {}
    for where, row in read_rows(path):
        category, name, text = _turn(row, where)
        if (category, name) in turns:
            raise DocumentError(f"{where}: {category!r} has the id {name!r} twice; expected once")
        turns[category, name] = text
    return turns


def items_of(
    turns: Mapping[tuple[str, str], str], tokenizer: Tokenizer, max_length: int | None
) -> list[BenchItem]:
    """Return the items of `read_turns`; prompts longer than the context keep their last tokens."""
    most = 0 if max_length is None else max(1, max_length - FIXED_NEW_TOKENS)
    return [
        BenchItem(name, category, tuple(turn_ids(tokenizer, text)[-most:]), FIXED_NEW_TOKENS, True)
        for (category, name), text in turns.items()
    ]


def _turn(row: Row, where: str) -> tuple[str, str, str]:
    try:
        text = row["prompt"] if "prompt" in row else row["turns"][0]
        if not isinstance(text, str) or not text.strip() or isinstance(row.get("turns"), str):
            raise TypeError(f"the prompt is {text!r}, not a text")
        return str(row["category"]), str(row.get("id", row.get("question_id", where))), text
    except (KeyError, IndexError, TypeError) as error:
        raise DocumentError(
            f"{where}: cannot be read ({error!r}); expected a JSON object with id, category and "
            "prompt, or a Spec-Bench row with question_id, category and turns"
        ) from error


def turn_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the token ids of a user's turn, in the chat template where the model has one."""
    if getattr(tokenizer, "chat_template", None) is None:
        return list(tokenizer(text)["input_ids"])
    turns = [{"role": "user", "content": text}]
    return list(tokenizer.apply_chat_template(turns, add_generation_prompt=True)["input_ids"])
