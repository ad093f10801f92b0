"""The run of `bench.py image`: load, draw in all variants, print the table, write the files."""

from __future__ import annotations

import json as json_text
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.image_options import ImageBenchOptions, Prepared
from ragspec.pipelines.console import options as o

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from harness.image_table import ImageRow
    from harness.image_timing import ImageSeries, Quality, TimedImages
    from harness.image_variants import Variant
    from ragspec.visual import ImagePipeline

TABLE_WIDTH = 170
# Names of the Unicode emoji list: the prompts of a text-conditional model, in turn.
PROMPTS = (
    *("candle", "tulip", "red heart", "red apple", "sun", "star", "house", "rose"),
    *("grinning face", "crying face", "fire", "pizza", "blue book", "rocket", "fish"),
    *("tomato", "evergreen tree", "crescent moon", "umbrella", "key", "bell", "gem stone"),
    *("blue heart", "panda", "lion", "penguin", "strawberry", "hot beverage", "alarm clock"),
    *("bus", "sailboat", "locked"),
)


def run_image_bench(
    options: ImageBenchOptions, json: Path | None, picture: Path | None, page: Path | None = None
) -> None:
    """Measure, print the table and write the files.

    Raises:
        RagspecError: The pipeline refuses the model or its settings.
    """
    from rich.console import Console

    from ragspec.errors import InputError

    ready = prepare(options)
    if page is not None and ready.masked:
        raise InputError(
            "Expected a model that is not masked with --html. Use --picture or --json instead."
        )
    timed, quality = measure(options, ready, Console(stderr=True))
    rows, table = _summary(options, ready, timed, quality)
    console = Console()
    if not console.is_terminal:  # into a pipe or a file rich would cut the table to 80 columns
        console = Console(width=TABLE_WIDTH)
    console.print(table)
    if json is not None:
        record = {
            **asdict(options),
            "variants": options.names,
            "rows": [row.to_dict() for row in rows],
            "frechet_null": None if quality is None else asdict(quality.null),
            "frechet_plain_batches": None if quality is None else quality.batches,
        }
        json.write_text(json_text.dumps(record, indent=1) + "\n", encoding="utf-8")
    if picture is not None and quality is not None:
        _draw_curve(options, rows, ready.variants, quality, picture)
    if page is not None:
        from harness.image_page import write_images
        from harness.latent_page import write_latents

        (write_latents if ready.latents else write_images)(options, ready, rows, quality, page)


def prepare(options: ImageBenchOptions) -> Prepared:
    """Load the models; return them with the variants and the series of images."""
    from ragspec.errors import InputError
    from ragspec.visual import ImagePipeline
    from ragspec.visual.families.mar import Mar

    o.silence_transformers()
    denoising = {"steps": options.steps, "floor": options.floor}
    base = ImagePipeline.from_pretrained(
        options.source,
        None,
        device=options.device,
        dtype=options.dtype,
        **{name: value for name, value in denoising.items() if value is not None},
    )
    masked = isinstance(base.family, Mar)
    if options.prefill and not masked:
        raise InputError(
            f"Expected a masked model with --prefill, got {options.source}. Leave --prefill out."
        )
    if options.min_expected_gain is not None and base.family.unit == "latents":
        raise InputError("Expected no --min-expected-gain with continuous latents. Leave it out.")
    series = _image_series(options, base)
    if masked:
        return _prepare_masked(options, base, series)
    if base.family.unit == "latents":
        return _prepare_latents(options, base, series)
    return _prepare_codes(options, base, series)


def _prepare_codes(
    options: ImageBenchOptions, base: ImagePipeline, series: ImageSeries
) -> Prepared:
    from harness.image_variants import build_variant, default_variants, parse_variants

    names = options.names
    if not names and base.folder is not None:
        parts, codes = base.folder, int(base.model.config.vocab_size)
        names = default_variants(codes, bool(parts.draft), bool(parts.head))
    drafts: dict[str, Any] = {}

    def build(variant: Variant, budget: Any, batch_size: int) -> ImagePipeline:
        return build_variant(variant, base, drafts, budget, batch_size, options.min_expected_gain)

    return Prepared(base, parse_variants(names), series, False, build)


