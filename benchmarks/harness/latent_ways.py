"""The ways of drawing continuous latents that `ragspec bench image` compares, by short names.

A way is `RULE[@VALUE][:DRAFTER]` as for codes: `near@0.02:jacobi`, `horizon@4`, `path:model`. VALUE
is r of near and s of horizon; without a drafter it is "auto". `fewer@N` is the target alone with N
denoising steps, what speculation has to beat; `plain` the target alone with its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from harness.image_ways import FORM, PLAIN, Variant
from ragspec.errors import InputError

if TYPE_CHECKING:
    from ragspec.visual.pipeline.latents import LatentPipeline

FEWER = "fewer"
USUAL = ("near@0.02", "near@0.1", "aligned", "horizon@2", "horizon@4", "path", "fewer@8", "fewer@4")
_VALUES: Mapping[str, tuple[str, type]] = MappingProxyType(
    {"near": ("r", float), "horizon": ("s", int), FEWER: ("steps", int)}
)


def parse_latent_variant(text: str, fewer: str = "steps") -> Variant:
    """Return the way that a short name stands for; fewer: what `fewer@N` has N of.

    Raises InputError, UnknownNameError.
    """
    from ragspec.visual.latents.rules.by_name import make_latent_rule

    name = text.strip()
    if name == PLAIN:
        return Variant(name, "near", None, {"r": 0.0})
    result = FORM.fullmatch(name)
    if result is None or result["mode"]:
        raise InputError(
            f"got the way {name!r}; expected RULE[@VALUE][:DRAFTER] such as near@0.02 or "
            "path:jacobi, or fewer@8."
        )
    rule = result["rule"]
    if rule != FEWER:
        make_latent_rule(rule)  # for its errors, here and below
    settings = _settings(name, rule, result["setting"], fewer)
    if rule == FEWER:
        if result["drafter"] or settings.get(fewer, 0) < 1:
            raise InputError(
                f"got the way {name!r}; expected fewer@N with N {fewer} of the target alone."
            )
        return Variant(name, FEWER, None, settings)
    make_latent_rule(rule, **settings)
    return Variant(name, rule, result["drafter"] or "auto", settings)


def _settings(name: str, rule: str, value: str | None, fewer: str) -> dict[str, Any]:
    if value is None:
        return {}
    if rule not in _VALUES:
        raise InputError(f"got the way {name!r}; {rule} takes no value, leave @{value} out.")
    setting, kind = _VALUES[rule]
    setting = fewer if rule == FEWER else setting
    try:
        return {setting: kind(value)}
    except ValueError as error:
        selection = "a whole number" if kind is int else "a number"
        raise InputError(
            f"got the way {name!r}; {value!r} is no {setting}, expected {selection}."
        ) from error


def parse_latent_ways(texts: Sequence[str], fewer: str = "steps") -> list[Variant]:
    """Return the ways of several names, plain first, each once; see `parse_latent_variant`."""
    ways = [parse_latent_variant(each, fewer) for each in (PLAIN, *texts) if each.strip()]
    return list({direction.name: direction for direction in ways}.values())


def build_latent_variant(
    direction: Variant,
    base: LatentPipeline,
    budget: Any,
    batch_size: int,
    instance: type[LatentPipeline] | None = None,
) -> LatentPipeline:
    """Return the pipeline of a way, over the models of `base`; raises what `LatentPipeline` does.

    budget: draft nodes, as many as the window of "jacobi" has. made: a class of pipeline, None for
    `LatentPipeline`.
    """
    from ragspec.visual.pipeline.latents import LatentPipeline

    settings, rule, steps = dict(direction.settings), direction.rule, base.schedule.steps
    if rule == FEWER:
        steps, rule, settings = settings.pop("steps"), "near", {"r": 0.0}
    pipe = (instance or LatentPipeline)(
        base.model,
        base.tokenizer,
        direction.drafter,
        rule,
        steps=steps,
        floor=base.schedule.floor,
        budget=budget,
        folder=base.folder,
        batch_size=batch_size,
        **settings,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe
