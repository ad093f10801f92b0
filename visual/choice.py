"""The choice of an image pipeline's drafter, which is created for each call and its conditions.

A draft model embeds the target's conditions by itself. A draft head reads the target's hidden
states. Jacobi drafting needs no model.
"""

from pathlib import Path

from ragspec.drafters.base import expect_drafter
from ragspec.drafters.heads.files import holds_head, open_head
from ragspec.drafters.heads.head import DraftHead
from ragspec.errors import InputError, RuleError, UnsupportedModelError
from ragspec.registry import entries, names, resolve
from ragspec.rules.base import Rule
from ragspec.trees.draft_tree import DraftKind
from ragspec.visual.call import PipelineOptions
from ragspec.visual.checks import check_drafters
from ragspec.visual.families.base import DraftSource, Family
from ragspec.visual.loading import AUTO, HEAD, JACOBI, MODEL, NONE, find_draft
from ragspec.visual.rules.lantern import RelaxedWalk

# A draft model or head uses the first of these kinds that the rule accepts.
_PREFERENCE = ("coupled", "sampled", "sampled-without-replacement", "deterministic")


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
    usual: type[Family]
    for _, usual in entries("family", reversed(list(names("family")))):  # other packages last
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
        MissingModelError: The folder of the drafter is missing.
        InputError: The object cannot draft, or the family does not support several drafters.
    """
    meant = {AUTO: family.usual_drafter(settings.draft_mode, named), NONE: None}
    requests = drafter if isinstance(drafter, list | tuple) else [drafter]
    requests = [meant.get(each, each) if isinstance(each, str) else each for each in requests]
    requests = [each for each in requests if each is not None]
    check_drafters(requests, settings.draft_mode, family.unit == "codes")
    return DraftSource([_named(each, family) for each in requests], family, settings)


def _named(drafter: object, family: Family) -> tuple[str, object]:
    """Return the name and the object of a drafter, see `DraftSource`."""
    if isinstance(drafter, str) and drafter == JACOBI:
        return JACOBI, None
    if isinstance(drafter, str | Path):
        path = find_draft(drafter, family.folder)
        drafter = open_head(path) if holds_head(path) else family.load_draft(path)
    if isinstance(drafter, DraftHead):
        check_drafters([HEAD], None, family.unit == "codes")
        return HEAD, drafter
    if family.check_draft(drafter):
        return MODEL, drafter
    return expect_drafter(drafter).name, drafter


def mode_for(rule: Rule, mode: str | None = None) -> str:
    """Return the mode of drafts for a rule, `mode` if set; raise RuleError if it takes none."""
    kinds = [kind for kind in _PREFERENCE if kind in rule.accepts]
    if mode is None and isinstance(rule, RelaxedWalk) and rule.tv_budget is not None:
        mode = DraftKind.DETERMINISTIC.value  # a budget bounds no other drafts
    if not kinds or mode not in (None, *kinds):
        raise RuleError(
            f"rule {rule.name!r} cannot judge drafts of draft_mode={mode!r}; expected one of "
            f"{', '.join(kinds) or 'none'}."
        )
    return kinds[0] if mode is None else mode
