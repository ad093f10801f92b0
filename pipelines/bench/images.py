"""Variants of drawing that a benchmark compares, on the same seeds, one picture at a time.

A variant is `RULE[@VALUE][:DRAFTER]`: `exact`, `lantern@0.3`, `near@0.02:model`. VALUE is the
setting that relaxes the rule. `plain` draws without drafts. `fewer@N` is the plain model with N
denoising steps, or N iterations of a masked model: what speculation has to beat.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from zlib import crc32

from ragspec.errors import InputError
from ragspec.pipelines.bench.measure import Outcome, Variant
from ragspec.pipelines.bench.prompts import BenchItem
from ragspec.pipelines.console import checks
from ragspec.pipelines.console.options import PlaceOptions, number_or_name
from ragspec.pipelines.console.records import option, setting, split, split_drafters
from ragspec.registry import expect_known
from ragspec.sampling.settings import checked_seed, whole
from ragspec.visual import checks as visual
from ragspec.visual.loading import check_drafts, find_folder, read_kind

if TYPE_CHECKING:
    from ragspec.visual.pipeline import ImagePipeline

FORM = re.compile(r"(?P<rule>[a-z+-]+?)(@(?P<value>\d*\.?\d+))?(:(?P<drafter>.+))?")
EXACT_RULES = ("exact", "rejection", "without-replacement")
DEFAULT_CODES = ("exact", "lantern", "lantern++")
DEFAULT_LATENTS = ("aligned", "near@0.02")
FIGURES = ("tv_excess", "nll_gap", "distance_mean")
# Names of the Unicode emoji list, for models that draw from a prompt.
PROMPTS = ("candle", "tulip", "red heart", "sun", "star", "house", "rose", "pizza", "fish")


class ParsedVariant(NamedTuple):
    """The parts of a variant's name, see the module."""

    name: str
    rule: str
    settings: dict[str, float]
    drafter: str | None = None

    @property
    def drafts(self) -> bool:
        """Whether the variant speculates at all."""
        return self.rule not in ("plain", "fewer")


@dataclass(frozen=True, slots=True)
class ImagePlaceOptions(PlaceOptions):
    """The device, the data type and the size of images."""

    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = setting(
        "auto", "Data type: auto, float32, bfloat16, float16 or float64."
    )
    height: int | None = setting(None, "Height in pixels, of Emu3 and Lumina-mGPT alone.", least=1)
    width: int | None = setting(None, "Width in pixels, of Emu3 and Lumina-mGPT alone.", least=1)


@dataclass(frozen=True, slots=True)
class ImageBenchOptions:
    """The variants of drawing to compare, and their pictures."""

    place: ImagePlaceOptions
    json: Path | None = option(None, "Write the rows to this JSON file.")
    model: str = option("tiles", "Bundled image set or folder of a pipeline.", "--model", "-m")
    variants: str = option(
        "",
        "Comma-separated RULE[@VALUE][:DRAFTER+...], of latents also fewer@N; default: "
        "exact,lantern,lantern++ or, of latents, aligned,near@0.02.",
    )
    images: int = option(16, "Pictures to draw in each variant.", min=1)
    budget: str = option("12", "Draft nodes a step: 'auto' or a number.")
    guidance: float | None = option(
        None, "Guidance scale, 1 for none. Default: the family's, mostly 2."
    )
    temperature: float = option(1.0, "Temperature of sampling.")
    seed: int = option(0, "Random seed of the first picture.")
    steps: int | None = option(None, "Denoising steps of a latent; default: the model's.", min=1)

    def __post_init__(self) -> None:
        checks.check_output(self.json, checks.JSON)
        checks.check_budget(self.budget)
        if self.guidance is not None:
            visual.check_setting("guidance_scale", self.guidance)
        visual.check_setting("temperature", self.temperature)
        checked_seed(self.seed, self.images)
        folder = find_folder(self.model)
        kind = read_kind(folder.target)
        for name in split(self.variants) if kind in visual.KINDS else ():
            variant = parse_variant(name, kind in visual.DENOISING)
            if variant.drafts:
                visual.check_rule(kind, variant.rule, variant.settings)
            if variant.drafter not in (None, "none"):
                check_drafts(split_drafters(variant.drafter), folder, kind)


