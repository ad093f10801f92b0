"""The ways of drawing that `ragspec bench image` compares, by short names.

A way is `RULE[@VALUE[kNEAR][gGAIN]][:DRAFTER[/MODE]]`: `exact`, `lantern@0.05`,
`lantern++@3:head`, `lantern@0.3k100g2:head/deterministic`, `exact:jacobi+model`. VALUE is delta,
lambda or the number of clusters, whichever the rule has; NEAR the codes that count as near; GAIN
the codes that a draft must promise below one that stands for others. DRAFTER may be a path; one
whose last folder has the name of a MODE is written with a slash at its end. `sjd` and `scd` are
Jacobi decoding and its coupled form; `draft-only` is the draft model without a target, where all
relaxation ends.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from baselines import BASELINES, make_baseline

from ragspec.errors import InputError, UnknownNameError
from ragspec.registry import unknown
from ragspec.trees.draft_tree import DraftKind
from ragspec.visual.rules.by_name import relaxed

if TYPE_CHECKING:
    from ragspec.visual.pipeline.pipeline import ImagePipeline

PLAIN, DRAFT_ONLY = "plain", "draft-only"
ALIASES: Mapping[str, str] = MappingProxyType({"scd": "exact:jacobi", "sjd": "rejection:jacobi"})
SPELLINGS: Mapping[str, str] = MappingProxyType({"cool-sd": "cool"})  # names of papers
EXACT_RULES = ("exact", "rejection", "without-replacement")
_SETTING = r"(?P<value>[0-9.]+)(k(?P<near>[0-9]+))?(g(?P<gain>[0-9.]+))?"
_DRAFTER = rf"(?P<drafter>.+?)(/(?P<mode>{'|'.join(DraftKind)}))?"
FORM = re.compile(rf"(?P<rule>[a-z+-]+)(@(?P<setting>{_SETTING}))?(?P<draft>:{_DRAFTER})?")


@dataclass(frozen=True, slots=True)
class Variant:
    """One way of drawing; settings are those of its rule."""

    name: str
    rule: str = "exact"
    drafter: str | None = None
    settings: dict[str, Any] = field(default_factory=dict, hash=False)
    mode: str | None = None

    @property
    def series(self) -> str:
        """What joins ways that differ in one value, for curves."""
        result = FORM.fullmatch(self.name)
        return f"{result['rule']}{result['draft'] or ''}" if result else self.name

    @property
    def value(self) -> str:
        """The value in which the ways of a series differ, as it was written."""
        result = FORM.fullmatch(self.name)
        return (result["setting"] or "") if result else ""


def parse_variant(text: str) -> Variant:
    """Return the way that a short name stands for; raises InputError, UnknownNameError."""
    name = text.strip()
    if name in (PLAIN, DRAFT_ONLY):
        return Variant(name)
    result = FORM.fullmatch(ALIASES.get(name, name))
    if result is None:
        raise InputError(
            f"got the way {name!r}; expected RULE[@VALUE][:DRAFTER[/MODE]] such as lantern@0.05 "
            "or exact:head."
        )
    rule = SPELLINGS.get(result["rule"], result["rule"])
    if rule in (PLAIN, DRAFT_ONLY, *ALIASES):
        raise InputError(
            f"got the way {name!r}; {rule} takes neither a value nor a drafter, leave "
            f"{name.removeprefix(rule)} out."
        )
    rules = (*EXACT_RULES, *_relaxed())
    if rule not in rules:
        raise UnknownNameError(unknown("variant", rule, [PLAIN, DRAFT_ONLY, *ALIASES, *rules]))
    return Variant(
        name, rule, result["drafter"] or "starter", _settings(name, rule, result), result["mode"]
    )


def _relaxed() -> dict[str, str]:
    """Return the relaxed rules and the published ones, each with the setting of its value."""
    return relaxed() | {name: rule.relaxed_by for name, rule in BASELINES.items()}


def _settings(name: str, rule: str, result: re.Match[str]) -> dict[str, Any]:
    """Return the settings of a rule that stand in a name; raises InputError."""
    setting = result["setting"]
    if setting is None:
        return {}
    values = _relaxed()
    if rule not in values:
        raise InputError(f"got the way {name!r}; {rule} takes no value, leave @{setting} out.")
    kinds = {"value": int if rule == "gsd" else float, "near": int, "gain": float}
    names = {"value": values[rule], "near": "neighbours", "gain": "least_gain"}
    settings: dict[str, Any] = {}
    for part, kind in kinds.items():
        try:
            if result[part] is not None:
                settings[names[part]] = kind(result[part])
        except ValueError as error:
            selection = "a whole number" if kind is int else "a number"
            raise InputError(
                f"got the way {name!r}; {result[part]!r} is no {names[part]}, expected {selection}."
            ) from error
    return settings


def default_ways(codes: int, has_draft: bool, has_head: bool) -> tuple[str, ...]:
    """Return the ways to compare where nothing is said, for a code-book of so many codes."""
    from ragspec.visual.rules.by_name import default_delta

    delta = default_delta(codes)
    ways = ["exact"] if has_draft or has_head else []
    if has_draft:
        ways += ["rejection"]
    if has_draft or has_head:
        # Coupled drafts leave little to relax, so that delta may be large.
        ways += [f"lantern@{value:.3g}" for value in (delta, 0.1, 0.3)]
        ways += [f"lantern@0.99k{codes // share}" for share in (25, 5)]
        ways += [f"lantern++@{lam:g}" for lam in (3, 10, 30)]
        ways += ["gsd", f"gsd@{max(1, codes // 64)}"]
    if has_draft:
        blind = ":starter/deterministic"
        ways += [f"lantern@{value:.3g}{blind}" for value in (delta, 4 * delta)]
        ways += [f"lantern-rejection@{delta:.3g}", "cool@1.1", "cool@2", DRAFT_ONLY]
    if has_draft and has_head:
        ways += ["exact:head", f"lantern@{delta:.3g}:head", "lantern++@3:head"]
    return (*ways, "sjd", "scd")


def build_variant(
    direction: Variant,
    base: ImagePipeline,
    drafts: dict[str, Any],
    budget: Any,
    batch_size: int,
    min_expected_gain: float | None = None,
) -> ImagePipeline:
    """Return the pipeline of a way, over the models of `base`.

    drafts: what was loaded for the ways before, by name; filled here. worth: `min_expected_gain`
    of all. Raises what `ImagePipeline` does, and InputError for draft-only without a draft model.
    """
    from ragspec.visual.pipeline.pipeline import ImagePipeline

    instance: ImagePipeline
    if direction.name == DRAFT_ONLY:
        model = _loaded("model", base, drafts)
        instance = ImagePipeline(model, base.tokenizer, None, batch_size=batch_size)
    else:
        names = (direction.drafter or "").split("+") if direction.name != PLAIN else []
        has_draft = base.folder is not None and base.folder.draft is not None
        drafter = [
            _loaded("model", base, drafts) if name in ("starter", "model") and has_draft else name
            for name in names
        ]
        rule, settings = direction.rule, dict(direction.settings)
        if rule in BASELINES:
            rule, settings = make_baseline(rule, base.tokenizer.codebook, **settings), {}
        instance = ImagePipeline(
            base.model,
            base.tokenizer,
            drafter,
            rule,
            budget=budget,
            draft_mode=direction.mode,
            min_expected_gain=min_expected_gain,
            folder=base.folder,
            batch_size=batch_size,
            **settings,
        )
    instance.set_progress_bar_config(disable=True)
    return instance


def parse_ways(texts: Sequence[str]) -> list[Variant]:
    """Return the ways of several names, plain first, each once."""
    ways = [parse_variant(PLAIN), *(parse_variant(text) for text in texts if text.strip())]
    return list({direction.name: direction for direction in ways}.values())


def _loaded(name: str, base: ImagePipeline, drafts: dict[str, Any]) -> Any:
    from ragspec.visual.pipeline.folder import load_model

    if name not in drafts:
        folder = base.folder.draft if base.folder is not None else None
        if folder is None:
            raise InputError(f"{DRAFT_ONLY} needs a draft model; expected draft/ beside target/.")
        drafts[name] = load_model(folder, base.model.device, base.model.dtype)
    return drafts[name]
