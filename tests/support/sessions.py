"""Sessions of targets, and what the forwards of a model are fed."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ragspec.trees.draft_tree import DraftTree
from ragspec.verification.base import TargetSession
from ragspec.verification.causal import CausalTarget
from ragspec.verification.static.session import StaticSession

EMPTY = DraftTree.empty()


def prefill(session: TargetSession, *texts: list[int]) -> list[torch.Tensor]:
    """Read and commit a text for each selected row; return the logits of their ends."""
    logits = session.verify(list(texts), [EMPTY] * len(texts))
    session.commit([()] * len(texts))
    return list(logits)


def follow(session: TargetSession, pending: Any, trees: Any, *followed: Any) -> list[torch.Tensor]:
    """Run a forward that chooses the tokens of texts by their distributions."""
    session.launch(pending, trees, list(zip(*followed, strict=True)))
    return session.settle()


def shapes_fed(model: Any) -> list[tuple[int, ...]]:
    """Return a list that grows by the shape of the tokens of every forward of a model."""
    shapes: list[tuple[int, ...]] = []

    def note(module: Any, arguments: Any, inputs: Any) -> None:
        shapes.append(tuple(inputs["input_ids"].shape))

    model.register_forward_pre_hook(note, with_kwargs=True)
    return shapes


@contextmanager
def static_session(target: CausalTarget, *inputs: Any, **options: Any) -> Iterator[StaticSession]:
    """Open a session of steps of fixed shape."""
    with target.open(*inputs, **options) as session, torch.no_grad():
        assert isinstance(session, StaticSession)
        yield session
