"""The command `bench.py image`: variants of drawing compared in seconds, forwards and quality."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from harness.image_options import ImageBenchOptions
from ragspec.errors import InputError
from ragspec.pipelines.console import checks
from ragspec.pipelines.console.records import option, takes_records


@dataclass(frozen=True, slots=True)
class ImageCommand:
    """The options of `bench.py image`, and the files that it writes."""

    options: ImageBenchOptions
    tune: str | None = option(
        None, "Find the settings of lantern or lantern++ and save them in the model's folder."
    )
    json: Path | None = option(None, "Write the rows to this JSON file.")
    picture: Path | None = option(None, "Write quality against speed to this PNG file.")
    html: Path | None = option(None, "Write figures, pictures and outcomes of drafts to this page.")

    def __post_init__(self) -> None:
        options = self.options
        for path in (self.json, self.picture, self.html):
            checks.check_output(path)
        if self.picture is not None and not options.quality:
            raise InputError("Expected --quality with --picture, got none. Add --quality 500.")
        if self.tune is not None and (
            options.names or options.quality or self.picture or self.html
        ):
            raise InputError(
                "Expected --tune without --variants, --quality, --picture and --html. Omit them."
            )


@takes_records
def image(command: ImageCommand) -> None:
    """Compare variants of drawing on the same seeds: seconds, forwards, Frechet distance."""
    if command.tune is not None:
        from harness.image_tune import run_tuning

        run_tuning(command.options, command.tune, command.json)
    else:
        from harness.image_run import run_image_bench

        run_image_bench(command.options, command.json, command.picture, command.html)