def draw_item(
    pipe: ImagePipeline, options: ImageBenchOptions, item: BenchItem, limit: int
) -> Outcome:
    """Draw one picture; `tokens` holds a number for each code, row end or latent."""
    pipe.set_progress_bar_config(disable=True)
    number, argument, subjects = int(item.id), pipe.family.condition, list[Any](PROMPTS)
    if argument == "class_labels":
        subjects = list(range(pipe.family.trunk.config.num_classes))
    out = pipe(
        **({argument: [subjects[number % len(subjects)]]} if argument else {}),
        height=options.place.height,
        width=options.place.width,
        guidance_scale=options.guidance,
        temperature=options.temperature,
        seed=options.seed + number,
        output_type="latent",
    )
    values = {name: getattr(out.stats, name, None) for name in FIGURES}
    figures = {name: float(value) for name, value in values.items() if value is not None}
    if out.latents is None:
        numbers = [int(code) for code in out.codes.flatten().tolist()]
    else:  # equal pictures have equal numbers
        rows = out.latents[0].flatten(end_dim=-2).float().cpu().numpy()
        numbers = [crc32(row.tobytes()) for row in rows]
    numbers += [0] * (sum(report.tokens for report in out.stats.reports) - len(numbers))
    return Outcome(numbers, out.stats.forwards, out.stats.seconds, 0.0, out.label, figures)


def build_images(options: ImageBenchOptions) -> tuple[list[BenchItem], dict[str, Variant]]:
    """Load a model and return the pictures to draw, and the variants, plain first."""
    from ragspec.visual import ImagePipeline

    more: dict[str, Any] = {} if options.steps is None else {"steps": options.steps}
    more |= {"device": options.place.device, "dtype": options.place.dtype}
    base = ImagePipeline.from_pretrained(options.model, None, "auto", **more)
    latents = base.family.unit == "latents"
    usual = DEFAULT_LATENTS if latents else DEFAULT_CODES
    parsed = [parse_variant(name, latents) for name in split(options.variants) or usual]
    plain = ParsedVariant("plain", "plain", {})
    pipes = {each.name: _pipe(base, each, options) for each in [plain, *parsed]}
    items = [BenchItem(str(number), "images", (), 1 << 30) for number in range(options.images)]
    return items, {name: partial(draw_item, pipe, options) for name, pipe in pipes.items()}


def _pipe(base: ImagePipeline, variant: ParsedVariant, options: ImageBenchOptions) -> ImagePipeline:
    """Return the pipeline of a variant over the models of another pipeline."""
    from ragspec.visual import ImagePipeline
    from ragspec.visual.families.mar import Mar
    from ragspec.visual.masked.schedule import FLOOR

    family = base.family
    latents, masked = family.unit == "latents", isinstance(family, Mar)
    settings = {"batch_size": 1, "budget": number_or_name(options.budget), **base.components}
    if latents:
        settings |= {"steps": family.schedule.steps, "floor": family.schedule.floor or FLOOR}
    if variant.drafts:
        settings |= {"drafter": split_drafters(variant.drafter or "auto"), **variant.settings}
        return ImagePipeline(rule=variant.rule, **settings)
    few = variant.settings.get("steps")
    if masked:
        settings["iterations"] = few or family.raster.codes
    elif latents:
        settings |= {"steps": few or family.schedule.steps, "rule": "near", "r": 0.0}
    return ImagePipeline(**settings)


def parse_variant(name: str, latents: bool = False) -> ParsedVariant:
    """Return the parts of a variant's name, see the module; raise InputError for another form."""
    if (match := FORM.fullmatch(name.strip())) is None:
        raise InputError(
            f"Expected a variant RULE[@VALUE][:DRAFTER], got {name!r}. Write lantern@0.3, say."
        )
    rule, settings = match["rule"], dict[str, float]()
    rules = dict.fromkeys(EXACT_RULES) | visual.relaxed()  # each with what its value sets
    if latents:
        rules = dict.fromkeys(visual.LATENT_RULES) | {"near": "r", "horizon": "s", "fewer": "steps"}
    expect_known("variant", [rule], rules)
    if match["value"] is not None:
        key, value = rules[rule], float(match["value"])
        if key is None:
            raise InputError(f"Expected {rule!r} without a value, got {name!r}. Leave @... out.")
        settings[key] = int(value) if value.is_integer() and key in visual.WHOLE else value
    if rule == "fewer" and (not whole(settings.get("steps")) or match["drafter"]):
        raise InputError(f"Expected fewer@N with N of at least 1, got {name!r}.")
    return ParsedVariant(name.strip(), rule, settings, match["drafter"])
