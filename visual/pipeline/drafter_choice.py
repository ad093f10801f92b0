"""The choice of an image pipeline's drafter, which is created for each call and its conditions.

A draft model embeds the target's conditions by itself. A feature head reads the target's hidden
states. Jacobi drafting needs no model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor

from ragspec.drafters.base import Drafter, expect_drafter
from ragspec.drafters.eagle.head import CONFIG, KIND, FeatureHead
from ragspec.errors import InputError, ModelNotFoundError, RuleError, UnknownNameError
from ragspec.registry import unknown
from ragspec.rules.base import Rule
from ragspec.trees.draft_tree import DraftKind
from ragspec.visual.models.target import ConditionTable, ImageTarget
from ragspec.visual.pipeline.folder import ImageFolder, check_draft, load_model
from ragspec.visual.pipeline.prompt_parts import PromptConditions, check_prompt_draft, load_part
from ragspec.visual.pipeline.request import ImageConfig
from ragspec.visual.rules.lantern import RelaxedWalk

JACOBI = "jacobi"
NODES = 12  # the default budget of draft nodes
# A draft model or head uses the first of these that the rule accepts.
_PREFERENCE = (
    DraftKind.COUPLED,
    DraftKind.SAMPLED,
    DraftKind.SAMPLED_WITHOUT_REPLACEMENT,
    DraftKind.DETERMINISTIC,
)


@dataclass(frozen=True, slots=True, eq=False)
class Conditions:
    """The conditions of one call's images.

    Attributes:
        condition: Class labels i64 [R], or features [R, L, d].
        padding: How many features at the start of each row are masked.
        negative: Features [1, L, d] or [R, L, d] that guidance leads away from; None for the
            embedding that the model learned for no condition.
        negative_padding: As `padding`, for each row of `negative`.
    """

    condition: Tensor
    padding: tuple[int, ...] = ()
    negative: Tensor | None = None
    negative_padding: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.condition)

    def table(self, model: Any) -> ConditionTable:
        """Return a model's embeddings of the conditions.

        Raises:
            InputError: The model was not made for these labels or features.
        """
        with torch.no_grad():
            embedded = model.condition(self.condition)
            if self.negative is None:
                return ConditionTable.of_rows(embedded, model.unconditional(1)[0], self.padding)
            none = model.condition(self.negative)
        rows = len(embedded)
        padding = self.padding or (0,) * rows
        beside = self.negative_padding or (0,) * len(none)
        repeated = none.expand(rows, -1, -1) if len(none) == 1 else none
        every = beside * rows if len(none) == 1 else beside
        return ConditionTable.of_pairs(embedded, repeated, padding, every)

    def open(self, model: Any, config: ImageConfig) -> ImageTarget:
        """Return a target over a model under these conditions."""
        scale, interval = config.guidance_scale, config.guidance_interval
        return ImageTarget(
            model, self.table(model), scale, interval, fixed=config.fixed, raster=config.raster
        )


ImageConditions = Conditions | PromptConditions
Drafters = Drafter | Sequence[Drafter] | None


@dataclass(frozen=True, slots=True, eq=False)
class DraftSource:
    """Creates the drafter of each call, or several drafters, which the engine fuses.

    Attributes:
        name: The drafter's name, several joined by "+"; None for plain decoding.
        make: Creates the drafter for a target and its conditions.
        model, head: The draft model and the feature head, if the drafter has one.
        mode, min_expected_gain: See `draft_source`.
    """

    name: str | None
    make: Callable[[Any, Any], Drafters]
    model: Any = None
    head: Any = None
    mode: str | None = None
    min_expected_gain: float | None = None

    def __call__(self, target: Any, conditions: Any = None) -> Drafters:
        """Create the drafter of a call."""
        return self.make(target, conditions)


@dataclass(frozen=True, slots=True, eq=False)
class DraftKit:
    """The drafters that one family of models supports.

    Attributes:
        usual: The drafter's name for "auto".
        jacobi: Creates the source that drafts without a model.
        places: The folder of each named drafter, None if it is missing.
        load: Opens a folder.
        of: Checks a draft model or a head and returns its source; None for other objects.
        several: Whether a list of drafters is supported.
    """

    usual: str
    jacobi: Callable[[], DraftSource]
    places: Mapping[str, Path | None]
    load: Callable[[Path], Any]
    of: Callable[[Any], DraftSource | None]
    several: bool = True


def choose_drafter(drafter: Any, kit: DraftKit) -> DraftSource:
    """Return the source of a pipeline's drafters.

    Args:
        drafter: "auto", "jacobi", a name of `kit.places`, the folder of a draft model, a draft
            model, a Drafter, a list of these to fuse, or None or "none" for plain decoding.

    Raises:
        UnknownNameError: No drafter has the name.
        ModelNotFoundError: The folder of the drafter is missing.
        InputError: The object cannot draft, or the family does not support several drafters.
    """
    if isinstance(drafter, list | tuple):
        if len(drafter) > 1 and not kit.several:
            raise InputError(
                f"got {len(drafter)} drafters of latents; expected one: drafts are chains."
            )
        if len(drafter) > 1:
            return _together([choose_drafter(each, kit) for each in drafter])
        drafter = drafter[0] if drafter else None
    if isinstance(drafter, str) and drafter == "auto":
        drafter = kit.usual
    if drafter is None or (isinstance(drafter, str) and drafter == "none"):
        return DraftSource(None, lambda target, conditions: None)
    if isinstance(drafter, str) and drafter == JACOBI:
        return kit.jacobi()
    if isinstance(drafter, str | Path):
        drafter = kit.load(_where(drafter, kit))
    if (source := kit.of(drafter)) is not None:
        return source
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


def _where(drafter: str | Path, kit: DraftKit) -> Path:
    """Return the folder of a drafter given by name or path."""
    text, path = str(drafter), Path(drafter).expanduser()
    if text not in kit.places:
        if (path / CONFIG).is_file():
            return path
        if path.is_dir() or isinstance(drafter, Path) or text.startswith((".", "/", "~")):
            raise ModelNotFoundError(
                f"no draft model at {path}: it holds no {CONFIG}. Expected the folder of a smaller "
                "model of the target's kind, or of a feature head."
            )
        raise UnknownNameError(unknown("image drafter", text, ("auto", JACOBI, *kit.places)))
    place = kit.places[text]
    if place is None:
        raise ModelNotFoundError(
            f"drafter {text!r}: nothing of that kind lies with the target; expected draft/ or "
            "head/ beside it. Give the folder of a draft model, 'jacobi', or None."
        )
    return place


def draft_source(
    drafter: Any,
    rule: Rule,
    model: Any,
    folder: ImageFolder | None,
    mode: str | None = None,
    min_expected_gain: float | None = None,
) -> DraftSource:
    """Return the source of the drafters of a pipeline over codes; see `choose_drafter`.

    Args:
        drafter: Also "starter" (the draft model beside the target, else its head), "model" and
            "head". "auto" is "model" in the mode "deterministic", else "jacobi".
        model: The target's model.
        folder: Holds the folders of the draft model and the head.
        mode: How a model or a head drafts, see `HeadDrafter`; None takes the first mode that the
            rule accepts, or "deterministic" for a rule with a budget of total variation.
        min_expected_gain: Accepted codes that a further draft forward must promise, see there.
    """
    mode = mode or mode_for(rule)

    def load(path: Path) -> Any:
        try:
            kind = json.loads((path / CONFIG).read_text(encoding="utf-8")).get("kind")
        except (OSError, ValueError, AttributeError) as error:
            raise InputError(f"{path / CONFIG} cannot be read ({error}); expected JSON.") from error
        return (
            FeatureHead.load(path) if kind == KIND else load_model(path, model.device, model.dtype)
        )

    def of(draft: Any) -> DraftSource | None:
        if isinstance(draft, FeatureHead):
            return _head_source(draft, mode, min_expected_gain)
        if not (hasattr(draft, "config") and hasattr(draft, "condition")):
            return None
        check_draft(model, draft)
        return model_source(draft, mode, min_expected_gain)

    draft, head = (folder.draft, folder.head) if folder is not None else (None, None)
    places = {"starter": draft or head, "model": draft, "head": head}
    width = int(model.config.grid_size)
    kit = DraftKit(_usual(mode), lambda: jacobi_source(mode, width), places, load, of)
    return choose_drafter(drafter, kit)


def prompt_source(
    drafter: Any,
    rule: Rule,
    model: Any,
    folder: Path | None,
    mode: str | None = None,
    min_expected_gain: float | None = None,
) -> DraftSource:
    """Return the source of the drafters of a prompt pipeline; see `draft_source`.

    Args:
        folder: The target's folder, which may hold draft/.
    """
    mode = mode or mode_for(rule)

    def load(path: Path) -> Any:
        return load_part(path, model.config.model_type, model.device, model.dtype)

    def of(draft: Any) -> DraftSource | None:
        if not hasattr(getattr(draft, "config", None), "model_type"):
            return None
        check_prompt_draft(model, draft)
        return model_source(draft, mode, min_expected_gain)

    there = folder is not None and (folder / "draft").is_dir()
    places = dict.fromkeys(("model", "starter"), folder / "draft" if folder and there else None)
    return choose_drafter(
        drafter, DraftKit(_usual(mode), lambda: jacobi_source(mode), places, load, of)
    )


def model_source(model: Any, mode: str, min_expected_gain: float | None = None) -> DraftSource:
    """Return a source that drafts with a smaller model of the same codes under equal guidance."""

    def make(target: ImageTarget, conditions: ImageConditions) -> Drafter:
        from ragspec.drafters.model.drafter import ModelDrafter

        config = ImageConfig(target.guidance_scale, target.guidance_interval, target.raster)
        draft = conditions.open(model, config)
        return ModelDrafter(draft, mode=mode, min_expected_gain=min_expected_gain)

    return DraftSource("model", make, model, None, mode, min_expected_gain)


def _head_source(head: FeatureHead, mode: str, min_expected_gain: float | None) -> DraftSource:
    """Return a source that drafts with a feature head over the target's hidden states."""

    def make(target: ImageTarget, conditions: ImageConditions) -> Drafter:
        from ragspec.drafters.eagle.drafter import HeadDrafter

        return HeadDrafter(head, target, mode=mode, min_expected_gain=min_expected_gain)

    return DraftSource("head", make, None, head, mode, min_expected_gain)


