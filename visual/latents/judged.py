"""Verdicts on each latent of a call: a kept draft, a replacement, or the target's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ragspec.rules.base import Around, Rule, TargetView, Verdict
from ragspec.trees.draft_tree import ROOT, DraftTree
from ragspec.trees.operations import children
from ragspec.visual.latents.rules.cspd import Aligned
from ragspec.visual.latents.target import LatentDraws, LatentTarget, LatentView

OUTCOMES = ("target", "accepted", "reflected", "redrawn")
"""There was no draft; it was kept; its mirror image replaced it; another latent replaced it."""


@dataclass(frozen=True, slots=True)
class Judged:
    """The verdict on one committed latent; latents are numbers of the table.

    Attributes:
        index: Its index among the generated latents.
        drafted: The draft that was judged there, or None.
        target_number: The target's own latent, sampled at that forward.
        emitted: The committed latent.
    """

    index: int
    drafted: int | None
    target_number: int
    emitted: int

    @property
    def accepted(self) -> bool:
        """Whether the draft was kept."""
        return self.emitted == self.drafted


class RecordingTarget(LatentDraws):
    """A target that records the verdict on each committed latent of a call, by its number."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.judged: dict[int, Judged] = {}

    def note(self, tree: DraftTree, view: LatentView, verdict: Verdict) -> None:
        """Record a rule's verdict on a chain of drafts."""
        below_all, node = children(tree.parents), ROOT
        path = [int(tree.tokens[each]) for each in verdict.path]
        for place, number in enumerate([*path, verdict.token]):
            if number is None:
                break
            below, index = below_all.get(node), view.index(node)
            drafted = int(tree.tokens[below[0]]) if below else None
            if drafted is not None and self.table.indices[drafted] != index:
                drafted = None  # only a latent sampled for this index is a draft
            self.judged[number] = Judged(index, drafted, view.token(node), number)
            if place < len(path):
                node = verdict.path[place]

    def outcome(self, number: int, rule: Rule) -> int:
        """Return the index in `OUTCOMES` of the verdict of `rule` on a committed latent."""
        judged = self.judged[number]
        if judged.drafted is None:
            return 0
        if judged.accepted:
            return 1
        return 2 if isinstance(rule, Aligned) and number != judged.target_number else 3

    def distances(self, numbers: Sequence[int]) -> Tensor:
        """Return the distance of kept drafts from the target's own latents, else NaN: f64 [n].

        The unit is one deviation of the latents.
        """
        judged = [self.judged[number] for number in numbers]
        sampled = torch.tensor([each.target_number for each in judged])
        difference = self.table.latents[torch.tensor(numbers)] - self.table.latents[sampled]
        distances: Tensor = torch.linalg.vector_norm(difference.double(), dim=-1).cpu()
        distances[[not each.accepted for each in judged]] = torch.nan
        return distances


class RecordingLatentTarget(RecordingTarget, LatentTarget):
    """A causal target that records verdicts."""


class RecordingRule(Around):
    """A rule whose verdicts a `RecordingTarget` target records unchanged."""

    def judge(self, tree: DraftTree, target: TargetView) -> Verdict:
        """Return the rule's verdict."""
        verdict = self.rule.judge(tree, target)
        if isinstance(target, LatentView) and isinstance(target.target, RecordingTarget):
            target.target.note(tree, target, verdict)
        return verdict
