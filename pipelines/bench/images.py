"""Variants of drawing that a benchmark compares, on the same seeds, one picture at a time.

A variant is `RULE[@VALUE][:DRAFTER]`: `exact`, `lantern@0.3`, `near@0.02:model`. VALUE is the
setting that relaxes the rule. `plain` draws without drafts. `fewer@N` is the plain model with N
denoising steps, or N iterations of a masked model: what speculation has to beat.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

from ragspec.errors import InputError, UnknownNameError
from ragspec.pipelines.bench.variants import Outcome
from ragspec.registry import unknown

FORM = re.compile(r"(?P<rule>[a-z+-]+?)(@(?P<value>[0-9.]+))?(:(?P<drafter>.+))?")
EXACT_RULES = ("exact", "rejection", "without-replacement")
LATENT_SETTINGS = {"near": "r", "horizon": "s"}
DEFAULT_CODES = ("exact", "lantern", "lantern++")
DEFAULT_LATENTS = ("aligned", "near@0.02")
# Names of the Unicode emoji list, for models that draw from a prompt.
PROMPTS = (
    "candle",
    "tulip",
    "red heart",
    "sun",
    "star",
    "house",
    "rose",
    "pizza",
    "rocket",
    "fish",
)


@dataclass(frozen=True, slots=True)
class ImageItem:
    """One picture: its class or prompt, and its seed."""

    id: str
    arguments: dict[str, Any]
    seed: int
    category: str = "images"
    new_tokens: int = 1 << 30


@dataclass(frozen=True, slots=True)
class ImageOptions:
    """How pictures are drawn, for all variants alike."""

    budget: int | str = 12
    guidance: float = 2.0
    temperature: float = 1.0
    steps: int | None = None
    device: str = "auto"
    dtype: str = "auto"


class ImageVariant:
    """A pipeline with one rule and one drafter."""

    def __init__(self, name: str, pipe: Any, options: ImageOptions) -> None:
        self.name = name
        self.pipe = pipe
        self.options = options
        pipe.set_progress_bar_config(disable=True)

    def run(self, item: ImageItem, limit: int) -> Outcome:
        """Draw one picture; `tokens` holds a number for each code or latent."""
        import torch

        out = self.pipe(
            **item.arguments,
            guidance_scale=self.options.guidance,
            temperature=self.options.temperature,
            generator=torch.Generator().manual_seed(item.seed),
            output_type="latent",
        )
        figures = {}
        for name in ("tv_excess", "nll_gap", "distance_mean"):
            value = getattr(out.stats, name, None)
            if value is not None:
                figures[name] = float(value)
        seconds, forwards = out.stats.seconds, out.stats.forwards
        return Outcome(_numbers(out), forwards, seconds, [], 0.0, out.label, figures)


def build_images(
    source: str, names: Sequence[str], count: int, seed: int, options: ImageOptions
) -> tuple[list[ImageItem], dict[str, list[ImageVariant]]]:
    """Load a model and return the pictures to draw and the variants, plain first.

    Args:
        source: A bundled set or the folder of a pipeline.
        names: Variants; empty for a few usual ones.
        count: Pictures.
        seed: Seed of the first picture.
        options: How pictures are drawn.

    Raises:
        InputError: A variant cannot be read or does not fit the model.
        UnknownNameError: A rule or drafter does not exist.
    """
    from ragspec.visual.pipeline.folder import LATENTS, MASKED, find_folder, kind_of

    kind = kind_of(find_folder(source).target)
    masked, latents = kind == MASKED, kind == LATENTS
    usual = DEFAULT_LATENTS if masked or latents else DEFAULT_CODES
    parsed = [parse_variant(name, masked or latents) for name in names or usual]
    build = _masked_pipes if masked else _latent_pipes if latents else _code_pipes
    pipes = build(source, [("plain", "plain", None, None), *parsed], options)
    first = next(iter(pipes.values()))
    by_class = first.trunk.config.condition == "class"
    subjects = list(range(first.trunk.config.num_classes)) if by_class else list(PROMPTS)
    items = []
    for number in range(count):
        subject = subjects[number % len(subjects)]
        arguments = {"class_labels": [subject]} if by_class else {"prompt": [subject]}
        items.append(ImageItem(str(number), arguments, seed + number))
    return items, {name: [ImageVariant(name, pipe, options)] for name, pipe in pipes.items()}


Parsed = tuple[str, str, "float | None", "str | None"]  # name, rule, value, drafter


def parse_variant(name: str, latents: bool = False) -> Parsed:
    """Return name, rule, value and drafter of a variant, see the module.

    Raises:
        InputError: The name has another form, or the rule takes no value.
        UnknownNameError: The rule does not exist.
    """
    match = FORM.fullmatch(name.strip())
    if match is None:
        raise InputError(
            f"Expected a variant RULE[@VALUE][:DRAFTER], got {name!r}. Write for example "
            "lantern@0.3 or exact:model."
        )
    rule, value = match["rule"], None if match["value"] is None else float(match["value"])
    rules = _rules(latents)
    if rule not in rules:
        raise UnknownNameError(unknown("variant", rule, rules))
    if value is not None and rules[rule] is None:
        raise InputError(f"Expected {rule!r} without a value, got {name!r}. Leave @... out.")
    if rule == "fewer" and (not value or match["drafter"]):
        raise InputError(f"Expected fewer@N with N of at least 1, got {name!r}.")
    return name.strip(), rule, value, match["drafter"]


def _rules(latents: bool) -> dict[str, str | None]:
    """Return the rules that variants name, each with the setting that its value sets."""
    if latents:
        from ragspec.visual.latents.rules.by_name import RULES

        named: dict[str, str | None] = {rule: LATENT_SETTINGS.get(rule) for rule in RULES}
        return named | {"fewer": "steps"}
    from ragspec.visual.rules.by_name import relaxed

    return dict.fromkeys(EXACT_RULES) | relaxed()


def _settings(rule: str, value: float | None, latents: bool) -> dict[str, Any]:
    setting = _rules(latents)[rule]
    if value is None or setting is None:
        return {}
    return {setting: int(value) if setting in ("s", "partition", "steps") else value}


def _code_pipes(source: str, parsed: Sequence[Parsed], options: ImageOptions) -> dict[str, Any]:
    from ragspec.visual.pipeline.pipeline import ImagePipeline

    base = ImagePipeline.from_pretrained(source, None, device=options.device, dtype=options.dtype)
    if options.steps is not None:
        raise InputError(f"Expected no --steps for {source}, which draws codes. Leave it out.")
    pipes: dict[str, Any] = {"plain": base}
    for name, rule, value, drafter in parsed[1:]:
        pipes[name] = ImagePipeline(
            base.model,
            base.tokenizer,
            drafter or "auto",
            rule,
            budget=options.budget,
            folder=base.folder,
            batch_size=1,
            **_settings(rule, value, False),
        )
    return pipes


def _latent_pipes(source: str, parsed: Sequence[Parsed], options: ImageOptions) -> dict[str, Any]:
    from ragspec.visual.pipeline.latents import LatentPipeline

    # Rules compare densities, for which fewer than 32 bits are too few.
    dtype = "float32" if options.dtype == "auto" else options.dtype
    base = LatentPipeline.from_pretrained(
        source, None, device=options.device, dtype=dtype, steps=options.steps
    )
    pipes: dict[str, Any] = {}
    for name, rule, value, drafter in parsed:
        alone = rule in ("plain", "fewer")
        pipes[name] = LatentPipeline(
            base.model,
            base.tokenizer,
            None if alone else drafter or "auto",
            "near" if alone else rule,
            steps=int(value or 0) if rule == "fewer" else base.schedule.steps,
            floor=base.schedule.floor,
            budget=options.budget,
            folder=base.folder,
            batch_size=1,
            **({"r": 0.0} if alone else _settings(rule, value, True)),
        )
    return pipes


def _masked_pipes(source: str, parsed: Sequence[Parsed], options: ImageOptions) -> dict[str, Any]:
    from ragspec.visual.masked.schedule import FLOOR
    from ragspec.visual.pipeline.masked import MaskedLatentPipeline
    from ragspec.visual.pipeline.masked_drafts import window_of

    base = MaskedLatentPipeline.from_pretrained(
        source,
        device=options.device,
        dtype="float32" if options.dtype == "auto" else options.dtype,
        steps=options.steps or 100,  # as published
        floor=FLOOR,  # the rules compare densities
    )
    pipes: dict[str, Any] = {}
    for name, rule, value, drafter in parsed:
        settings: dict[str, Any] = {"iterations": int(value or base.side**2)}
        if rule not in ("plain", "fewer"):
            settings = {"rule": rule, "window": window_of(options.budget)}
            settings |= {"drafter": drafter or "jacobi", **_settings(rule, value, True)}
        pipes[name] = MaskedLatentPipeline(
            **base.components,
            steps=base.schedule.steps,
            floor=base.schedule.floor,
            batch_size=1,
            **settings,
        )
    return pipes


def _numbers(out: Any) -> list[int]:
    """Return a number for each code or latent; equal pictures have equal numbers."""
    latents = getattr(out, "latents", None)
    if latents is None:
        return [int(code) for code in out.codes.flatten().tolist()]
    rows = latents[0].flatten(end_dim=-2) if latents[0].dim() > 2 else latents[0]
    return [crc32(row.float().cpu().numpy().tobytes()) for row in rows]
