"""From a name to a transformers model that the core can use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ragspec.registry import door

if TYPE_CHECKING:
    from ragspec.models.device import pick_device as pick_device
    from ragspec.models.device import pick_dtype as pick_dtype
    from ragspec.models.load import load_model as load_model
    from ragspec.models.resolve import resolve_model as resolve_model
    from ragspec.models.supported import check_config as check_config
    from ragspec.models.supported import check_scope as check_scope
    from ragspec.models.vocabulary import check_vocabulary as check_vocabulary

_WHERE = {
    "check_config": "ragspec.models.supported",
    "check_scope": "ragspec.models.supported",
    "check_vocabulary": "ragspec.models.vocabulary",
    "load_model": "ragspec.models.load",
    "pick_device": "ragspec.models.device",
    "pick_dtype": "ragspec.models.device",
    "resolve_model": "ragspec.models.resolve",
}

__all__ = sorted(_WHERE)

if not TYPE_CHECKING:  # hidden from the checkers, which otherwise accept misspelt names
    __getattr__, __dir__ = door(__name__, _WHERE)
