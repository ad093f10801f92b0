"""Texts as tests write them for drafters, and trees as tests read them: by their paths."""

from collections.abc import Sequence

from ragspec.drafters.base import DraftContext
from ragspec.retrievers.indexes.segment import Draft
from ragspec.trees.draft_tree import ROOT, DraftTree


def at(prompt: Sequence[int], left: int = 50) -> DraftContext:
    """Return the context of a text that has a prompt alone."""
    return DraftContext([*prompt], len(prompt), left)


def spelled(tree: DraftTree | Draft) -> dict[tuple[int, ...], float]:
    """Return the acceptance probability of every node by its path of tokens."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        paths.append((token,) if parent == ROOT else (*paths[parent], token))
    assert len(set(paths)) == len(paths), "a path stands twice"
    return dict(zip(paths, tree.accept_prob.tolist(), strict=True))
