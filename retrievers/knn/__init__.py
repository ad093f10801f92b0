"""A datastore of contexts and what followed them, and texts that are written by it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ragspec.registry import door

if TYPE_CHECKING:
    from ragspec.retrievers.knn.datastore import Datastore as Datastore
    from ragspec.retrievers.knn.datastore import DatastoreInfo as DatastoreInfo
    from ragspec.retrievers.knn.mixture import Mixture as Mixture
    from ragspec.retrievers.knn.nearest_keys import NearestKeys as NearestKeys
    from ragspec.retrievers.knn.nearest_keys import Neighbours as Neighbours

_WHERE = {
    "Datastore": "ragspec.retrievers.knn.datastore",
    "DatastoreInfo": "ragspec.retrievers.knn.datastore",
    "Mixture": "ragspec.retrievers.knn.mixture",
    "NearestKeys": "ragspec.retrievers.knn.nearest_keys",
    "Neighbours": "ragspec.retrievers.knn.nearest_keys",
}

__all__ = sorted(_WHERE)

if not TYPE_CHECKING:  # hidden from the checkers, which otherwise accept misspelt names
    __getattr__, __dir__ = door(__name__, _WHERE)
