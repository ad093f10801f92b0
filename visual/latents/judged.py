"""What became of each latent of a call: a kept draft, what stands for one, or the target's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ragspec.rules.base import Around, Rule, TargetView, Verdict
from ragspec.rules.rejection import children_of
from ragspec.trees.draft_tree import ROOT, DraftTree
from ragspec.visual.latents.rules.coupling import Coupled
from ragspec.visual.latents.target import LatentDraws, LatentTarget, LatentView

OUTCOMES = ("target", "accepted", "reflected", "redrawn")
"""No draft stood there; the draft stayed; its mirror image came for it; another latent did."""


@dataclass(frozen=True, slots=True)
class Judged:
    """One committed latent. drafted: the draft that was judged there, None where there was none.

    index: the generated one. drafted, target_number, emitted: numbers of the table; target_number:
    the target's own, drawn at that forward.
    """

    index: int
    drafted: int | None
    target_number: int
    emitted: int

    @property
    def accepted(self) -> bool:
        """Whether the draft stayed."""
        return self.emitted == self.drafted


class Watching(LatentDraws):
    """A target that knows, by its number, how each committed latent of the call was judged."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.judged: dict[int, Judged] = {}

    def note(self, tree: DraftTree, view: LatentView, verdict: Verdict) -> None:
        """Take note of what a rule decided about a chain of drafts."""
        children, node = children_of(tree), ROOT
        path = [int(tree.tokens[each]) for each in verdict.path]
        for place, number in enumerate([*path, verdict.token]):
            if number is None:
                break
            below, index = children[node], view.index(node)
            drafted = int(tree.tokens[below[0]]) if below else None
            if drafted is not None and self.table.indices[drafted] != index:
                drafted = None  # what no forward drew for its index is no draft
            self.judged[number] = Judged(index, drafted, view.token(node), number)
            if place < len(path):
                node = verdict.path[place]

    def outcome(self, number: int, rule: Rule) -> int:
        """Return the place in `OUTCOMES` of a committed latent, which a rule judged."""
        judged = self.judged[number]
        if judged.drafted is None:
            return 0
        if judged.accepted:
            return 1
        return 2 if hasattr(rule, "mirrored") and number != judged.target_number else 3

    def distances(self, numbers: Sequence[int]) -> Tensor:
        """Return how far kept latents are from the target's own, in deviations; NaN of others."""
        judged = [self.judged[number] for number in numbers]
        current = torch.tensor([each.target_number for each in judged])
        difference = self.table.latents[torch.tensor(numbers)] - self.table.latents[current]
        result: Tensor = torch.linalg.vector_norm(difference.double(), dim=-1).cpu()
        result[[not each.accepted for each in judged]] = torch.nan
        return result


class WatchedTarget(Watching, LatentTarget):
    """A causal target that does."""


class Watched(Around):
    """A rule whose verdicts a `Watching` takes note of; it decides what the rule decides."""

    def judge(self, tree: DraftTree, target: TargetView) -> Verdict:
        """Return the rule's verdict."""
        verdict = self.rule.judge(tree, target)
        if isinstance(target, LatentView) and isinstance(target.target, Watching):
            target.target.note(tree, target, verdict)
        return verdict


def steps_of(rule: Rule, most: int) -> int | None:
    """Return the steps by which a rule judges drafts, at most `most`; None where it has none."""
    return rule.steps(most) if isinstance(rule, Coupled) else None
