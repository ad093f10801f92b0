"""What a text benchmark runs on: prompts by category.

Three kinds are kept apart, since retrieval drafting lives on copying and barely gains on free
text: questions over documents (category "docqa"), Spec-Bench rows (their own categories), and
free text that goes on from a beginning ("free", a fixed number of new tokens).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragspec.drafters.base import SourceText
from ragspec.errors import DocumentError

if TYPE_CHECKING:
    from ragspec.pipelines.docqa.docqa import DocQA

FIXED_NEW_TOKENS = 96
FREE_TEMPERATURE = 0.8
DOCQA = "docqa"
FREE = "free"
CHAT = "chat"
# Spec-Bench's own names; MT-Bench's eight categories count as one.
SPEC_BENCH = {
    "math_reasoning": "math",
    **dict.fromkeys(
        ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"),
        CHAT,
    ),
}


@dataclass(frozen=True, slots=True)
class BenchItem:
    """One prompt. fixed: ignore end tokens and write exactly `new_tokens`.

    temperature: 0 is greedy. Free text is sampled: small models fall into loops when greedy, and
    a loop says nothing about speed.
    """

    id: str
    category: str
    prompt: tuple[int, ...]
    new_tokens: int
    fixed: bool = False
    temperature: float = 0.0
    spans: tuple[tuple[int, int, int, int], ...] = ()
    texts: tuple[SourceText, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict, compare=False)


def docqa_items(qa: DocQA, questions: Iterable[tuple[str, str]], top_k: int) -> list[BenchItem]:
    """Return items of (id, question) pairs, prompts built by DocQA's own retrieval."""
    items = []
    for name, question in questions:
        prompt = qa.prompt(question, top_k=top_k)
        item = BenchItem(name, DOCQA, prompt.token_ids, 160)
        items.append(replace(item, spans=prompt.spans, texts=prompt.layout))
    return items


def bundled_items(engine: Any, top_k: int = 3) -> list[BenchItem]:
    """Return the items that ship with the project: its guide's questions, and free text."""
    from ragspec.models.resolve import STARTER
    from ragspec.pipelines.docqa.docqa import DocQA

    guide = STARTER / "guide"
    qa = DocQA.from_documents(guide, engine=engine)
    lines = (guide / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    questions = [(str(i), json.loads(line)["question"]) for i, line in enumerate(lines)]
    texts = [(path.stem, path.read_text(encoding="utf-8")) for path in sorted(guide.glob("*.md"))]
    return docqa_items(qa, questions, top_k) + free_items(engine.tokenizer, texts)


def free_items(
    tokenizer: Any, texts: Iterable[tuple[str, str]], length: int = 128
) -> list[BenchItem]:
    """Return items that go on from the first `length` tokens of each (id, text)."""
    items = []
    for name, text in texts:
        ids = tuple(tokenizer(text[: 8 * length])["input_ids"][:length])
        if len(ids) == length:
            items.append(BenchItem(name, FREE, ids, FIXED_NEW_TOKENS, True, FREE_TEMPERATURE))
    return items


def read_items(path: Path, tokenizer: Any, room: int | None) -> list[BenchItem]:
    """Return the items of a jsonl file: {id, category, prompt} or Spec-Bench rows.

    Of a Spec-Bench row the first turn counts; MT-Bench's categories are pooled as "chat", and
    "math_reasoning" is called "math". Prompts keep their last tokens where they would not
    fit. Raises DocumentError with the line that cannot be read or names a prompt twice.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DocumentError(
            f"{path} cannot be read ({error}); expected a UTF-8 file of JSON lines"
        ) from error
    items: list[BenchItem] = []
    known: set[tuple[str, str]] = set()
    for number, line in enumerate(lines, start=1):
        if line.strip():
            item = _item(line, where := f"{path.name}, line {number}", tokenizer, room)
            if (item.category, item.id) in known:
                raise DocumentError(
                    f"{where}: the id {item.id!r} stands twice in category {item.category!r}; "
                    "expected each once"
                )
            known.add((item.category, item.id))
            items.append(item)
    if not items:
        raise DocumentError(f"{path} holds no prompts; expected lines of {{id, category, prompt}}")
    return items


def _item(line: str, where: str, tokenizer: Any, room: int | None) -> BenchItem:
    try:
        row = json.loads(line)
        text = row["prompt"] if "prompt" in row else row["turns"][0]
        if not isinstance(text, str) or not text.strip() or isinstance(row.get("turns"), str):
            raise TypeError(f"the prompt is {text!r}, not a text")
        name = str(row.get("id", row.get("question_id", where)))
        category = str(row["category"])
        if "turns" in row:
            category = SPEC_BENCH.get(category, category)
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise DocumentError(
            f"{where}: cannot be read ({error!r}); expected a JSON object with id, category and "
            "prompt, or a Spec-Bench row with question_id, category and turns"
        ) from error
    ids = turn_ids(tokenizer, text)
    if room is not None:
        ids = ids[-max(1, room - FIXED_NEW_TOKENS) :]
    return BenchItem(name, category, tuple(ids), FIXED_NEW_TOKENS, fixed=True, extra=row)


def turn_ids(tokenizer: Any, text: str) -> list[int]:
    """Return a user's turn as a chat model reads it, for other models the text itself."""
    if getattr(tokenizer, "chat_template", None) is None:
        return list(tokenizer(text)["input_ids"])
    turns = [{"role": "user", "content": text}]
    return list(tokenizer.apply_chat_template(turns, add_generation_prompt=True)["input_ids"])
