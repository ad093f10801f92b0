"""The reading of a long document: keys and values, and the states that a head would hear of."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch

from ragspec.engine.prefix_cache import PrefixCache
from ragspec.errors import UnsupportedModelError
from ragspec.models.device import without_autograd
from ragspec.trees.draft_tree import DraftTree
from ragspec.verification.base import CachedSession, TargetSession

if TYPE_CHECKING:
    from ragspec.engine.engine import Engine

OnRead = Callable[[int, int], None]


@without_autograd
def read_document(
    engine: Engine,
    tokens: tuple[int, ...],
    context: AbstractContextManager[PrefixCache],
    *,
    states: bool,
    on_read: OnRead | None,
) -> torch.Tensor | None:
    """Read a prompt up to its document's end into a context, whose prefixes keep keys and values.

    tokens: T of them. states: whether to return what the output head reads at each token,
    [copies, T, H], too; None where not, or where the model does not tell. Raises
    UnsupportedModelError for a model whose keys and values cannot be kept.
    """
    engine.target.check_prompt(tokens)
    size, text = len(tokens), list(tokens)
    with context as selected:
        # One token more than is read: of a prompt the last one is always read anew.
        opened = selected.open(engine.target, [*text, text[-1]], size + 1, size)
        with opened as (session, _):
            if isinstance(session, CachedSession):
                session.on_read = on_read
            result = _read(session, text, states)
        prefixes = selected.prefixes
    if prefixes.find(engine.target, tokens) is None:
        raise UnsupportedModelError(
            f"what {type(engine.model).__name__} makes of a document cannot be kept: its "
            "cache cannot be cut, or its positions depend on the prompt's length. Ask it with "
            "DocQA over passages."
        )
    return result


def _read(session: TargetSession, tokens: list[int], states: bool) -> torch.Tensor | None:
    """Read tokens into a session; return their states where they are wanted and told."""
    result = None
    if states and isinstance(session, CachedSession):
        result = session.read_states(tokens)
    else:
        session.verify([tokens], [DraftTree.empty()])
    session.commit([()])
    return result
