"""The variants of drawing continuous latents that `bench.py image` compares, by short names.

A variant is `RULE[@VALUE][:DRAFTER]` as for codes: `near@0.02:jacobi`, `horizon@4`, `path:model`.
VALUE is r of near and s of horizon. The default drafter is "auto". `fewer@N` is the target alone
with N denoising steps, which speculation has to beat. `plain` is the target alone with all steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from baselines.cspd_paper import CspdPaper
from baselines.cspd_repo import CspdRepo

from harness.image_variants import FORM, PLAIN, Variant
from ragspec.errors import InputError

if TYPE_CHECKING:
    from ragspec.visual import ImagePipeline
    from ragspec.visual.families.base import Family

FEWER = "fewer"
PUBLISHED = MappingProxyType({rule.name: rule for rule in (CspdPaper, CspdRepo)})
USUAL = ("near@0.02", "near@0.1", "aligned", "horizon@2", "horizon@4", "path", "fewer@8", "fewer@4")
_VALUES: Mapping[str, tuple[str, type]] = MappingProxyType(
    {"near": ("r", float), "horizon": ("s", int), FEWER: ("steps", int)}
)


def parse_latent_variant(text: str, fewer: str = "steps") -> Variant:
    """Return the variant of a short name.

    Args:
        text: Short name.
        fewer: The setting that `fewer@N` sets to N.

    Raises:
        InputError: The name has another form.
        UnknownNameError: The rule is unknown.
    """
    from ragspec.visual.latents.rules import make_latent_rule

    name = text.strip()
    if name == PLAIN:
        return Variant(name, "near", None, {"r": 0.0})
    match = FORM.fullmatch(name)
    if match is None or match["mode"]:
        raise InputError(
            f"Expected a variant RULE[@VALUE][:DRAFTER], got {name!r}. Write it like near@0.02, "
            "path:jacobi or fewer@8."
        )
    rule = match["rule"]
    if rule not in (FEWER, *PUBLISHED):
        make_latent_rule(rule)  # raises its errors, here and below
    settings = _settings(name, rule, match["setting"], fewer)
    if rule == FEWER:
        if match["drafter"] or settings.get(fewer, 0) < 1:
            raise InputError(
                f"Expected fewer@N with N {fewer} of the target alone, got {name!r}. Mend the name."
            )
        return Variant(name, FEWER, None, settings)
    if rule not in PUBLISHED:
        make_latent_rule(rule, **settings)
    return Variant(name, rule, match["drafter"] or "auto", settings)


def _settings(name: str, rule: str, value: str | None, fewer: str) -> dict[str, Any]:
    if value is None:
        return {}
    if rule not in _VALUES:
        raise InputError(f"Expected {rule} without a value, got {name!r}. Leave @{value} out.")
    setting, kind = _VALUES[rule]
    setting = fewer if rule == FEWER else setting
    try:
        return {setting: kind(value)}
    except ValueError as error:
        expected = "a whole number" if kind is int else "a number"
        raise InputError(
            f"Expected {expected} as {setting}, got {value!r}. Mend {name!r}."
        ) from error


def parse_latent_variants(texts: Sequence[str], fewer: str = "steps") -> list[Variant]:
    """Return the variants of several names without duplicates, plain first."""
    variants = [parse_latent_variant(each, fewer) for each in (PLAIN, *texts) if each.strip()]
    return list({variant.name: variant for variant in variants}.values())


def build_latent_variant(
    variant: Variant,
    base: ImagePipeline,
    budget: Any,
    batch_size: int,
    family: type[Family] | None = None,
) -> ImagePipeline:
    """Return the pipeline of a variant over the models of `base`.

    Args:
        variant: Variant to build.
        base: Pipeline whose models all variants share.
        budget: Draft nodes a step, and the window of the drafter "jacobi".
        batch_size: Images to draw at once.
        family: Of the pipeline; None for that of `base`.
    """
    from ragspec.visual import ImagePipeline

    schedule = base.family.schedule
    settings, rule, steps = dict(variant.settings), variant.rule, schedule.steps
    if rule == FEWER:
        steps, rule, settings = settings.pop("steps"), "near", {"r": 0.0}
    pipe = ImagePipeline(
        base.model,
        base.tokenizer,
        variant.drafter,
        PUBLISHED[rule]() if rule in PUBLISHED else rule,
        steps=steps,
        floor=schedule.floor,
        budget=budget,
        family=family,
        folder=base.folder,
        batch_size=batch_size,
        **settings,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe
