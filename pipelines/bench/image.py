"""`ragspec bench image`: ways of drawing side by side, in seconds, forwards and quality."""

from __future__ import annotations

import json as json_text
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragspec.pipelines.console import options as o
from ragspec.pipelines.console.image_options import GuidanceOption, SetOption

if TYPE_CHECKING:
    from rich.console import Console

    from ragspec.pipelines.bench.image_timing import Drawing, Quality, Timed
    from ragspec.pipelines.bench.image_ways import Way
    from ragspec.visual.pipeline.pipeline import ImagePipeline

TABLE_WIDTH = 170
_SEEDS = 1 << 63  # torch takes twice as many upwards: the images that follow have seeds too
# Names of the Unicode emoji list that a text-conditional model is asked for in turn.
PROMPTS = (
    *("candle", "tulip", "red heart", "red apple", "sun", "star", "house", "rose"),
    *("grinning face", "crying face", "fire", "pizza", "blue book", "rocket", "fish"),
    *("tomato", "evergreen tree", "crescent moon", "umbrella", "key", "bell", "gem stone"),
    *("blue heart", "panda", "lion", "penguin", "strawberry", "hot beverage", "alarm clock"),
    *("bus", "sailboat", "locked"),
)


@dataclass(frozen=True, slots=True)
class ImageBench:
    """What one `ragspec bench image` was asked for."""

    source: str
    ways: tuple[str, ...]
    images: int
    quality: int
    batches: int
    side_by_side: int
    budget: str
    worth: float | None
    guidance: float
    temperature: float
    top_k: int
    seed: int
    device: str
    dtype: str
    features: str | None

    def __post_init__(self) -> None:
        from ragspec.errors import InputError
        from ragspec.visual.evaluation.frechet import AXES

        if not (self.quality == 0 or self.quality > AXES):
            raise InputError(
                f"--quality is {self.quality}; expected 0 for none, or more than {AXES} images: "
                "fewer have no Frechet distance. Try 400."
            )
        if not -_SEEDS <= self.seed < _SEEDS:
            raise InputError(
                f"--seed is {self.seed}; expected a whole number from -2^63 to 2^63 - 1."
            )


def image(
    image_set: SetOption = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="A folder with target/ and tokenizer/.")
    ] = None,
    ways: Annotated[
        str,
        typer.Option(help="Comma-separated: RULE[@VALUE][:DRAFTER], sjd, scd, draft-only."),
    ] = "",
    images: Annotated[int, typer.Option(min=1, help="Images to time, one at a time.")] = 64,
    quality: Annotated[
        int, typer.Option(min=0, help="Images of a batch for the Frechet distance; 0 for none.")
    ] = 0,
    batches: Annotated[int, typer.Option(min=5, help="Independent plain batches.")] = 5,
    side_by_side: Annotated[int, typer.Option(min=1, help="Images drawn together there.")] = 32,
    budget: o.BudgetOption = "12",
    worth: Annotated[
        float | None,
        typer.Option(min=0.0, help="Accepted codes for which a draft model reads on; 0 for all."),
    ] = None,
    guidance: GuidanceOption = 2.0,
    temperature: o.TemperatureOption = 1.0,
    top_k: o.TopKOption = 0,
    seed: Annotated[int, typer.Option(help="Of the first image.")] = 0,
    device: o.DeviceOption = "auto",
    dtype: o.DtypeOption = "auto",
    features: Annotated[
        Path | None, typer.Option(help="A feature network; trained on the spot without it.")
    ] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Write the rows here.")] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Write quality against speed here, a PNG.")
    ] = None,
) -> None:
    """Compare ways of drawing on the same seeds: seconds, forwards, tv_excess, Frechet distance."""
    from ragspec.errors import InputError

    for path in (json, picture):
        o.checked_output(path)
    if model is not None and image_set is not None:
        raise InputError("got --set and --model; expected one of them.")
    if picture is not None and not quality:
        raise InputError("--picture needs a quality: add --quality 500, the images of a batch.")
    names = tuple(name.strip() for name in ways.split(",") if name.strip())
    asked = ImageBench(
        *(model or image_set or "tiles", names, images, quality, batches, side_by_side, budget),
        *(worth, guidance, temperature, top_k, seed, device, dtype),
        None if features is None else str(features),
    )
    run_image_bench(asked, json, picture)


def run_image_bench(asked: ImageBench, json: Path | None, picture: Path | None) -> None:
    """Measure, print the table, write the files; raises what `ImagePipeline` does."""
    from rich.console import Console

    from ragspec.pipelines.bench.image_table import make_rows, make_table

    base, ways, drawing = prepare(asked)
    screen = Console(stderr=True)
    timed, quality = measure(asked, base, ways, drawing, screen)
    rows = make_rows(timed, quality)
    console = Console()
    if not console.is_terminal:  # a pipe or a file: rich would cut the table to 80 columns
        console = Console(width=TABLE_WIDTH)
    title = f"{asked.source}, guidance {asked.guidance:g}: seconds against plain, one image a time"
    console.print(make_table(rows, title))
    if json is not None:
        found = {
            **asdict(asked),
            "rows": [row.to_dict() for row in rows],
            "frechet_null": None if quality is None else asdict(quality.null),
            "frechet_plain_batches": None if quality is None else quality.batches,
        }
        json.write_text(json_text.dumps(found, indent=1) + "\n", encoding="utf-8")
    if picture is not None and quality is not None:
        _draw_curve(asked, rows, ways, quality, picture)


def prepare(asked: ImageBench) -> tuple[ImagePipeline, list[Way], Drawing]:
    """Load the models and return them with the ways, and what is drawn."""
    from ragspec.pipelines.bench.image_timing import Drawing
    from ragspec.pipelines.bench.image_ways import default_ways, parse_ways
    from ragspec.visual.pipeline.pipeline import ImagePipeline

    ways = parse_ways(asked.ways)
    o.be_quiet()
    base = ImagePipeline.from_pretrained(asked.source, None, device=asked.device, dtype=asked.dtype)
    if not asked.ways and base.folder is not None:
        parts, codes = base.folder, int(base.model.config.vocab_size)
        ways = parse_ways(default_ways(codes, bool(parts.draft), bool(parts.head)))
    by_class = base.model.config.condition == "class"
    subjects = list(range(base.model.config.num_classes)) if by_class else list(PROMPTS)
    drawing = Drawing(
        subjects, by_class, asked.guidance, asked.temperature, asked.top_k, asked.seed
    )
    return base, ways, drawing


def measure(
    asked: ImageBench,
    base: ImagePipeline,
    ways: list[Way],
    drawing: Drawing,
    screen: Console,
) -> tuple[dict[Way, Timed], Quality | None]:
    """Return seconds and forwards by way and, where it was asked for, the quality."""
    from ragspec.pipelines.bench.image_timing import judge_ways, time_ways
    from ragspec.pipelines.bench.image_ways import build_way

    drafts: dict[str, Any] = {}
    with screen.status("loading") as status:
        pipes = {way: build_way(way, base, drafts, asked.budget, 1, asked.worth) for way in ways}
        timed = time_ways(pipes, drawing, asked.images, status.update)
        if not asked.quality:
            return timed, None
        wide = asked.side_by_side
        pipes = {
            way: build_way(way, base, drafts, max(1, timed[way].usual_size), wide, asked.worth)
            for way in ways
        }
        quality = judge_ways(
            pipes,
            drawing,
            asked.quality,
            asked.batches,
            lambda pictures, labels: _features(asked, base, pictures, labels),
            status.update,
        )
    return timed, quality


def _features(asked: ImageBench, base: ImagePipeline, pictures: Any, labels: Any) -> Any:
    """Return the network that was named, the one that lies with the model, or a new one."""
    from ragspec.visual.evaluation.frechet import FeatureNet, train_features

    if asked.features is not None:
        return FeatureNet.load(Path(asked.features))
    if base.folder is not None:
        bundled = base.folder.target.parent / "features.safetensors"
        if bundled.is_file():
            return FeatureNet.load(bundled)
    return train_features(pictures, labels)


def _draw_curve(
    asked: ImageBench, rows: Any, ways: list[Way], quality: Quality, picture: Path
) -> None:
    from ragspec.pipelines.bench.image_table import curve_points
    from ragspec.visual.evaluation.curves import quality_curve

    note = f"{asked.source}, guidance {asked.guidance:g}, {asked.quality} images a point"
    null = (quality.null.low, quality.null.high)
    quality_curve(curve_points(rows, ways), null, note=note).save(picture)
