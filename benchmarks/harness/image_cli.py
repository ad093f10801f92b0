"""The command `bench.py image`: variants of drawing compared in seconds, forwards and quality."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ragspec.pipelines.console import checks


def image(
    model: Annotated[
        str, typer.Option("--model", "-m", help="Bundled image set or folder of a pipeline.")
    ] = "tiles",
    variants: Annotated[
        str,
        typer.Option(
            help="Comma-separated: RULE[@VALUE][:DRAFTER], sjd, scd, draft-only; of latents also "
            "fewer@N, the target alone with N denoising steps, or iterations of a masked model."
        ),
    ] = "",
    images: Annotated[int, typer.Option(min=1, help="Images to time, one at a time.")] = 64,
    quality: Annotated[
        int, typer.Option(min=0, help="Images of a batch for the Frechet distance; 0 for none.")
    ] = 0,
    batches: Annotated[
        int, typer.Option(min=5, help="Independent plain batches for the Frechet distance.")
    ] = 5,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Images to draw at once for the Frechet distance.")
    ] = 32,
    budget: Annotated[str, typer.Option(help="Draft nodes per step: auto, or a number.")] = "12",
    min_expected_gain: Annotated[
        float | None,
        typer.Option(
            min=0.0, help="Least expected gain, in accepted codes, of a draft model's next level."
        ),
    ] = None,
    guidance: Annotated[float, typer.Option(min=0.0, help="Scale of classifier-free guidance.")] = (
        2.0
    ),
    temperature: Annotated[
        float, typer.Option(min=0.0, help="Temperature of sampling; 0 is greedy.")
    ] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Codes to sample from; 0 for all.")] = 0,
    seed: Annotated[int, typer.Option(help="Random seed of the first image.")] = 0,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Denoising steps of a latent; default: the model's.")
    ] = None,
    floor: Annotated[
        float | None,
        typer.Option(min=0.0, help="Least noise of a denoising step; default: the model's."),
    ] = None,
    prefill: Annotated[
        float, typer.Option(min=0.0, help="Share of masked latents to draw before drafting.")
    ] = 0.0,
    device: Annotated[str, typer.Option(help="Device: auto, cpu, or an accelerator.")] = "auto",
    dtype: Annotated[
        str, typer.Option(help="Data type: auto, float32, bfloat16, float16 or float64.")
    ] = "auto",
    features: Annotated[
        Path | None,
        typer.Option(help="Saved feature network; default: the model's, else a new one."),
    ] = None,
    tune: Annotated[
        str | None,
        typer.Option(
            help="Find the settings of lantern or lantern++ and save them in the model's folder."
        ),
    ] = None,
    json: Annotated[
        Path | None, typer.Option("--json", help="Write the rows to this JSON file.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Write quality against speed to this PNG file.")
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option("--html", help="Write figures, pictures and outcomes of drafts to this page."),
    ] = None,
) -> None:
    """Compare variants of drawing on the same seeds: seconds, forwards, Frechet distance."""
    from harness.image_options import ImageBenchOptions
    from harness.image_run import run_image_bench
    from ragspec.errors import InputError

    for path in (json, picture, html):
        checks.check_output(path)
    if picture is not None and not quality:
        raise InputError("Expected --quality with --picture, got none. Add --quality 500.")
    names = tuple(name.strip() for name in variants.split(",") if name.strip())
    options = ImageBenchOptions(
        *(model, names, images, quality, batches, batch_size, budget),
        *(min_expected_gain, guidance, temperature, top_k, seed, device, dtype),
        None if features is None else str(features),
        *(steps, floor, prefill),
    )
    if tune is not None:
        from harness.image_tune import run_tuning

        if names or quality or picture or html:
            raise InputError(
                "Expected --tune without --variants, --quality, --picture and --html. Omit them."
            )
        run_tuning(options, tune, json)
        return
    run_image_bench(options, json, picture, html)
