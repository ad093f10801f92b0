"""`ragspec draw --sheet`: prompts by rules on one picture, with all that a person judges by."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragspec.errors import InputError
from ragspec.pipelines.bench.image_ways import ALIASES, DRAFT_ONLY, PLAIN, Way
from ragspec.pipelines.bench.latent_ways import FEWER
from ragspec.pipelines.cli.draw_compare import denoised
from ragspec.pipelines.cli.draw_run import resolved
from ragspec.pipelines.cli.drawn import Asked, Drawn, draw_once, generator
from ragspec.pipelines.cli.drawn_files import save
from ragspec.pipelines.console.options import checked_output

if TYPE_CHECKING:
    from PIL.Image import Image

    from ragspec.pipelines.bench.image_asked import Prepared
    from ragspec.pipelines.console.terminal import Terminal

RULES = ("exact", "sjd", "lantern", "cool")  # columns where nothing is said
LATENT_RULES = ("aligned", "near@0.02", "fewer@8")
MASKED_RULES = ("aligned", "near@0.1", "fewer@8")
_SIDE = 176  # pixels of a picture on the sheet
_WARNED = 2.0  # errors of a mean surprise from which on it is marked
FOOT = (
    "Seconds are of one drawing each, in turns. A forward is one pass of the target; plain drawing "
    "gives one code each.",
    "tv_excess: likeness given up at a code, 0 to 1. surprise: nats by which the codes are less "
    "likely under the target than its own, ± one standard error; about 0 where the rule is exact, "
    "red where the mean is more than two errors above it.",
)
LATENT_FOOT = (
    FOOT[0].replace("code", "latent"),
    "dB: likeness to the plain picture of the seed. off: how far kept latents are from the "
    "target's own, in deviations.",
)


@dataclass(frozen=True, slots=True)
class Column:
    """All images of one way, in the order of the rows."""

    way: Way
    drawn: Drawn

    @property
    def is_plain(self) -> bool:
        """Whether it is what the others are measured against."""
        return self.way.name == PLAIN


def draw_sheet(asked: Asked, out: Path, terminal: Terminal) -> None:
    """Draw everything by every rule; write the picture, its JSON file and its page.

    Raises InputError for what cannot be asked together, and what the pipelines do.
    """
    from ragspec.sampling.noise import fresh_seed

    asked.check()
    _check(asked, out)
    with terminal.working("loading"):
        ready = _prepared(asked)
        asked = replace(resolved(asked, ready.base), denoising=denoised(ready.base) or {})
        seed = fresh_seed() if asked.seed is None else asked.seed
    with terminal.working("drawing"):
        columns = _drawn(asked, ready, seed)
    figures = sheet_figures(asked, columns, seed)
    save(sheet_picture(figures, columns), out, {"sheet": figures["title"], "seed": seed})
    text = json.dumps(figures, indent=1, ensure_ascii=False)
    out.with_suffix(".json").write_text(text + "\n", encoding="utf-8")
    _write_page(figures, columns, out.with_suffix(".html"))
    for each in figures["columns"]:
        terminal.line(f"{each['rule']}: {', '.join(_head_lines(each))}, label {each['label']}")
    terminal.line(f"sheet in {out}; figures and page beside it: .json, .html")


def _check(asked: Asked, out: Path) -> None:
    checked_output(out)
    if out.suffix.lower() != ".png":
        raise InputError(f"got --sheet {out}; expected a PNG, such as {out.with_suffix('.png')}.")
    if asked.rules and (asked.rule is not None or asked.given()):
        got = [name for name in ("rule",) if asked.rule] + list(asked.given())
        raise InputError(
            f"got --rules and --{', --'.join(got)}; expected settings by name in --rules: "
            "lantern@0.3k40 is delta 0.3 and 40 near codes, near@0.02 is r 0.02."
        )
    if not asked.drafter:
        raise InputError(
            "got --sheet and --drafter none; expected a drafter: plain drawing is the first "
            "column as it is."
        )


def _prepared(asked: Asked) -> Prepared:
    """Return the models and the ways of drawing, plain first."""
    from ragspec.pipelines.bench.image_asked import ImageBench
    from ragspec.pipelines.bench.image_run import prepare
    from ragspec.visual.pipeline.folder import find_folder, of_latents, of_masked

    target = find_folder(asked.source()).target
    masked = of_masked(target)
    usual = MASKED_RULES if masked else LATENT_RULES if of_latents(target) else RULES
    if asked.denoising.get("iterations") is not None:
        raise InputError(
            "got --sheet and --iterations; expected fewer@N in --rules: plain drawing, by which "
            "all is measured, takes one iteration a latent."
        )
    one = asked.rule is not None
    names = () if one else asked.rules or usual
    bench = ImageBench(
        source=asked.source(),
        ways=names or (PLAIN,),
        images=1,
        quality=0,
        batches=5,
        side_by_side=1,
        budget=str(asked.budget),
        worth=None,
        guidance=asked.guidance,
        temperature=asked.temperature,
        top_k=asked.top_k,
        seed=0,  # those of the pictures come from the generator of `draw`
        device=asked.device,
        dtype=asked.dtype,
        features=None,
        steps=asked.denoising.get("steps"),
        floor=asked.denoising.get("floor"),
    )
    ready = prepare(bench)
    drafter = "+".join(asked.drafter)
    ways = [way if _says_drafter(way) else replace(way, drafter=drafter) for way in ready.ways]
    if one:
        ways.append(Way(asked.rule_told(), str(asked.rule), drafter, asked.given()))
    return replace(ready, ways=ways)


def _says_drafter(way: Way) -> bool:
    return way.drafter is None or ":" in ALIASES.get(way.name, way.name)


def _drawn(asked: Asked, ready: Prepared, seed: int) -> list[Column]:
    """Draw all images in every way, one at a time and in turns; the seeds are those of `draw`."""
    pipes = [ready.build(way, asked.budget, 1) for way in ready.ways]
    for pipe in pipes:
        draw_once(pipe, asked, generator(0), 0)
    dice = [generator(seed) for _ in pipes]
    found: list[list[Any]] = [[] for _ in pipes]
    count = len(pipes)
    for row in range(len(asked.subjects) * asked.count):
        for turn in range(count):
            way = (row + turn) % count
            found[way].append(draw_once(pipes[way], asked, dice[way], row // asked.count))
    return [Column(way, Drawn(each)) for way, each in zip(ready.ways, found, strict=True)]


def sheet_figures(asked: Asked, columns: Sequence[Column], seed: int) -> dict[str, Any]:
    """Return what the JSON file holds: the request, each column's means, each picture's figures."""
    plain = next(each for each in columns if each.is_plain).drawn
    subjects = [name for name in asked.subjects for _ in range(asked.count)]
    many = [f"{len(subjects)} picture", f"{len(columns) - 1} rule"]
    many = [each if each.startswith("1 ") else f"{each}s" for each in many]
    title = f"{asked.source()}, seed {seed}: {' by '.join(many)} and plainly"
    return {
        "title": title,
        "model": asked.source(),
        "seed": seed,
        "guidance": asked.guidance,
        "temperature": asked.temperature,
        "top_k": asked.top_k,
        "budget": asked.budget,
        "denoising": {name: asked.denoising.get(name) for name in ("steps", "floor")}
        if asked.denoising
        else None,
        "image": None if asked.image is None else str(asked.image),
        "kept_codes": 0 if asked.kept is None else int(asked.kept.places.sum()),
        "latents": plain.latents is not None,
        "rows": [
            {
                "subject": name,
                "name": f"{name} ({number % asked.count + 1})" if asked.count > 1 else name,
                "seed": plain.seeds[number],
            }
            for number, name in enumerate(subjects)
        ],
        "columns": [
            {
                "settings": each.way.settings,
                "drafter": None if each.is_plain else each.way.drafter,
                "ratio": each.drawn.ratio(plain),
                **_figures(each.way, each.drawn, plain),
                "cells": [
                    _figures(each.way, Drawn([one]), Drawn([two]))
                    for one, two in zip(each.drawn.outputs, plain.outputs, strict=True)
                ],
            }
            for each in columns
        ],
    }


def _figures(way: Way, drawn: Drawn, plain: Drawn) -> dict[str, Any]:
    """Return the figures of some images, beside the plain ones of their seeds."""
    mean, most = drawn.distance or (None, None)
    own = way.name != DRAFT_ONLY  # the target does nothing there
    surprise, error = (drawn.surprise if own else None) or (None, None)
    return {
        "rule": way.name,
        "latents": drawn.latents is not None,
        # Of a law of its own, which is not that of plain drawing.
        "label": drawn.label if own and way.rule != FEWER else "approximate",
        "seconds": drawn.seconds,
        "forwards": drawn.forwards if own else 0,
        "codes_per_forward": drawn.codes_per_forward if own else None,
        "tv_excess": drawn.tv_excess if own else None,
        "surprise": surprise,
        "surprise_error": error,
        "equal": sum(drawn.equal(plain)),
        "images": len(drawn.images),
        "psnr": drawn.psnr(plain),
        "distance_mean": mean,
        "distance_most": most,
    }


def sheet_picture(figures: dict[str, Any], columns: Sequence[Column]) -> Image:
    """Return the picture: a row for each image, a column for each way, figures below each."""
    from ragspec.visual.evaluation.grids import Cell, Heading, grid

    rows = range(len(figures["rows"]))
    images = [each.drawn.images for each in columns]
    cells = [
        [
            Cell(pictures[row], cell_lines(told["cells"][row]))
            for pictures, told in zip(images, figures["columns"], strict=True)
        ]
        for row in rows
    ]
    headings = [
        Heading(each["rule"], lines := _head_lines(each), _warned(each, lines))
        for each in figures["columns"]
    ]
    return grid(
        cells,
        columns=headings,
        rows=[row["name"] for row in figures["rows"]],
        title=figures["title"],
        notes=[settings_told(figures)],
        foot=LATENT_FOOT if figures["latents"] else FOOT,
        side=_SIDE,
    )


def settings_told(figures: dict[str, Any]) -> str:
    """Return how all pictures were drawn, for people."""
    line = f"guidance {figures['guidance']:g}, temperature {figures['temperature']:g}"
    line += f", top-k {figures['top_k']}" if figures["top_k"] else ""
    line += f", budget {figures['budget']}"
    if figures["denoising"] is not None:
        line += ", {steps} denoising steps, floor {floor:g}".format(**figures["denoising"])
    if figures["image"] is not None:
        line += f"; {figures['kept_codes']} codes of {figures['image']} are kept"
    return line


def _head_lines(told: dict[str, Any]) -> list[str]:
    """Return the means of a column, for people."""
    plain = told["rule"] == PLAIN
    lines = ["the target alone" if plain else f"{told['ratio']:.2f} times as fast"]
    lines.append(_per_forward(told))
    return lines + _judged_lines(told, 3)


def _per_forward(told: dict[str, Any]) -> str:
    if told["codes_per_forward"] is None:
        return "without the target"
    return f"{told['codes_per_forward']:.2f} {'latents' if told['latents'] else 'codes'} a forward"


def _judged_lines(told: dict[str, Any], digits: int) -> list[str]:
    """Return what a person judges by, as far as it was measured."""
    lines = []
    if told["distance_mean"] is not None:
        lines.append(f"off {told['distance_mean']:.3f}, at most {told['distance_most']:.3f}")
    if told["surprise"] is not None:
        value, error = told["surprise"], told["surprise_error"]
        lines.append(f"surprise {value:+.{digits}f} ± {error:.{digits}f}")
    if told["tv_excess"] is not None and not told["latents"]:
        lines.append(
            f"tv_excess {told['tv_excess']:.{digits}f}" if told["tv_excess"] else "tv_excess 0"
        )
    return lines


def _warned(told: dict[str, Any], lines: Sequence[str]) -> frozenset[int]:
    surprise, error = told["surprise"], told["surprise_error"]
    if surprise is None or surprise <= _WARNED * error:
        return frozenset()
    return frozenset(n for n, line in enumerate(lines) if line.startswith("surprise"))


def cell_lines(told: dict[str, Any]) -> list[str]:
    """Return what stands below a picture."""
    lines = [f"{told['seconds']:.2f} s · {_per_forward(told)}"]
    lines += _judged_lines(told, 2)
    close = "" if told["psnr"] is None else f" · {told['psnr']:.1f} dB"
    same = told["equal"] and told["rule"] != PLAIN
    lines.append(told["label"] + (" · the plain picture" if same else close))
    return lines


def _write_page(figures: dict[str, Any], columns: Sequence[Column], out: Path) -> None:
    from ragspec.pipelines.page.page import embedded, render_template
    from ragspec.pipelines.page.page import save as save_page

    pictures = [[embedded(image) for image in each.drawn.images] for each in columns]
    page = render_template(
        "sheet.html.j2",
        told=settings_told(figures),
        title=figures["title"],
        rows=figures["rows"],
        columns=[
            {
                "name": each["rule"],
                "lines": (lines := _head_lines(each)),
                "warned": _warned(each, lines),
                "cells": [
                    {"picture": picture, "lines": cell_lines(cell)}
                    for picture, cell in zip(shown, each["cells"], strict=True)
                ],
            }
            for each, shown in zip(figures["columns"], pictures, strict=True)
        ],
        foot=LATENT_FOOT if figures["latents"] else FOOT,
        pictures=True,
    )
    save_page(page, out)
