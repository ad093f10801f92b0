"""What the commands share: options, and the terminal that they write to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ragspec.registry import door

if TYPE_CHECKING:
    from ragspec.pipelines.console.terminal import Terminal as Terminal

_WHERE = {
    "Terminal": "ragspec.pipelines.console.terminal",
}

__all__ = sorted(_WHERE)

if not TYPE_CHECKING:  # hidden from the checkers, which otherwise accept misspelt names
    __getattr__, __dir__ = door(__name__, _WHERE)
