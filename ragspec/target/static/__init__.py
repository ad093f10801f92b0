"""One step of fixed shapes: what accelerators run without waiting for the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ragspec.registry import door

if TYPE_CHECKING:
    from ragspec.target.static.open import MODES as MODES
    from ragspec.target.static.open import open_static as open_static
    from ragspec.target.static.target import StaticTarget as StaticTarget

_WHERE = {
    "MODES": "ragspec.target.static.open",
    "StaticTarget": "ragspec.target.static.target",
    "open_static": "ragspec.target.static.open",
}

__all__ = sorted(_WHERE)

if not TYPE_CHECKING:  # hidden from the checkers, which otherwise accept misspelt names
    __getattr__, __dir__ = door(__name__, _WHERE)