def jacobi_source(mode: str, width: int | None = None) -> DraftSource:
    """Return a source that drafts from the target's last forward.

    Args:
        width: Codes in a row, for targets without a raster.

    Raises:
        InputError: The mode is "deterministic".
    """
    if mode == DraftKind.DETERMINISTIC.value:
        raise InputError(
            "got drafter 'jacobi' where deterministic drafts are needed (a budget of total "
            "variation bounds no others); its drafts come of the target's own noise. Use "
            "'starter' or 'head', or leave tv_budget out."
        )

    def make(target: ImageTarget, conditions: ImageConditions) -> Drafter:
        from ragspec.visual.drafting.jacobi import JacobiDrafter

        form: Literal["coupled", "sampled"] = "coupled" if mode == "coupled" else "sampled"
        branches, raster = 1 if form == "coupled" else 0, target.raster
        line = width if raster is None else raster.line
        end = target.vocab_size - 1 if raster is not None and raster.ends else None
        return JacobiDrafter(form=form, width=line, branches=branches, end=end)

    return DraftSource(JACOBI, make, mode=mode)


def mode_for(rule: Rule) -> str:
    """Return the draft mode of a model or a head for a rule.

    Raises:
        RuleError: The rule accepts no kind of draft.
    """
    if isinstance(rule, RelaxedWalk) and rule.tv_budget is not None:
        return DraftKind.DETERMINISTIC.value  # a budget bounds no other drafts
    for kind in _PREFERENCE:
        if kind in rule.accepts:
            return kind.value
    raise RuleError(f"rule {rule.name!r} accepts no kind of draft; expected at least one.")


def _usual(mode: str) -> str:
    return "model" if mode == DraftKind.DETERMINISTIC.value else JACOBI
