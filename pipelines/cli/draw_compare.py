"""Plain and speculative drawing side by side: the picture of it, and where they part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ragspec.pipelines.cli.drawn import Asked, Drawn, draw_once, generator

if TYPE_CHECKING:
    from PIL.Image import Image

    from ragspec.visual.pipeline.pipeline import ImagePipeline

MOST_ROWS = 6  # images of a comparison picture
SAME = ("exact", "exact up to rounding")  # labels of images that should be the plain ones


def distance_told(distance: tuple[float, float]) -> str:
    """Return how far kept latents were, for people."""
    return f"kept latents {distance[0]:.3f} off on average, {distance[1]:.3f} at most"


def draw_both(pipe: ImagePipeline, asked: Asked, seed: int) -> tuple[Drawn, Drawn]:
    """Draw every image speculatively and plainly, one at a time and in turns."""
    bare = _bare(pipe)
    bare.set_progress_bar_config(disable=True)
    ways = (pipe, bare)
    for each in ways:
        draw_once(each, asked, generator(0), 0)
    dice = [generator(seed) for _ in ways]
    found: tuple[list[Any], list[Any]] = ([], [])
    for subject in range(len(asked.subjects)):
        for number in range(asked.count):
            for way in (0, 1) if number % 2 == 0 else (1, 0):
                found[way].append(draw_once(ways[way], asked, dice[way], subject))
    return Drawn(found[0]), Drawn(found[1])


def _bare(pipe: Any) -> Any:
    """Return what draws plainly, under the law that the rule of a pipeline is about."""
    if hasattr(pipe, "drafts"):
        return pipe.bare()
    shared = denoised(pipe) or {}
    return type(pipe)(pipe.model, pipe.tokenizer, None, folder=pipe.folder, **shared)


def denoised(pipe: Any) -> dict[str, Any] | None:
    """Return how latents were denoised; None where none were."""
    schedule = getattr(pipe, "schedule", None)
    if schedule is None:
        return None
    told = {"steps": schedule.steps, "floor": schedule.floor}
    iterations = getattr(pipe, "iterations", None)
    return told if iterations is None else {"iterations": iterations, **told}


def parted_places(drawn: Drawn, plain: Drawn) -> list[tuple[int, int] | None]:
    """Return the row and column, from 0, of each image's first code that is not the plain one's.

    None where all are, and for all images under rules that do not promise the plain ones.
    """
    from ragspec.reports.label import kind_of_label

    if drawn.latents is not None or kind_of_label(drawn.label) not in SAME:
        return [None] * len(drawn.images)
    across = drawn.codes.shape[-1]
    return [None if place is None else divmod(place, across) for place in drawn.parted(plain)]


def parted_told(place: tuple[int, int], shape: Sequence[int]) -> str:
    """Say where an image of (h, w) codes parts from the plain one, for people: counted from 1."""
    (row, column), (down, across) = place, shape
    number = row * across + column + 1
    return f"parts at code {number} of {down * across} (row {row + 1}, column {column + 1})"


def comparison_picture(asked: Asked, drawn: Drawn, plain: Drawn, seed: int) -> Image:
    """Return plain and speculative images side by side, and what was accepted."""
    from ragspec.visual.evaluation import pictures

    count, shape = len(drawn.images), drawn.shape
    rows, relaxed, parted = shown_rows(count), _relaxed(drawn), parted_places(drawn, plain)
    together = [each for output in drawn.outputs for each in output.acceptance_map]
    maps = [
        pictures.heat_map(drawn.images[n], together[n], relaxed[n], parted=parted[n]) for n in rows
    ]
    said = {n: f" · {parted_told(place, shape)}" for n in rows if (place := parted[n]) is not None}
    columns = [
        pictures.Column("plain", plain.told, [plain.images[n] for n in rows]),
        pictures.Column(asked.rule_told(), drawn.told, [drawn.images[n] for n in rows]),
        pictures.Column(
            "what was accepted", f"{drawn.codes_per_forward:.2f} codes a forward", maps
        ),
    ]
    notes = _notes(drawn, plain, len(rows))
    named = [f"image {n}: {asked.subjects[n // asked.count]}{said.get(n, '')}" for n in rows]
    if count == 1 and said:
        notes.append(f"the image{said[0].replace(' ·', '')}, framed on the right")
    return pictures.comparison(
        columns,
        title=f"{asked.subject}, seed {seed}: {drawn.ratio(plain):.2f} times as fast",
        notes=notes,
        rows=named if count > 1 else (),
        dots=any(each is not None for each in relaxed),
        frames=bool(said),
    )


def _notes(drawn: Drawn, plain: Drawn, shown: int) -> list[str]:
    count = len(drawn.images)
    notes = [
        f"label {drawn.label} · {sum(drawn.equal(plain))} of {count} images the same as plain ones"
    ]
    psnr = drawn.psnr(plain)
    if psnr is not None:
        notes[0] += f" · {psnr:.1f} dB to the plain ones"
    if drawn.distance is not None:
        notes[0] += f" · {distance_told(drawn.distance)}"
    if drawn.tv_excess is not None and not drawn.label.startswith("exact"):
        notes[0] += f" · tv_excess {drawn.tv_excess:.4f} a position"
        if drawn.surprise is not None:
            notes[0] += " · surprise {:+.3f} ± {:.3f} a code".format(*drawn.surprise)
    if shown < count:
        notes.append(f"{shown} of {count} shown")
    return notes


def shown_rows(count: int) -> list[int]:
    """Return the numbers of the images that a comparison shows, spread evenly over all."""
    shown = min(count, MOST_ROWS)
    return [row * count // shown for row in range(shown)]


def _relaxed(drawn: Drawn) -> list[Any]:
    """Return for each image where the rule took another code than the target's, where it is known.

    A rule that takes one for another has an excess of 0 or 1 at every code; other excesses are
    parts of a law and mark no code.
    """
    found: list[Any] = []
    for output in drawn.outputs:
        for excess in output.stats.excess:
            whole = output.label == "approximate" and set(excess.reshape(-1).tolist()) <= {0.0, 1.0}
            found.append(excess > 0 if whole else None)
    return found
