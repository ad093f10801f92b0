"""What the rules over latents share: the walk down a chain of drafts, and whom they may judge.

A draft is a latent that was drawn with the noise of its index, by the target's own head under
states that have changed since or by a smaller model. What nothing has drawn for its index is no
draft, its law being unknown.
"""

from __future__ import annotations

from collections.abc import Callable

from ragspec.errors import RuleError
from ragspec.rules.base import TargetView, Verdict
from ragspec.rules.rejection import children_of
from ragspec.trees.draft_tree import ROOT, DraftKind, DraftTree
from ragspec.visual.latents.target import LatentView

KINDS = frozenset({DraftKind.COUPLED})

Emit = Callable[[LatentView, int, int, int], int]
"""A view, a node, its child's latent and the target's own: the latent that stands there."""


def walk(tree: DraftTree, view: LatentView, emit: Emit) -> Verdict:
    """Keep drafts for as long as `emit` takes them; a latent of its own ends the path."""
    children, path, node = children_of(tree), list[int](), ROOT
    while True:
        current, below = view.token(node), children[node]
        if not below:
            return Verdict(tuple(path), current)
        drafted = int(tree.tokens[below[0]])
        token = emit(view, node, drafted, current)
        if token != drafted:
            return Verdict(tuple(path), token)
        node = below[0]
        path.append(node)
        if view.ends(node):
            return Verdict(tuple(path), None)


def expect_latents(rule: str, target: TargetView) -> LatentView:
    """Return the view; raises RuleError where the target has no latents."""
    if isinstance(target, LatentView):
        return target
    raise RuleError(
        f"rule {rule!r} got a model of tokens; expected one of continuous latents. Use 'walk'."
    )
