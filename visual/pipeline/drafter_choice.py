"""Which drafter an image pipeline uses: built again for every call, since conditions differ.

A draft model reads the same conditions as the target, through embeddings of its own; a feature head
goes on from the target's hidden states; Jacobi drafting needs no model at all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from ragspec.drafters.base import Drafter, expect_drafter
from ragspec.drafters.eagle.head import CONFIG, KIND, FeatureHead
from ragspec.errors import InputError, ModelNotFoundError, RuleError, UnknownNameError
from ragspec.registry import unknown
from ragspec.rules.base import Rule
from ragspec.trees.draft_tree import DraftKind
from ragspec.visual.models.target import ConditionTable, ImageTarget
from ragspec.visual.pipeline.folder import ImageFolder, check_draft, load_model

NAMED = ("auto", "starter", "model", "head", "jacobi")
# What a rule is given where nothing is said: the first that it accepts.
_PREFERENCE = (
    DraftKind.COUPLED,
    DraftKind.SAMPLED,
    DraftKind.SAMPLED_WITHOUT_REPLACEMENT,
    DraftKind.DETERMINISTIC,
)


@dataclass(frozen=True, slots=True, eq=False)
class Conditions:
    """What the images of one call are of: class labels i64 [R], or features [R, L, d].

    padding: as many first features of each row are not seen. negative [1, L, d] or [R, L, d]: what
    stands in for no condition, with padding of its own; None for what the model learned for that.
    """

    condition: torch.Tensor
    padding: tuple[int, ...] = ()
    negative: torch.Tensor | None = None
    negative_padding: tuple[int, ...] = ()

    def table(self, model: Any) -> ConditionTable:
        """Return what the condition ids stand for in a model; raises InputError."""
        with torch.no_grad():
            current = model.condition(self.condition)
            if self.negative is None:
                return ConditionTable.of_rows(current, model.unconditional(1)[0], self.padding)
            none = model.condition(self.negative)
        rows = len(current)
        padding = self.padding or (0,) * rows
        beside = self.negative_padding or (0,) * len(none)
        repeated = none.expand(rows, -1, -1) if len(none) == 1 else none
        every = beside * rows if len(none) == 1 else beside
        return ConditionTable.of_pairs(current, repeated, padding, every)

    def target(self, model: Any, like: ImageTarget) -> ImageTarget:
        """Return a target over another model, guided and laid out as `like`."""
        table = self.table(model)
        scale, interval = like.guidance_scale, like.guidance_interval
        return ImageTarget(model, table, scale, interval, raster=like.raster)


class DrafterSource(Protocol):
    """What the images of a call are of."""

    def table(self, model: Any) -> ConditionTable:
        """Return what the condition ids stand for in a model."""
        ...

    def target(self, model: Any, like: ImageTarget) -> ImageTarget:
        """Return a target over another model, guided and laid out as `like`."""
        ...


class DraftSource(Protocol):
    """Makes the drafter of one call, or several, which the engine fuses."""

    def __call__(
        self, target: ImageTarget, conditions: DrafterSource
    ) -> Drafter | Sequence[Drafter] | None:
        """Return what drafts for a target under these conditions."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class ModelSource:
    """Drafts with a smaller model of the same codes, guided as the target is."""

    model: Any
    mode: str
    width: Any = None
    depth: int | None = None
    min_expected_gain: float | None = None

    def __call__(self, target: ImageTarget, conditions: DrafterSource) -> Drafter:
        """Return a `ModelDrafter` over the draft model."""
        from ragspec.drafters.model.drafter import ModelDrafter

        draft = conditions.target(self.model, target)
        return ModelDrafter(
            draft, self.depth, self.width, mode=self.mode, min_expected_gain=self.min_expected_gain
        )


@dataclass(frozen=True, slots=True, eq=False)
class HeadSource:
    """Drafts with a feature head of the target."""

    head: Any
    mode: str
    width: Any = None
    depth: int | None = None
    min_expected_gain: float | None = None

    def __call__(self, target: ImageTarget, conditions: DrafterSource) -> Drafter:
        """Return a `HeadDrafter` over the target of this call."""
        from ragspec.drafters.eagle.drafter import HeadDrafter

        return HeadDrafter(
            self.head,
            target,
            self.depth,
            self.width,
            mode=self.mode,
            min_expected_gain=self.min_expected_gain,
        )


@dataclass(frozen=True, slots=True, eq=False)
class FixedSource:
    """One drafter for every call, or none: plain decoding."""

    drafter: Drafter | None

    def __call__(self, target: ImageTarget, conditions: DrafterSource) -> Drafter | None:
        """Return the drafter."""
        return self.drafter


@dataclass(frozen=True, slots=True, eq=False)
class JacobiSource:
    """Drafts from the target's last forward; width: codes of a row, None for the target's own."""

    mode: str
    width: int | None = None

    def __call__(self, target: ImageTarget, conditions: DrafterSource) -> Drafter:
        """Return a `JacobiDrafter` for the rows of the target."""
        from ragspec.visual.drafting.jacobi import JacobiDrafter

        form: Literal["coupled", "sampled"] = "coupled" if self.mode == "coupled" else "sampled"
        branches, raster = 1 if form == "coupled" else 0, target.raster
        width = self.width if raster is None else raster.line
        end = target.vocab_size - 1 if raster is not None and raster.ends else None
        return JacobiDrafter(form=form, width=width, branches=branches, end=end)


