"""Variants of drawing side by side, in seconds, forwards and quality."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ragspec.pipelines.console import options as o


def image(
    image_set: Annotated[
        str | None, typer.Option("--set", help="A bundled set, default tiles.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="A folder with target/ and tokenizer/.")
    ] = None,
    ways: Annotated[
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
    batches: Annotated[int, typer.Option(min=5, help="Independent plain batches.")] = 5,
    side_by_side: Annotated[int, typer.Option(min=1, help="Images drawn together there.")] = 32,
    budget: o.BudgetOption = "12",
    min_expected_gain: Annotated[
        float | None,
        typer.Option(min=0.0, help="Accepted codes for which a draft model reads on; 0 for all."),
    ] = None,
    guidance: Annotated[float, typer.Option(min=0.0, help="Scale of guidance.")] = 2.0,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Codes to sample from; 0 for all.")] = 0,
    seed: Annotated[int, typer.Option(help="Of the first image.")] = 0,
    steps: Annotated[int | None, typer.Option(min=1, help="Denoising steps of a latent.")] = None,
    floor: Annotated[
        float | None, typer.Option(min=0.0, help="Least noise of a denoising step.")
    ] = None,
    prefill: Annotated[
        float, typer.Option(min=0.0, help="Share of masked latents drawn before drafting.")
    ] = 0.0,
    device: o.DeviceOption = "auto",
    dtype: o.DtypeOption = "auto",
    features: Annotated[
        Path | None, typer.Option(help="A feature network; trained on the spot without it.")
    ] = None,
    tune: Annotated[
        str | None,
        typer.Option(
            help="Find the settings of lantern, lantern++ or even and keep them in the folder."
        ),
    ] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Write the rows here.")] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Write quality against speed here, a PNG.")
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option("--html", help="Write figures, pictures and what became of drafts here."),
    ] = None,
) -> None:
    """Compare ways of drawing on the same seeds: seconds, forwards, likeness, Frechet distance."""
    from harness.image_asked import ImageBench
    from harness.image_run import run_image_bench
    from ragspec.errors import InputError

    for path in (json, picture, html):
        o.checked_output(path)
    if model is not None and image_set is not None:
        raise InputError("got --set and --model; expected one of them.")
    if picture is not None and not quality:
        raise InputError("--picture needs a quality: add --quality 500, the images of a batch.")
    names = tuple(name.strip() for name in ways.split(",") if name.strip())
    request = ImageBench(
        *(model or image_set or "tiles", names, images, quality, batches, side_by_side, budget),
        *(min_expected_gain, guidance, temperature, top_k, seed, device, dtype),
        None if features is None else str(features),
        *(steps, floor, prefill),
    )
    if tune is not None:
        from harness.image_tune import write_tuned

        if names or quality or picture or html:
            raise InputError("got --tune and ways; expected --tune alone, with --images.")
        write_tuned(request, tune, json)
        return
    run_image_bench(request, json, picture, html)
