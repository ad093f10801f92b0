"""The engine: a model, a drafter and a budget over the one loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ragspec.registry import door

if TYPE_CHECKING:
    from ragspec.engine.engine import Engine as Engine
    from ragspec.engine.kept import KeptContext as KeptContext
    from ragspec.engine.kept import PrefixCache as PrefixCache
    from ragspec.engine.loop import decode as decode
    from ragspec.engine.options import Options as Options
    from ragspec.engine.output import Generation as Generation
    from ragspec.engine.pool import Pool as Pool
    from ragspec.engine.rows import Row as Row
    from ragspec.engine.step import Emission as Emission
    from ragspec.engine.stream import Stream as Stream
    from ragspec.engine.ticket import Ticket as Ticket

_WHERE = {
    "Emission": "ragspec.engine.step",
    "Engine": "ragspec.engine.engine",
    "Generation": "ragspec.engine.output",
    "KeptContext": "ragspec.engine.kept",
    "Options": "ragspec.engine.options",
    "Pool": "ragspec.engine.pool",
    "PrefixCache": "ragspec.engine.kept",
    "Row": "ragspec.engine.rows",
    "Stream": "ragspec.engine.stream",
    "Ticket": "ragspec.engine.ticket",
    "decode": "ragspec.engine.loop",
}

__all__ = sorted(_WHERE)

if not TYPE_CHECKING:  # hidden from the checkers, which otherwise accept misspelt names
    __getattr__, __dir__ = door(__name__, _WHERE)
