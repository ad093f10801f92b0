"""Sentences a user would say: ask your documents.

Importing this package is light: the public names are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ragspec.pipelines.citations import Citation as Citation
    from ragspec.pipelines.docqa import Answer as Answer
    from ragspec.pipelines.docqa import DocQA as DocQA
    from ragspec.pipelines.prompt import Prompt as Prompt
    from ragspec.pipelines.prompt import build_prompt as build_prompt

_WHERE = {
    "Answer": "docqa",
    "Citation": "citations",
    "DocQA": "docqa",
    "Prompt": "prompt",
    "build_prompt": "prompt",
}

__all__ = ["Answer", "Citation", "DocQA", "Prompt", "build_prompt"]

if not TYPE_CHECKING:  # hidden from the checkers, which otherwise accept misspelt names

    def __getattr__(name: str) -> Any:
        """Import a public name on first use."""
        from importlib import import_module

        if name not in _WHERE:
            raise AttributeError(f"module 'ragspec.pipelines' has no attribute {name!r}")
        value = getattr(import_module(f"ragspec.pipelines.{_WHERE[name]}"), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
