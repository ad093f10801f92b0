"""`ragspec draw`: load a model, draw, and write images and figures.

The PNG text "ragspec" of every image has the settings that determine it. No file is overwritten.
"""

import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from io import BytesIO
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragspec.errors import InputError, pluralize
from ragspec.pipelines.cli.draw_options import DrawOptions
from ragspec.pipelines.console.options import silence_transformers
from ragspec.pipelines.console.records import takes_records
from ragspec.pipelines.console.terminal import Terminal
from ragspec.sampling.settings import fresh_seed
from ragspec.storage.filesystem import write_output

if TYPE_CHECKING:
    from PIL.Image import Image

    from ragspec.visual.pipeline import ImagePipeline

KEY = "ragspec"
NAME_LETTERS = 40  # most letters of the subject in a file name


@takes_records
def draw(options: DrawOptions) -> None:
    """Draw images from a prompt or a class, with or without speculation."""
    from PIL.PngImagePlugin import PngInfo

    terminal, out = Terminal(), options.out
    with terminal.working("loading"):
        from ragspec.visual import ImagePipeline

        silence_transformers()
        pipe = ImagePipeline.from_pretrained(
            options.source,
            options.drafters or None,
            options.rule or "auto",
            family=options.family,
            device=options.place.device,
            dtype=options.place.dtype,
            budget=options.nodes,
            **options.settings,
        )
    options = _resolve(options, pipe)
    _make_folder(out)
    pipe.set_progress_bar_config(disable=not terminal.err.is_terminal, leave=False)
    seed = fresh_seed() if options.seed is None else options.seed
    described = describe_images(options, seed, str(pipe.model.dtype).removeprefix("torch."))
    stem = f"{_slug(', '.join(options.subjects))}-{seed}"
    every = (out / f"{stem}-{each}.png" for each in count())
    planned = list(islice((path for path in every if not path.exists()), len(described)))
    paths: dict[int, Path] = {}

    def save(number: int, image: "Image") -> None:
        info, file = PngInfo(), BytesIO()
        info.add_text(KEY, json.dumps(described[number], sort_keys=True))
        image.save(file, "PNG", pnginfo=info)
        paths[number] = _write_new(planned[number], every, file.getvalue())

    try:
        output = pipe(**options.arguments(), seed=seed, on_image=save)
    except KeyboardInterrupt:
        terminal.note(f"stopped with {pluralize(len(paths), 'image')} in {out}")
        raise
    stats = output.stats
    names = ("forwards", "codes_per_forward", "tv_excess", "nll_gap", "distance_mean")
    figures: dict[str, Any] = {"label": output.label, "seconds": float(stats.seconds)}
    figures |= {name: getattr(stats, name, None) for name in names}
    figures |= {"repeatable": stats.repeatable, "seeds": list(stats.seeds)}
    images = [str(paths[number]) for number in sorted(paths)]
    figures |= {"images": images, "seed": seed, **described[0]}
    if options.json is not None:
        write_output(options.json, "the figures", json.dumps(figures, indent=1) + "\n")
    _print_figures(figures, out, terminal)


def _resolve(options: DrawOptions, pipe: "ImagePipeline") -> DrawOptions:
    """Return the options with the rule in use and classes by name."""
    family = pipe.family
    if family.class_names:
        names = [family.class_names[family.label_of(each)] for each in options.classes]
        options = replace(options, classes=names, model=options.source)
    return replace(options, rule=options.rule or pipe.rule_name)


def _print_figures(figures: Mapping[str, Any], out: Path, terminal: Terminal) -> None:
    number = len(figures["images"])
    line = (
        f"{pluralize(number, 'image')} in {out}: {pluralize(figures['forwards'], 'forward')}, "
        f"{figures['seconds']:.2f} s, {figures['codes_per_forward']:.2f} codes a forward, label "
        f"{figures['label']}, seed {figures['seed']}"
    )
    for name in ("tv_excess", "nll_gap", "distance_mean"):
        if figures[name] is not None and not figures["label"].startswith("exact"):
            line += f", {name} {figures[name]:.4f}"
    terminal.line(line)


def describe_images(options: DrawOptions, seed: int, dtype: str) -> list[dict[str, object]]:
    """Return the settings that determine each image, as JSON types."""
    common: dict[str, Any] = {
        "model": options.source,
        "rule": options.rule,
        "settings": options.settings,
        "guidance": options.guidance,
        "temperature": options.temperature,
        "dtype": dtype,
    }
    if options.rule != "exact":  # drafts change the picture
        common |= {"drafter": "+".join(options.drafters), "budget": options.nodes}
    total = len(options.subjects) * options.n
    return [
        {"subject": options.subjects[number // options.n], "seed": seed + number, **common}
        for number in range(total)
    ]


def _write_new(path: Path, others: Iterator[Path], contents: bytes) -> Path:
    """Write a file to a path, or to the next of the others that is free; return the path."""
    while True:
        with suppress(FileExistsError), path.open("xb") as file:
            file.write(contents)
            return path
        path = next(others)


def _slug(text: str) -> str:
    """Return a text as part of a file name: letters and digits of any script, and hyphens."""
    return re.sub(r"[\W_]+", "-", text.lower()).strip("-")[:NAME_LETTERS].strip("-") or "image"


def _make_folder(out: Path) -> None:
    """Create a folder unless it is there; raise InputError if nothing can be written to it."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise InputError(
            f"Expected a writable folder in --out, got {out} ({error}). Name another one."
        ) from error
