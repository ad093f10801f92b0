"""The variants of drawing that `bench.py image` compares, by short names.

A variant is `RULE[@VALUE[kNEAR][gGAIN]][:DRAFTER[/MODE]]`: `exact`, `lantern@0.05`,
`lantern++@3:head`, `lantern@0.3k100g2:head/deterministic`, `exact:jacobi+model`.

- VALUE is the rule's setting: delta, lambda or the number of clusters.
- NEAR is the number of neighbours of a code.
- GAIN is the number of codes that a draft must promise below a code that stands for others.
- DRAFTER may be a path. A path whose last folder has the name of a MODE ends with a slash.

`sjd` and `scd` are Jacobi decoding and its coupled form. `draft-only` is the draft model without a
target, the limit of all relaxation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from baselines import BASELINES, make_baseline

from ragspec.errors import InputError, UnknownNameError
from ragspec.pipelines.console.records import split_drafters
from ragspec.registry import unknown
from ragspec.trees.draft_tree import DraftKind
from ragspec.visual.checks import relaxed

if TYPE_CHECKING:
    from ragspec.visual import ImagePipeline

PLAIN, DRAFT_ONLY = "plain", "draft-only"
ALIASES: Mapping[str, str] = MappingProxyType({"scd": "exact:jacobi", "sjd": "rejection:jacobi"})
SPELLINGS: Mapping[str, str] = MappingProxyType({"cool-sd": "cool"})  # names of papers
EXACT_RULES = ("exact", "rejection", "without-replacement")
_SETTING = r"(?P<value>[0-9.]+)(k(?P<near>[0-9]+))?(g(?P<gain>[0-9.]+))?"
_DRAFTER = rf"(?P<drafter>.+?)(/(?P<mode>{'|'.join(DraftKind)}))?"
FORM = re.compile(rf"(?P<rule>[a-z+-]+)(@(?P<setting>{_SETTING}))?(?P<draft>:{_DRAFTER})?")


@dataclass(frozen=True, slots=True)
class Variant:
    """One variant of drawing; `settings` are those of its rule."""

    name: str
    rule: str = "exact"
    drafter: str | None = None
    settings: dict[str, Any] = field(default_factory=dict, hash=False)
    mode: str | None = None

    @property
    def series(self) -> str:
        """The name without its value: variants of one series differ in the value alone."""
        match = FORM.fullmatch(self.name)
        return f"{match['rule']}{match['draft'] or ''}" if match else self.name

    @property
    def value(self) -> str:
        """The value in the name, as it was written."""
        match = FORM.fullmatch(self.name)
        return (match["setting"] or "") if match else ""


def parse_variant(text: str) -> Variant:
    """Return the variant of a short name.

    Raises:
        InputError: The name has another form.
        UnknownNameError: The rule is unknown.
    """
    name = text.strip()
    if name in (PLAIN, DRAFT_ONLY):
        return Variant(name)
    match = FORM.fullmatch(ALIASES.get(name, name))
    if match is None:
        raise InputError(
            f"Expected a variant RULE[@VALUE][:DRAFTER[/MODE]], got {name!r}. Write it like "
            "lantern@0.05 or exact:head."
        )
    rule = SPELLINGS.get(match["rule"], match["rule"])
    if rule in (PLAIN, DRAFT_ONLY, *ALIASES):
        raise InputError(
            f"Expected {rule} without a value and a drafter, got {name!r}. Leave "
            f"{name.removeprefix(rule)} out."
        )
    rules = (*EXACT_RULES, *_relaxed())
    if rule not in rules:
        raise UnknownNameError(unknown("variant", rule, [PLAIN, DRAFT_ONLY, *ALIASES, *rules]))
    return Variant(name, rule, match["drafter"], _settings(name, rule, match), match["mode"])


def _relaxed() -> dict[str, str]:
    """Return the relaxed rules and the baselines, each with the setting that VALUE is."""
    return relaxed() | {name: rule.relaxed_by for name, rule in BASELINES.items()}


def _settings(name: str, rule: str, match: re.Match[str]) -> dict[str, Any]:
    """Return the settings of a rule that its name holds; raises InputError."""
    setting = match["setting"]
    if setting is None:
        return {}
    values = _relaxed()
    if rule not in values:
        raise InputError(f"Expected {rule} without a value, got {name!r}. Leave @{setting} out.")
    kinds = {"value": int if rule == "gsd" else float, "near": int, "gain": float}
    names = {"value": values[rule], "near": "neighbours", "gain": "least_gain"}
    settings: dict[str, Any] = {}
    for part, kind in kinds.items():
        try:
            if match[part] is not None:
                settings[names[part]] = kind(match[part])
        except ValueError as error:
            expected = "a whole number" if kind is int else "a number"
            raise InputError(
                f"Expected {expected} as {names[part]}, got {match[part]!r}. Mend {name!r}."
            ) from error
    return settings


def default_variants(codes: int, has_draft: bool, has_head: bool) -> tuple[str, ...]:
    """Return the default variants for a code-book of `codes` codes."""
    from ragspec.visual.rules.by_name import default_settings

    delta = default_settings("lantern", codes)["delta"]
    variants = ["exact"] if has_draft or has_head else []
    if has_draft:
        variants += ["rejection"]
    if has_draft or has_head:
        # Coupled drafts leave little to relax, so delta may be large.
        variants += [f"lantern@{value:.3g}" for value in (delta, 0.1, 0.3)]
        variants += [f"lantern@0.99k{codes // share}" for share in (25, 5)]
        variants += [f"lantern++@{lam:g}" for lam in (3, 10, 30)]
        variants += ["gsd", f"gsd@{max(1, codes // 64)}"]
    if has_draft:
        deterministic = ":model/deterministic"
        variants += [f"lantern@{value:.3g}{deterministic}" for value in (delta, 4 * delta)]
        variants += [f"lantern-rejection@{delta:.3g}", "cool@1.1", "cool@2", DRAFT_ONLY]
    if has_draft and has_head:
        variants += ["exact:head", f"lantern@{delta:.3g}:head", "lantern++@3:head"]
    return (*variants, "sjd", "scd")


def build_variant(
    variant: Variant,
    base: ImagePipeline,
    drafts: dict[str, Any],
    budget: Any,
    batch_size: int,
    min_expected_gain: float | None = None,
) -> ImagePipeline:
    """Return the pipeline of a variant over the models of `base`.

    Args:
        variant: Variant to build.
        base: Pipeline whose models all variants share.
        drafts: Cache of loaded draft models by name.
        budget: Draft nodes a step.
        batch_size: Images to draw at once.
        min_expected_gain: Least expected gain of a draft model's next level; None for the default.

    Raises:
        InputError: draft-only has no draft model, or `ImagePipeline` refuses the settings.
    """
    from ragspec.visual import ImagePipeline

    pipe: ImagePipeline
    if variant.name == DRAFT_ONLY:
        model = _load_draft("model", base, drafts)
        pipe = ImagePipeline(model, base.tokenizer, None, batch_size=batch_size)
    else:
        has_draft = base.folder is not None and base.folder.draft is not None
        usual = "model" if has_draft else "head"
        names = split_drafters(variant.drafter or usual) if variant.name != PLAIN else []
        drafter = [
            _load_draft("model", base, drafts) if name == "model" and has_draft else name
            for name in names
        ]
        rule, settings = variant.rule, dict(variant.settings)
        if rule in BASELINES:
            rule, settings = make_baseline(rule, base.tokenizer.codebook, **settings), {}
        pipe = ImagePipeline(
            base.model,
            base.tokenizer,
            drafter,
            rule,
            budget=budget,
            draft_mode=variant.mode,
            min_expected_gain=min_expected_gain,
            folder=base.folder,
            batch_size=batch_size,
            **settings,
        )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def parse_variants(texts: Sequence[str]) -> list[Variant]:
    """Return the variants of several names without duplicates, plain first."""
    variants = [parse_variant(PLAIN), *(parse_variant(text) for text in texts if text.strip())]
    return list({variant.name: variant for variant in variants}.values())


def _load_draft(name: str, base: ImagePipeline, drafts: dict[str, Any]) -> Any:
    if name not in drafts:
        folder = base.folder.draft if base.folder is not None else None
        if folder is None:
            raise InputError(
                f"Expected draft/ beside target/ for {DRAFT_ONLY}, got none. Leave the variant out."
            )
        drafts[name] = base.family.load_draft(folder)
    return drafts[name]
