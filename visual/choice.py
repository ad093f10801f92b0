"""The choice of an image pipeline's drafter, which is created for each call and its conditions.

A draft model embeds the target's conditions by itself. A draft head reads the target's hidden
states. Jacobi drafting needs no model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from ragspec.drafters.base import Drafter, expect_drafter
from ragspec.drafters.heads.files import holds_head, open_head
from ragspec.drafters.heads.head import DraftHead
from ragspec.errors import RuleError
from ragspec.rules.base import Rule
from ragspec.trees.draft_tree import DraftKind
from ragspec.visual.checks import check_drafters
from ragspec.visual.families.base import Family
from ragspec.visual.loading import HEAD, JACOBI, MODEL, NAMES, find_draft
from ragspec.visual.rules.lantern import RelaxedWalk
from ragspec.visual.saved import AUTO, NONE

# A draft model or head uses the first of these that the rule accepts.
_PREFERENCE = (
    DraftKind.COUPLED,
    DraftKind.SAMPLED,
    DraftKind.SAMPLED_WITHOUT_REPLACEMENT,
    DraftKind.DETERMINISTIC,
)
Drafters = Drafter | Sequence[Drafter] | None


@dataclass(frozen=True, slots=True)
class PipelineOptions:
    """How a pipeline drafts, whatever the family.

    Attributes:
        budget: A number of draft nodes, "auto" (slow to learn: an image is short), or a policy;
            None for the family's number.
        draft_mode: How a model or a head drafts, see `HeadDrafter`; None takes the first mode that
            the rule accepts, or "deterministic" for a rule with a budget of total variation.
        min_expected_gain: The accepted codes that a further draft forward must promise, see
            `ModelDrafter`. 0 uses up the budget, which pays if a draft forward is nearly free.
        batch_size: Images side by side; None for the family's number.
    """

    budget: Any = None
    draft_mode: Any = None
    min_expected_gain: float | None = None
    batch_size: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class DraftSource:
    """Creates the drafter of each call, or several drafters, which the engine fuses.

    Attributes:
        name: The drafter's name, several joined by "+"; None for plain decoding.
        make: Creates the drafter for a target and its conditions.
        model, head: The draft model and the draft head, if the drafter has one.
    """

    name: str | None
    make: Callable[[Any, Any], Drafters]
    model: Any = None
    head: Any = None

    def __call__(self, target: Any, conditions: Any = None) -> Drafters:
        """Create the drafter of a call."""
        return self.make(target, conditions)

    @property
    def saved_name(self) -> str | None:
        """The name that restores the drafter from a folder; None if none does."""
        names = (self.name or NONE).split("+")
        return "+".join(names) if set(names) <= set(NAMES) else None


def choose_drafter(
    drafter: Any, family: Family, settings: PipelineOptions, named: bool = True
) -> DraftSource:
    """Return the source of a pipeline's drafters.

    Args:
        drafter: A name of `NAMES`, the folder or file of a draft model, a draft model, a
            `DraftHead`, a Drafter, a list of these to fuse, or None for plain decoding. "model"
            and "head" are those beside the target.
        family: The target, with its folder.
        settings: How a model or a head drafts, with a mode.
        named: Whether the user named a rule.

    Raises:
        UnknownNameError: No drafter has the name.
        ModelNotFoundError: The folder of the drafter is missing.
        InputError: The object cannot draft, or the family does not support several drafters.
    """
    if isinstance(drafter, list | tuple):
        check_drafters(drafter, settings.draft_mode, family.several_drafters)
        if len(drafter) > 1:
            return _together([choose_drafter(each, family, settings, named) for each in drafter])
        drafter = drafter[0] if drafter else None
    if isinstance(drafter, str) and drafter == AUTO:
        drafter = family.usual_drafter(settings.draft_mode, named)
    if drafter is None or (isinstance(drafter, str) and drafter == NONE):
        return DraftSource(None, lambda target, conditions: None)
    if isinstance(drafter, str) and drafter == JACOBI:
        check_drafters([drafter], settings.draft_mode)
        return DraftSource(
            JACOBI, lambda target, conditions: family.jacobi_drafter(target, settings)
        )
    if isinstance(drafter, str | Path):
        drafter = _load(drafter, family)
    if isinstance(drafter, DraftHead):
        return DraftSource(HEAD, partial(_head_drafter, drafter, settings), None, drafter)
    if family.check_draft(drafter):
        return DraftSource(
            MODEL,
            lambda target, conditions: family.model_drafter(drafter, target, conditions, settings),
            drafter,
        )
    expect_drafter(drafter)
    return DraftSource(drafter.name, lambda target, conditions: drafter)


def _together(sources: Sequence[DraftSource]) -> DraftSource:
    """Combine several sources into one, with the first model and the first head among them."""
    return DraftSource(
        "+".join(str(each.name) for each in sources),
        lambda target, conditions: [cast("Drafter", each(target, conditions)) for each in sources],
        next((each.model for each in sources if each.model is not None), None),
        next((each.head for each in sources if each.head is not None), None),
    )


def _load(drafter: str | Path, family: Family) -> Any:
    """Return the draft model or head of a name, a folder or a file."""
    path = find_draft(drafter, family.folder)
    if path.is_file():
        return family.load_draft(path)
    return open_head(path) if holds_head(path) else family.load_draft(path)


def _head_drafter(head: DraftHead, settings: PipelineOptions, target: Any, _: Any) -> Drafter:
    from ragspec.drafters.heads.drafter import HeadDrafter

    gain = settings.min_expected_gain
    return HeadDrafter(head, target, mode=settings.draft_mode, min_expected_gain=gain)


def mode_for(rule: Rule) -> str:
    """Return the draft mode of a model or head for a rule; raise RuleError if it takes none."""
    if isinstance(rule, RelaxedWalk) and rule.tv_budget is not None:
        return DraftKind.DETERMINISTIC.value  # a budget bounds no other drafts
    for kind in _PREFERENCE:
        if kind in rule.accepts:
            return kind.value
    raise RuleError(f"rule {rule.name!r} accepts no kind of draft; expected at least one.")
