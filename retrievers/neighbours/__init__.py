"""Which tokens the target thought of after which: the tables of Token Recycling."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ragspec.registry import door

if TYPE_CHECKING:
    from ragspec.retrievers.neighbours.device_table import (
        DeviceNeighbourTable as DeviceNeighbourTable,
    )
    from ragspec.retrievers.neighbours.table import NeighbourTable as NeighbourTable

_WHERE = {
    "DeviceNeighbourTable": "ragspec.retrievers.neighbours.device_table",
    "NeighbourTable": "ragspec.retrievers.neighbours.table",
}

__all__ = sorted(_WHERE)

if not TYPE_CHECKING:  # hidden from the checkers, which otherwise accept misspelt names
    __getattr__, __dir__ = door(__name__, _WHERE)
