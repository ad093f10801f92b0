"""What `ragspec draw` does: load, draw, compare with plain decoding, write pictures and figures."""

from __future__ import annotations

import json as json_text
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragspec.errors import InputError
from ragspec.pipelines.cli.drawn import LETTERS, Asked, Drawn, comparison_picture, distance_told
from ragspec.pipelines.console.options import be_quiet, checked_output

if TYPE_CHECKING:
    import torch

    from ragspec.pipelines.console.terminal import Terminal
    from ragspec.visual.pipeline.pipeline import ImagePipeline


def load_pipeline(asked: Asked) -> ImagePipeline:
    """Return the pipeline that was asked for; raises what `ImagePipeline` does."""
    from ragspec.visual.pipeline.folder import find_folder, of_latents
    from ragspec.visual.pipeline.latents import LatentPipeline
    from ragspec.visual.pipeline.pipeline import ImagePipeline

    source = asked.source()
    be_quiet()
    latents = of_latents(find_folder(source).target)
    made = LatentPipeline if latents else ImagePipeline
    return made.from_pretrained(
        source,
        asked.drafter,
        asked.rule or ("aligned" if latents else "exact"),
        device=asked.device,
        dtype=asked.dtype,
        budget=asked.budget,
        **asked.given(),
    )


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
    asked = replace(asked, rule=asked.rule or pipe.rule_name)
    asked.check_kind(pipe.trunk.config.condition == "class")
    if pipe.class_names:
        asked = asked.named(pipe.class_names, pipe.label_of)
    pipe.set_progress_bar_config(disable=not terminal.err.is_terminal, leave=False)
    seed = fresh_seed() if asked.seed is None else asked.seed
    plain = None
    if compare:
        drawn, plain = _both(pipe, asked, seed)
    else:
        drawn = Drawn([pipe(**_arguments(asked), generator=_generator(seed))])
    written = _write(asked, drawn, plain, seed, out)
    found = figures(asked, drawn, plain, seed, written) | _used(asked, pipe)
    if json is not None:
        json.write_text(json_text.dumps(found, indent=1) + "\n", encoding="utf-8")
    _tell(found, drawn, out, terminal)


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
        "seed": seed,
        "seeds": drawn.seeds,
    }


def _used(asked: Asked, pipe: ImagePipeline) -> dict[str, Any]:
    """Return what the images were drawn with, as far as it is not what was typed."""
    from ragspec.visual.pipeline.drafter_choice import source_name

    return {
        "model": asked.source(),
        "drafter_used": source_name(pipe.source),
        "device": str(pipe.model.device),
        "dtype": str(pipe.model.dtype).removeprefix("torch."),
        "budget": asked.budget,
        "temperature": asked.temperature,
        "top_k": asked.top_k,
    }


def _both(pipe: ImagePipeline, asked: Asked, seed: int) -> tuple[Drawn, Drawn]:
    """Draw every image speculatively and plainly, one at a time and in turns."""
    bare = type(pipe)(pipe.model, pipe.tokenizer, None, folder=pipe.folder)
    bare.set_progress_bar_config(disable=True)
    ways = (pipe, bare)
    _warm_up(ways, asked)
    dice = [_generator(seed) for _ in ways]
    found: tuple[list[Any], list[Any]] = ([], [])
    subjects: list[str | None] = list(asked.classes) or [None]
    for subject in subjects:
        for number in range(asked.count):
            order = (0, 1) if number % 2 == 0 else (1, 0)
            for way in order:
                arguments = {**_arguments(asked), "num_images_per_prompt": 1}
                if subject is not None:
                    arguments["class_labels"] = subject
                found[way].append(ways[way](**arguments, generator=dice[way]))
    return Drawn(found[0]), Drawn(found[1])


def _warm_up(ways: Sequence[ImagePipeline], asked: Asked) -> None:
    for way in ways:
        way(**{**_arguments(asked), "num_images_per_prompt": 1}, generator=_generator(0))


def _arguments(asked: Asked) -> dict[str, Any]:
    named = asked.prompt is not None
    subject = {"prompt": asked.prompt} if named else {"class_labels": list(asked.classes)}
    return {
        **subject,
        "guidance_scale": asked.guidance,
        "temperature": asked.temperature,
        "top_k": asked.top_k,
        "num_images_per_prompt": asked.count,
    }


def _generator(seed: int) -> torch.Generator:
    import torch

    return torch.Generator().manual_seed(seed)


def _write(asked: Asked, drawn: Drawn, plain: Drawn | None, seed: int, out: Path) -> list[Path]:
    """Write each image as it is, a sheet of all, and the comparison; return the images' paths."""
    from ragspec.visual.evaluation import pictures

    stem = f"{_slug(asked.subject)}-{seed}"
    names = [f"{stem}-{number}.png" for number in range(len(drawn.images))]
    for name, image in zip(names, drawn.images, strict=True):
        image.save(out / name)
    told = dict.fromkeys((asked.subject, f"seed {seed}", asked.rule_told(), drawn.label))
    title = " · ".join(told)
    pictures.sheet(drawn.images, title=title).save(out / f"{stem}-sheet.png")
    if plain is not None:
        comparison_picture(asked, drawn, plain, seed).save(out / f"{stem}-compare.png")
    return [out / name for name in names]


def _tell(found: Mapping[str, Any], drawn: Drawn, out: Path, terminal: Terminal) -> None:
    count = len(found["images"])
    line = f"{count} image{'s' * (count > 1)} in {out}: {drawn.told}, "
    line += f"{found['codes_per_forward']:.2f} codes a forward, label {found['label']}"
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


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:LETTERS] or "image"
