"""RAPID: a model that reads what was retrieved drafts for one that reads all, or steers it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ragspec.registry import door

if TYPE_CHECKING:
    from ragspec.retrievers.rapid.drafter import Rapid as Rapid
    from ragspec.retrievers.rapid.published import Published as Published
    from ragspec.retrievers.rapid.steering import Steering as Steering

_WHERE = {
    "Published": "ragspec.retrievers.rapid.published",
    "Rapid": "ragspec.retrievers.rapid.drafter",
    "Steering": "ragspec.retrievers.rapid.steering",
}

__all__ = sorted(_WHERE)

if not TYPE_CHECKING:  # hidden from the checkers, which otherwise accept misspelt names
    __getattr__, __dir__ = door(__name__, _WHERE)
