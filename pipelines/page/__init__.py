"""A run as a page to look at: answer, trees, charts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ragspec.registry import door

if TYPE_CHECKING:
    from ragspec.pipelines.page.page import trace_page as trace_page
    from ragspec.pipelines.page.page import write_page as write_page

_WHERE = {
    "trace_page": "ragspec.pipelines.page.page",
    "write_page": "ragspec.pipelines.page.page",
}

__all__ = sorted(_WHERE)

if not TYPE_CHECKING:  # hidden from the checkers, which otherwise accept misspelt names
    __getattr__, __dir__ = door(__name__, _WHERE)
