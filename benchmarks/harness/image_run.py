"""What `ragspec bench image` does: load, draw in all ways, print the table, write the files."""

from __future__ import annotations

import json as json_text
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.image_asked import ImageBench, Prepared
from ragspec.pipelines.console import options as o

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from harness.image_table import ImageRow
    from harness.image_timing import ImageConfig, Quality, Timed
    from harness.image_ways import Variant
    from ragspec.visual.pipeline.pipeline import ImagePipeline

TABLE_WIDTH = 170
MASKED_STEPS = 100  # of denoising, as published
# Names of the Unicode emoji list that a text-conditional model is asked for in turn.
PROMPTS = (
    *("candle", "tulip", "red heart", "red apple", "sun", "star", "house", "rose"),
    *("grinning face", "crying face", "fire", "pizza", "blue book", "rocket", "fish"),
    *("tomato", "evergreen tree", "crescent moon", "umbrella", "key", "bell", "gem stone"),
    *("blue heart", "panda", "lion", "penguin", "strawberry", "hot beverage", "alarm clock"),
    *("bus", "sailboat", "locked"),
)


def run_image_bench(
    request: ImageBench, json: Path | None, picture: Path | None, page: Path | None = None
) -> None:
    """Measure, print the table, write the files; raises what `ImagePipeline` does."""
    from rich.console import Console

    from ragspec.errors import InputError

    ready = prepare(request)
    if page is not None and ready.masked:
        raise InputError("got --html with a masked model; it has no page. Use --picture or --json.")
    timed, quality = measure(request, ready, Console(stderr=True))
    rows, table = _summary(request, ready, timed, quality)
    console = Console()
    if not console.is_terminal:  # a pipe or a file: rich would cut the table to 80 columns
        console = Console(width=TABLE_WIDTH)
    console.print(table)
    if json is not None:
        record = {
            **asdict(request),
            "rows": [row.to_dict() for row in rows],
            "frechet_null": None if quality is None else asdict(quality.null),
            "frechet_plain_batches": None if quality is None else quality.batches,
        }
        json.write_text(json_text.dumps(record, indent=1) + "\n", encoding="utf-8")
    if picture is not None and quality is not None:
        _draw_curve(request, rows, ready.ways, quality, picture)
    if page is not None:
        from harness.image_page import write_images
        from harness.latent_page import write_latents

        (write_latents if ready.latents else write_images)(request, ready, rows, quality, page)


def prepare(request: ImageBench) -> Prepared:
    """Load the models and return them with the ways, and what is drawn."""
    from ragspec.errors import InputError
    from ragspec.visual.pipeline.folder import LATENTS, MASKED, find_folder, kind_of

    target = find_folder(request.source).target
    if kind_of(target) == MASKED:
        return _of_masked(request)
    if request.prefill:
        raise InputError(
            f"got --prefill for {request.source}; it is about masked models of latents."
        )
    if kind_of(target) == LATENTS:
        return _of_latents(request)
    if request.steps is not None or request.floor is not None:
        raise InputError(
            f"got --steps or --floor for {request.source}, which draws codes; they are about "
            "the denoising of continuous latents. Leave them out."
        )
    return _of_codes(request)


def _of_codes(request: ImageBench) -> Prepared:
    from harness.image_ways import build_variant, default_ways, parse_ways
    from ragspec.visual.pipeline.pipeline import ImagePipeline

    ways = parse_ways(request.ways)
    o.silence_transformers()
    base = ImagePipeline.from_pretrained(
        request.source, None, device=request.device, dtype=request.dtype
    )
    if not request.ways and base.folder is not None:
        parts, codes = base.folder, int(base.model.config.vocab_size)
        ways = parse_ways(default_ways(codes, bool(parts.draft), bool(parts.head)))
    drafts: dict[str, Any] = {}

    def build(direction: Variant, budget: Any, side_by_side: int) -> ImagePipeline:
        return build_variant(
            direction, base, drafts, budget, side_by_side, request.min_expected_gain
        )

    return Prepared(base, ways, _image_executor(request, base), False, build)


def _of_latents(request: ImageBench) -> Prepared:
    from harness.latent_ways import USUAL, build_latent_variant, parse_latent_ways
    from ragspec.errors import InputError
    from ragspec.visual.pipeline.latents import LatentPipeline

    if request.min_expected_gain is not None:
        raise InputError("got --worth; drafts of continuous latents have none, leave it out.")
    ways = parse_latent_ways(request.ways or USUAL)
    o.silence_transformers()
    # Laws are compared by their densities, for which less than 32 bits are too few.
    dtype = "float32" if request.dtype == "auto" else request.dtype
    base = LatentPipeline.from_pretrained(
        request.source,
        None,
        device=request.device,
        dtype=dtype,
        steps=request.steps,
        floor=request.floor,
    )

    def build(direction: Variant, budget: Any, side_by_side: int) -> ImagePipeline:
        return build_latent_variant(direction, base, budget, side_by_side)

    return Prepared(base, ways, _image_executor(request, base), True, build)


