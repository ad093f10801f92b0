"""Conversations: turns that are kept and read once, over documents or without."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ragspec.registry import door

if TYPE_CHECKING:
    from ragspec.pipelines.chat.conversation import Conversation as Conversation
    from ragspec.pipelines.chat.conversation import Reply as Reply
    from ragspec.pipelines.chat.conversation import Turn as Turn

_WHERE = {
    "Conversation": "ragspec.pipelines.chat.conversation",
    "Reply": "ragspec.pipelines.chat.conversation",
    "Turn": "ragspec.pipelines.chat.conversation",
}

__all__ = sorted(_WHERE)

if not TYPE_CHECKING:  # hidden from the checkers, which otherwise accept misspelt names
    __getattr__, __dir__ = door(__name__, _WHERE)
