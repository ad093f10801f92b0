"""Crash-safe folders with hashes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ragspec.registry import door

if TYPE_CHECKING:
    from ragspec.storage.manifest import Contents as Contents
    from ragspec.storage.manifest import Manifest as Manifest
    from ragspec.storage.store import OpenStore as OpenStore
    from ragspec.storage.store import open_store as open_store
    from ragspec.storage.store import publish as publish

_WHERE = {
    "Contents": "ragspec.storage.manifest",
    "Manifest": "ragspec.storage.manifest",
    "OpenStore": "ragspec.storage.store",
    "open_store": "ragspec.storage.store",
    "publish": "ragspec.storage.store",
}

__all__ = sorted(_WHERE)

if not TYPE_CHECKING:  # hidden from the checkers, which otherwise accept misspelt names
    __getattr__, __dir__ = door(__name__, _WHERE)