def _of_masked(request: ImageBench) -> Prepared:
    from harness.masked_ways import USUAL, build_masked_variant, parse_masked_ways
    from ragspec.errors import InputError
    from ragspec.visual.masked.schedule import FLOOR
    from ragspec.visual.pipeline.masked import MaskedLatentPipeline

    if request.min_expected_gain is not None:
        raise InputError("got --worth; drafts of continuous latents have none, leave it out.")
    ways = parse_masked_ways(request.ways or USUAL)
    o.silence_transformers()
    base = MaskedLatentPipeline.from_pretrained(
        request.source,
        device=request.device,
        dtype="float32" if request.dtype == "auto" else request.dtype,
        steps=MASKED_STEPS if request.steps is None else request.steps,
        floor=FLOOR if request.floor is None else request.floor,
    )

    def build(direction: Variant, budget: Any, side_by_side: int) -> Any:
        return build_masked_variant(direction, base, budget, side_by_side, request.prefill)

    pipe: Any = base
    return Prepared(pipe, ways, _image_executor(request, pipe), True, build, masked=True)


def _image_executor(request: ImageBench, base: ImagePipeline) -> ImageConfig:
    from harness.image_timing import ImageConfig

    by_class = base.trunk.config.condition == "class"
    subjects = list(range(base.trunk.config.num_classes)) if by_class else list(PROMPTS)
    return ImageConfig(
        subjects, by_class, request.guidance, request.temperature, request.top_k, request.seed
    )


def measure(
    request: ImageBench, ready: Prepared, screen: Console
) -> tuple[dict[Variant, Timed], Quality | None]:
    """Return seconds and forwards by way and, where it was asked for, the quality."""
    from harness.image_timing import judge_ways, time_ways

    with screen.status("loading") as status:
        pipes = {direction: ready.build(direction, request.budget, 1) for direction in ready.ways}
        timed = time_ways(pipes, ready.image_config, request.images, status.update)
        if not request.quality:
            return timed, None
        wide = request.side_by_side
        pipes = {
            direction: ready.build(direction, max(1, timed[direction].usual_size), wide)
            for direction in ready.ways
        }
        quality = judge_ways(
            pipes,
            ready.image_config,
            request.quality,
            request.batches,
            lambda pictures, labels: _features(request, ready.base, pictures, labels),
            status.update,
        )
    return timed, quality


def _summary(
    request: ImageBench, ready: Prepared, timed: dict[Variant, Timed], quality: Quality | None
) -> tuple[list[ImageRow], Table]:
    """Return the rows and the table that is printed."""
    from harness.image_table import make_rows, make_table
    from harness.latent_table import make_latent_rows, make_latent_table

    title = (
        f"{request.source}, guidance {request.guidance:g}: seconds against plain, one image a time"
    )
    if ready.masked:
        base: Any = ready.base
        title += f"; {base.schedule.steps} steps, floor {base.schedule.floor:g}"
    if not ready.latents:
        rows = make_rows(timed, quality)
        return rows, make_table(rows, title)
    rows = make_latent_rows(timed, quality)
    return rows, make_latent_table(rows, title)


def _features(request: ImageBench, base: ImagePipeline, pictures: Any, labels: Any) -> Any:
    """Return the network that was named, the one that lies with the model, or a new one."""
    from evaluation.frechet import FeatureNet, train_features

    if request.features is not None:
        return FeatureNet.load(Path(request.features))
    if base.folder is not None:
        beside = base.folder.target.parent
        # Latents are learnt of the same pictures as codes: "latent-tiles" of those of "tiles".
        named = beside.name.removeprefix("latent-").removeprefix("masked-")
        for place in (beside, beside.with_name(named)):
            if (place / "features.safetensors").is_file():
                return FeatureNet.load(place / "features.safetensors")
    return train_features(pictures, labels)


def _draw_curve(
    request: ImageBench,
    rows: Sequence[ImageRow],
    ways: list[Variant],
    quality: Quality,
    picture: Path,
) -> None:
    from evaluation.curves import quality_curve

    from harness.image_table import curve_points

    note = f"{request.source}, guidance {request.guidance:g}, {request.quality} images a point"
    null = (quality.null.low, quality.null.high)
    quality_curve(curve_points(rows, ways), null, note=note).save(picture)
