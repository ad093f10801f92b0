"""A tiny chat model, its plain answers, and passages, for the tests of hosts."""

from functools import cache
from typing import Any

from ragspec.engine.engine import Engine
from ragspec.retrievers import Document, PassageIndex
from tests.support import tiny

NEW = 24
TEXTS = {
    "bees.txt": "A queen lays eggs in the spring. Drones do not sting anybody at all.",
    "trees.txt": "An oak grows slowly and stands for many hundred years in one place.",
}


@cache
def engine(drafter: Any = "context") -> Engine:
    return Engine(tiny.model(), tiny.tokenizer(chat=True), drafter, budget=4)


def alone(*turns: tuple[str, str], **options: Any) -> Any:
    """Return the text of plain decoding for a conversation in the chat template."""
    messages = [{"role": role, "content": content} for role, content in turns]
    options.setdefault("max_new_tokens", NEW)
    return engine(None).generate(messages, options.pop("sampling", None), **options)


@cache
def index() -> PassageIndex:
    documents = [Document(name, name, text) for name, text in TEXTS.items()]
    return PassageIndex.build(documents, embedder=None)
