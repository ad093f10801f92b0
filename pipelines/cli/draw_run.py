"""What `ragspec draw` does: load, draw, compare with plain decoding, write pictures and figures."""

from __future__ import annotations

import json as json_text
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ragspec.errors import InputError
from ragspec.pipelines.cli.draw_compare import (
    MOST_ROWS,
    comparison_picture,
    denoised,
    distance_told,
    draw_both,
    parted_places,
    parted_told,
)
from ragspec.pipelines.cli.drawn import Asked, Drawn, draw_once, generator
from ragspec.pipelines.cli.drawn_files import check_free, records, save, stem_of
from ragspec.pipelines.console.options import be_quiet, checked_output

if TYPE_CHECKING:
    from ragspec.pipelines.console.terminal import Terminal
    from ragspec.visual.pipeline.pipeline import ImagePipeline


def load_pipeline(asked: Asked) -> ImagePipeline:
    """Return the pipeline that was asked for; raises what `ImagePipeline` does."""
    from ragspec.visual.pipeline.folder import find_folder, of_latents, of_masked
    from ragspec.visual.pipeline.latents import LatentPipeline
    from ragspec.visual.pipeline.pipeline import ImagePipeline

    source = asked.source()
    be_quiet()
    target = find_folder(source).target
    if of_masked(target):
        from ragspec.pipelines.cli.draw_masked import load_masked_pipeline

        return cast("ImagePipeline", load_masked_pipeline(asked))
    latents = of_latents(target)
    made = LatentPipeline if latents else ImagePipeline
    return made.from_pretrained(
        source,
        asked.drafter,
        asked.rule or ("aligned" if latents else "exact"),
        device=asked.device,
        dtype=asked.dtype,
        budget=asked.budget,
        **asked.given(),
        **_denoising(asked, latents),
    )


def _denoising(asked: Asked, latents: bool) -> dict[str, Any]:
    """Return how latents are denoised; raises InputError where there are none, or iterations."""
    given = {name: value for name, value in asked.denoising.items() if value is not None}
    if "iterations" in given or (given and not latents):
        raise InputError(
            f"got --{' and --'.join(given)} for {asked.source()}; expected them for models of "
            "continuous latents, --iterations for masked ones alone. Leave them out."
        )
    return given


def draw_images(
    asked: Asked, out: Path, json: Path | None, compare: bool, terminal: Terminal
) -> None:
    """Draw, write the pictures into the folder and the figures into the JSON file."""
    asked.check()
    with _made(out):
        checked_output(json)  # which may lie in the folder that was just made
        _draw_into(out, asked, json, compare, terminal)


def _draw_into(
    out: Path, asked: Asked, json: Path | None, compare: bool, terminal: Terminal
) -> None:
    from ragspec.sampling.noise import fresh_seed

    with terminal.working("loading"):
        pipe = load_pipeline(asked)
    asked = replace(resolved(asked, pipe), rule=asked.rule or pipe.rule_name)
    pipe.set_progress_bar_config(disable=not terminal.err.is_terminal, leave=False)
    seed = fresh_seed() if asked.seed is None else asked.seed
    stem = stem_of(asked, seed)
    told = records(asked, seed, _dtype(pipe))
    paths = [out / f"{stem}-{number}.png" for number in range(len(told))]
    check_free(paths, told)
    plain = None
    if compare:
        drawn, plain = draw_both(pipe, asked, seed)
    else:
        drawn = Drawn([draw_once(pipe, asked, generator(seed))])
    for image, path, record in zip(drawn.images, paths, told, strict=True):
        save(image, path, record)
    _write_sheets(asked, drawn, plain, seed, out / stem)
    found = figures(asked, drawn, plain, seed, paths) | _used(asked, pipe)
    if json is not None:
        json.write_text(json_text.dumps(found, indent=1) + "\n", encoding="utf-8")
    _tell(found, drawn, out, terminal)


def resolved(asked: Asked, pipe: ImagePipeline) -> Asked:
    """Return the same with classes by name and the codes that are kept; raises InputError."""
    from ragspec.pipelines.cli.kept_codes import kept_codes

    asked.check_kind(pipe.trunk.config.condition == "class")
    if pipe.class_names:
        asked = asked.named(pipe.class_names, pipe.label_of)
    if asked.image is None or asked.mask is None:
        return asked
    return replace(asked, kept=kept_codes(asked.image, asked.mask, pipe))


@contextmanager
def _made(out: Path) -> Iterator[None]:
    """Make a folder that can be written to; empty ones are taken away if the work in it fails."""
    if out.exists() and not out.is_dir():
        raise InputError(f"--out {out} is a file; expected a folder, made if it is not there.")
    new = [folder for folder in (out, *out.parents) if not folder.exists()]
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise InputError(
            f"--out {out} cannot be written to ({error}); name another folder."
        ) from error
    try:
        yield
    except BaseException:
        with suppress(OSError):
            for folder in new:
                folder.rmdir()
        raise


