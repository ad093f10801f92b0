"""The choice of an image pipeline's drafter, which is created for each call and its conditions.

A draft model embeds the target's conditions by itself. A draft head reads the target's hidden
states. Jacobi drafting needs no model.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import cast

from ragspec.drafters.base import Drafter, expect_drafter
from ragspec.drafters.heads.files import holds_head, open_head
from ragspec.drafters.heads.head import DraftHead
from ragspec.errors import InputError, RuleError, UnsupportedModelError
from ragspec.registry import names, resolve
from ragspec.rules.base import Rule
from ragspec.trees.draft_tree import DraftKind
from ragspec.verification.causal import CausalTarget
from ragspec.visual.call import DraftSource, PipelineOptions
from ragspec.visual.checks import check_drafters
from ragspec.visual.families.base import Family
from ragspec.visual.loading import AUTO, HEAD, JACOBI, MODEL, NONE, find_draft
from ragspec.visual.rules.lantern import RelaxedWalk

# A draft model or head uses the first of these that the rule accepts.
_PREFERENCE = (
    DraftKind.COUPLED,
    DraftKind.SAMPLED,
    DraftKind.SAMPLED_WITHOUT_REPLACEMENT,
    DraftKind.DETERMINISTIC,
)


def family_of(family: object, kind: str | None, described: str) -> type[Family]:
    """Return a family by its name, or else that of models of a model_type.

    Args:
        family: A name, a class, or None for the model_type's.
        kind: The model_type.
        described: What was given, for the message.

    Raises:
        InputError, UnknownNameError: This is no family.
        UnsupportedModelError: No family has the model_type.
    """
    if isinstance(family, str):
        family = resolve("family", family)
    if isinstance(family, type) and issubclass(family, Family):
        return family
    if family is not None:
        raise InputError(f"got family={family!r}; expected a name such as 'llamagen', or a Family.")
    for name in reversed(list(names("family"))):  # those of other packages last
        usual: type[Family] = resolve("family", name)
        if usual.kind == kind:
            return usual
    raise UnsupportedModelError(
        f"got {described}; expected an image model of one of the families "
        f"{', '.join(names('family'))}. Give the model itself, and its tokenizer."
    )


def choose_drafter(
    drafter: object, family: Family, settings: PipelineOptions, named: bool = True
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
        check_drafters(drafter, settings.draft_mode, family.unit == "codes")
        if len(drafter) > 1:
            return _together([choose_drafter(each, family, settings, named) for each in drafter])
        drafter = drafter[0] if drafter else None
    name = drafter if isinstance(drafter, str) else None
    if name == AUTO:
        name = drafter = family.usual_drafter(settings.draft_mode, named)
    if drafter is None or name == NONE:
        return DraftSource(None, partial(_always, None))
    if name == JACOBI:
        check_drafters([drafter], settings.draft_mode)
        return DraftSource(JACOBI, partial(family.make_drafter, None, settings=settings))
    if isinstance(drafter, str | Path):
        path = find_draft(drafter, family.folder)
        drafter = open_head(path) if holds_head(path) else family.load_draft(path)
    if isinstance(drafter, DraftHead):
        return DraftSource(HEAD, partial(_head_drafter, drafter, settings), None, drafter)
    if family.check_draft(drafter):
        make = partial(family.make_drafter, drafter, settings=settings)
        return DraftSource(MODEL, make, drafter)
    created = expect_drafter(drafter)
    return DraftSource(created.name, partial(_always, created))


def _together(sources: Sequence[DraftSource]) -> DraftSource:
    """Combine several sources into one, with the first model and the first head among them."""
    return DraftSource(
        "+".join(str(each.name) for each in sources),
        partial(_every_drafter, sources),
        next((each.model for each in sources if each.model is not None), None),
        next((each.head for each in sources if each.head is not None), None),
    )


# Functions and no lambdas, as a pipeline can be pickled.


def _always(drafter: Drafter | None, *_: object) -> Drafter | None:
    return drafter


def _every_drafter(
    sources: Sequence[DraftSource], target: CausalTarget, conditions: object
) -> list[Drafter]:
    return [cast("Drafter", each.make(target, conditions)) for each in sources]


def _head_drafter(
    head: DraftHead, settings: PipelineOptions, target: CausalTarget, _: object
) -> Drafter:
    from ragspec.drafters.heads.drafter import HeadDrafter

    gain = settings.min_expected_gain
    return HeadDrafter(head, target, mode=settings.draft_mode, min_expected_gain=gain)


def mode_for(rule: Rule, mode: str | None = None) -> str:
    """Return the mode of drafts for a rule, `mode` if set; raise RuleError if it takes none."""
    kinds = [kind.value for kind in _PREFERENCE if kind in rule.accepts]
    if mode is None and isinstance(rule, RelaxedWalk) and rule.tv_budget is not None:
        mode = DraftKind.DETERMINISTIC.value  # a budget bounds no other drafts
    if not kinds or mode not in (None, *kinds):
        raise RuleError(
            f"rule {rule.name!r} cannot judge drafts of draft_mode={mode!r}; expected one of "
            f"{', '.join(kinds) or 'none'}."
        )
    return kinds[0] if mode is None else mode