def _prepare_latents(
    options: ImageBenchOptions, base: ImagePipeline, series: ImageSeries
) -> Prepared:
    from harness.latent_variants import USUAL, build_latent_variant, parse_latent_variants

    def build(variant: Variant, budget: Any, batch_size: int) -> ImagePipeline:
        return build_latent_variant(variant, base, budget, batch_size)

    return Prepared(base, parse_latent_variants(options.names or USUAL), series, True, build)


def _prepare_masked(
    options: ImageBenchOptions, base: ImagePipeline, series: ImageSeries
) -> Prepared:
    from harness.masked_variants import USUAL, build_masked_variant, parse_masked_variants

    def build(variant: Variant, budget: Any, batch_size: int) -> Any:
        return build_masked_variant(variant, base, budget, batch_size, options.prefill)

    variants = parse_masked_variants(options.names or USUAL)
    return Prepared(base, variants, series, True, build, masked=True)


def _image_series(options: ImageBenchOptions, base: ImagePipeline) -> ImageSeries:
    from harness.image_timing import ImageSeries

    by_class = base.family.condition == "class_labels"
    subjects = list(range(base.family.trunk.config.num_classes)) if by_class else list(PROMPTS)
    return ImageSeries(
        subjects, by_class, options.guidance, options.temperature, options.top_k, options.seed
    )


def measure(
    options: ImageBenchOptions, ready: Prepared, screen: Console
) -> tuple[dict[Variant, TimedImages], Quality | None]:
    """Return seconds and forwards by variant; with `quality` also the Frechet distances."""
    from harness.image_timing import measure_quality, time_variants

    with screen.status("loading") as status:
        pipes = {variant: ready.build(variant, options.budget, 1) for variant in ready.variants}
        timed = time_variants(pipes, ready.series, options.images, status.update)
        if not options.quality:
            return timed, None
        wide = options.batch_size
        pipes = {
            variant: ready.build(variant, max(1, timed[variant].usual_size), wide)
            for variant in ready.variants
        }
        quality = measure_quality(
            pipes,
            ready.series,
            options.quality,
            options.batches,
            lambda pictures, labels: _features(options, ready.base, pictures, labels),
            status.update,
        )
    return timed, quality


def _summary(
    options: ImageBenchOptions,
    ready: Prepared,
    timed: dict[Variant, TimedImages],
    quality: Quality | None,
) -> tuple[list[ImageRow], Table]:
    """Return the rows and the table to print."""
    from harness.image_table import make_rows, make_table
    from harness.latent_table import make_latent_rows, make_latent_table

    title = (
        f"{options.source}, guidance {options.guidance:g}: seconds against plain, one image a time"
    )
    if ready.masked:
        schedule = ready.base.family.schedule
        title += f"; {schedule.steps} steps, floor {schedule.floor:g}"
    if not ready.latents:
        rows = make_rows(timed, quality)
        return rows, make_table(rows, title)
    rows = make_latent_rows(timed, quality)
    return rows, make_latent_table(rows, title)


def _features(options: ImageBenchOptions, base: ImagePipeline, pictures: Any, labels: Any) -> Any:
    """Return the feature network of `--features`, else the model's, else a new one."""
    from evaluation.frechet import FeatureNet, train_features

    if options.features is not None:
        return FeatureNet.load(Path(options.features))
    if base.folder is not None:
        beside = base.folder.target.parent
        # Models of latents share the pictures of a model of codes: "latent-tiles" of "tiles".
        base_name = beside.name.removeprefix("latent-").removeprefix("masked-")
        for place in (beside, beside.with_name(base_name)):
            if (place / "features.safetensors").is_file():
                return FeatureNet.load(place / "features.safetensors")
    return train_features(pictures, labels)


def _draw_curve(
    options: ImageBenchOptions,
    rows: Sequence[ImageRow],
    variants: list[Variant],
    quality: Quality,
    picture: Path,
) -> None:
    from evaluation.curves import quality_curve

    from harness.image_table import curve_points

    note = f"{options.source}, guidance {options.guidance:g}, {options.quality} images a point"
    null = (quality.null.low, quality.null.high)
    quality_curve(curve_points(rows, variants), null, note=note).save(picture)
