"""Verdicts on each latent of a call: a kept draft, a replacement, or the target's own."""

from __future__ import annotations

from ragspec.rules.base import Around, Rule, TargetView, Verdict
from ragspec.trees.draft_tree import DraftTree
from ragspec.visual.latents.rules.cspd import Aligned
from ragspec.visual.latents.table import Judged
from ragspec.visual.latents.target import LatentView

OUTCOMES = ("target", "accepted", "reflected", "redrawn")
"""There was no draft; it was kept; its mirror image replaced it; another latent replaced it."""


def outcome_of(judged: Judged, rule: Rule) -> int:
    """Return the index in `OUTCOMES` of the verdict of `rule` on a committed latent."""
    if judged.drafted is None:
        return 0
    if judged.accepted:
        return 1
    return 2 if isinstance(rule, Aligned) and judged.emitted != judged.target_number else 3


class RecordingRule(Around):
    """A rule whose verdicts the target's table records unchanged."""

    def judge(self, tree: DraftTree, target: TargetView) -> Verdict:
        """Return the rule's verdict."""
        verdict = self.rule.judge(tree, target)
        if isinstance(target, LatentView):
            target.target.note(tree, target, verdict)
        return verdict