def figures(
    asked: Asked, drawn: Drawn, plain: Drawn | None, seed: int, written: Sequence[Path]
) -> dict[str, Any]:
    """Return what the JSON file holds; what only a comparison knows is None without one."""
    same = None if plain is None else drawn.equal(plain)
    mean, most = drawn.distance or (None, None)
    return {
        "label": drawn.label,
        "forwards": drawn.forwards,
        "forwards_plain": None if plain is None else plain.forwards,
        "seconds": drawn.seconds,
        "seconds_plain": None if plain is None else plain.seconds,
        "ratio": None if plain is None else drawn.ratio(plain),
        "equal": None if same is None else all(same),
        "equal_images": None if same is None else sum(same),
        "psnr": None if plain is None else drawn.psnr(plain),
        "parted": None if plain is None else parted_places(drawn, plain),
        "tv_excess": drawn.tv_excess,
        "surprise": None if drawn.surprise is None else drawn.surprise[0],
        "surprise_error": None if drawn.surprise is None else drawn.surprise[1],
        "repeatable": all(output.stats.repeatable for output in drawn.outputs),
        "distance_mean": mean,
        "distance_most": most,
        "codes_per_forward": drawn.codes_per_forward,
        "images": [str(path) for path in written],
        "subject": asked.subject,
        "rule": asked.rule,
        "settings": asked.given(),
        "drafter": "+".join(asked.drafter) or None,
        "guidance": asked.guidance,
        "image": None if asked.image is None else str(asked.image),
        "mask": None if asked.mask is None else str(asked.mask),
        "kept_codes": 0 if asked.kept is None else int(asked.kept.places.sum()),
        "seed": seed,
        "seeds": drawn.seeds,
    }


def _used(asked: Asked, pipe: ImagePipeline) -> dict[str, Any]:
    """Return what the images were drawn with, as far as it is not what was typed."""
    from ragspec.visual.pipeline.drafter_choice import source_name

    masked = hasattr(pipe, "drafts")
    return {
        "model": asked.source(),
        "drafter_used": pipe.drafter_name if masked else source_name(pipe.source),
        "denoising": denoised(pipe),
        "device": str(pipe.model.device),
        "dtype": _dtype(pipe),
        "budget": asked.budget,
        "temperature": asked.temperature,
        "top_k": asked.top_k,
    }


def _dtype(pipe: ImagePipeline) -> str:
    return str(pipe.model.dtype).removeprefix("torch.")


def _write_sheets(asked: Asked, drawn: Drawn, plain: Drawn | None, seed: int, stem: Path) -> None:
    """Write a sheet of all images, with what was kept before them, and the comparison."""
    from ragspec.visual.evaluation import pictures

    told = dict.fromkeys((asked.subject, f"seed {seed}", asked.rule_told(), drawn.label))
    title = " · ".join(told)
    images, captions = drawn.images, list[str]()
    if asked.kept is not None:
        captions = ["given", "kept", *(f"image {number}" for number in range(len(images)))]
        images = [asked.kept.picture, asked.kept.shown(), *images]
    pictures.sheet(images, captions, title=title).save(f"{stem}-sheet.png")
    if plain is not None:
        comparison_picture(asked, drawn, plain, seed).save(f"{stem}-compare.png")


def _tell(found: Mapping[str, Any], drawn: Drawn, out: Path, terminal: Terminal) -> None:
    count = len(found["images"])
    line = f"{count} image{'s' * (count > 1)} in {out}: {drawn.told}, "
    what = "codes" if drawn.latents is None else "latents"
    line += f"{found['codes_per_forward']:.2f} {what} a forward, label {found['label']}"
    if found["tv_excess"] is not None and not drawn.label.startswith("exact"):
        line += f", tv_excess {found['tv_excess']:.4f} a position"
        if found["surprise"] is not None:
            line += f", surprise {found['surprise']:+.3f} +- {found['surprise_error']:.3f} a code"
    if drawn.distance is not None:
        line += f", {distance_told(drawn.distance)}"
    terminal.line(line)
    if found["seconds_plain"] is not None:
        terminal.line(
            f"plain: {found['forwards_plain']} forwards, {found['seconds_plain']:.2f} s; "
            f"{found['ratio']:.2f} times as fast, {found['equal_images']} of {count} the same"
            + (f", {found['psnr']:.1f} dB to plain" if found["psnr"] is not None else "")
        )
        _tell_parted(found["parted"], drawn.shape, terminal)


def _tell_parted(
    parted: Sequence[tuple[int, int] | None], shape: Sequence[int], terminal: Terminal
) -> None:
    """Say where images part from the plain ones, of the first few."""
    places = {number: place for number, place in enumerate(parted) if place is not None}
    for number, place in list(places.items())[:MOST_ROWS]:
        terminal.line(f"image {number} {parted_told(place, shape)}")
    if len(places) > MOST_ROWS:
        terminal.line(f"and {len(places) - MOST_ROWS} more; --json tells all")