@dataclass(frozen=True, slots=True, eq=False)
class SeveralSources:
    """Several drafters, fused into one tree."""

    sources: tuple[Any, ...]

    @property
    def model(self) -> Any:
        """The draft model among them, if there is one."""
        return next((each.model for each in self.sources if hasattr(each, "model")), None)

    @property
    def head(self) -> Any:
        """The feature head among them, if there is one."""
        return next((each.head for each in self.sources if hasattr(each, "head")), None)

    def __call__(self, target: ImageTarget, conditions: DrafterSource) -> list[Drafter]:
        """Return a drafter of each source."""
        return [source(target, conditions) for source in self.sources]


def draft_source(
    drafter: Any,
    rule: Rule,
    model: Any,
    folder: ImageFolder | None,
    mode: str | None = None,
    min_expected_gain: float | None = None,
) -> DraftSource:
    """Return what makes the drafters of a pipeline.

    drafter: "starter" (the draft model that lies with the target, else its head), "model", "head",
    "jacobi", "auto" (jacobi, or starter for a rule with a budget of total variation), a folder of
    a draft model or of a head, a `LlamaGenModel`, a `FeatureHead`, a Drafter, a list of such (fused
    into one tree), or None. mode: how a model or a head drafts, see `HeadDrafter`; None takes the
    first that the rule accepts, or "deterministic" for a rule with such a budget.
    min_expected_gain: the accepted codes that its next forward must promise, see there. Raises
    UnknownNameError, ModelNotFoundError, TokenizerMismatchError, InputError.
    """
    if drafter is None:
        return FixedSource(None)
    if isinstance(drafter, list | tuple):
        instance = tuple(
            draft_source(each, rule, model, folder, mode, min_expected_gain) for each in drafter
        )
        return SeveralSources(instance) if len(instance) > 1 else [*instance, FixedSource(None)][0]
    mode = mode or mode_for(rule)
    if isinstance(drafter, str) and drafter == "auto":
        drafter = "starter" if mode == DraftKind.DETERMINISTIC.value else "jacobi"
    if isinstance(drafter, str) and drafter == "jacobi":
        return jacobi_source(mode, int(model.config.grid_size))
    if isinstance(drafter, str | Path):
        return _from_folder(_where(drafter, folder), model, mode, min_expected_gain)
    if isinstance(drafter, FeatureHead):
        return HeadSource(drafter, mode, min_expected_gain=min_expected_gain)
    if hasattr(drafter, "config") and hasattr(drafter, "condition"):
        check_draft(model, drafter)
        return ModelSource(drafter, mode, min_expected_gain=min_expected_gain)
    expect_drafter(drafter)
    return FixedSource(drafter)


def source_name(source: DraftSource) -> str | None:
    """Return what drafts, in the words of `draft_source`; None where nothing does."""
    if isinstance(source, SeveralSources):
        return "+".join(str(source_name(each)) for each in source.sources)
    if isinstance(source, JacobiSource):
        return "jacobi"
    if isinstance(source, FixedSource):
        return None if source.drafter is None else source.drafter.name
    return "head" if hasattr(source, "head") else "model"


def mode_for(rule: Rule) -> str:
    """Return how a model or a head drafts for a rule; raises RuleError."""
    if getattr(rule, "tv_budget", None) is not None:
        return DraftKind.DETERMINISTIC.value  # only such drafts let a budget bound
    for kind in _PREFERENCE:
        if kind in rule.accepts:
            return kind.value
    raise RuleError(f"rule {rule.name!r} accepts no kind of draft; expected at least one.")


def jacobi_source(mode: str, width: int | None = None) -> JacobiSource:
    """Return what drafts from the target's last forward; raises InputError for a mode it lacks."""
    if mode == DraftKind.DETERMINISTIC.value:
        raise InputError(
            "got drafter 'jacobi' where deterministic drafts are needed (a budget of total "
            "variation bounds no others); its drafts come of the target's own noise. Use "
            "'starter' or 'head', or leave tv_budget out."
        )
    return JacobiSource(mode, width)


def _where(drafter: str | Path, folder: ImageFolder | None) -> Path:
    """Return the folder of a drafter given by name or path."""
    text = str(drafter)
    if text not in NAMED:
        path = Path(drafter).expanduser()
        if (path / CONFIG).is_file():
            return path
        if path.is_dir() or isinstance(drafter, Path) or text.startswith((".", "/", "~")):
            raise ModelNotFoundError(
                f"no draft model at {path}: expected a folder with {CONFIG}, of a LlamaGenModel "
                "or a feature head."
            )
        raise UnknownNameError(unknown("image drafter", text, NAMED))
    choices: dict[str, Callable[[ImageFolder], Path | None]] = {
        "starter": lambda parts: parts.draft or parts.head,
        "model": lambda parts: parts.draft,
        "head": lambda parts: parts.head,
    }
    result = None if folder is None else choices[text](folder)
    if result is None:
        name = "the given model" if folder is None else folder.name
        raise ModelNotFoundError(
            f"drafter {text!r}: nothing of that kind lies with {name}; expected draft/ or head/ "
            "beside target/. Give the folder of a draft model, 'jacobi', or None."
        )
    return result


def _from_folder(path: Path, model: Any, mode: str, min_expected_gain: float | None) -> DraftSource:
    try:
        kind = json.loads((path / CONFIG).read_text(encoding="utf-8")).get("kind")
    except (OSError, ValueError, AttributeError) as error:
        raise InputError(f"{path / CONFIG} cannot be read ({error}); expected JSON.") from error
    if kind == KIND:
        return HeadSource(FeatureHead.load(path), mode, min_expected_gain=min_expected_gain)
    draft = load_model(path, model.device, model.dtype)
    check_draft(model, draft)
    return ModelSource(draft, mode, min_expected_gain=min_expected_gain)
