"""What `ragspec draw` does: load, draw, compare with plain decoding, write pictures and figures."""

from __future__ import annotations

import json as json_text
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from ragspec.errors import InputError
from ragspec.pipelines.options import be_quiet

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

    from ragspec.pipelines.terminal import Terminal
    from ragspec.visual.image_pipeline import ImagePipeline

MOST_ROWS = 6  # images of a comparison picture
LETTERS = 40


@dataclass(frozen=True, slots=True)
class Asked:
    """What is to be drawn, and how; settings are those of the rule, None where not given."""

    prompt: str | None
    classes: tuple[str, ...]
    image_set: str | None
    model: str | None
    drafter: tuple[str, ...]
    rule: str
    settings: Mapping[str, Any]
    budget: str | int
    count: int
    seed: int | None
    guidance: float
    temperature: float
    top_k: int
    device: str
    dtype: str

    def source(self) -> str:
        """Return the set or folder to draw with; raises InputError for contradictions."""
        if (self.prompt is None) == (not self.classes):
            got = "neither a prompt nor --class" if self.prompt is None else "both"
            raise InputError(f"got {got}; expected a prompt such as 'red heart', or --class 3.")
        if self.image_set is not None and self.model is not None:
            raise InputError("got --set and --model; expected one of them.")
        return self.model or self.image_set or ("tiles" if self.classes else "emoji")

    @property
    def subject(self) -> str:
        """What is drawn, in words."""
        return self.prompt or ", ".join(
            f"class {name}" if name.strip().isdecimal() else name for name in self.classes
        )

    def named(self, names: Sequence[str], number: Callable[[str], int]) -> Asked:
        """Return the same with classes by name, where the model has names."""
        return replace(self, classes=tuple(names[number(each)] for each in self.classes))

    def given(self) -> dict[str, Any]:
        """Return the settings of the rule that were given."""
        return {name: value for name, value in self.settings.items() if value is not None}

    def rule_told(self) -> str:
        """Return the rule with its settings, for people."""
        given = ", ".join(f"{name} {value:g}" for name, value in self.given().items())
        return f"{self.rule} ({given})" if given else self.rule


@dataclass(slots=True)
class Drawn:
    """The images of one way of drawing, in order; side by side in one batch or one by one."""

    outputs: list[Any]

    @property
    def images(self) -> list[Image]:
        """All images."""
        return [image for output in self.outputs for image in output.images]

    @property
    def codes(self) -> torch.Tensor:
        """The codes i64 [B, h, w]."""
        import torch

        return torch.cat([output.codes for output in self.outputs])

    @property
    def forwards(self) -> int:
        """Forward passes over all images."""
        return sum(output.stats.forwards for output in self.outputs)

    @property
    def seconds(self) -> float:
        """Seconds over all images."""
        return float(sum(output.stats.seconds for output in self.outputs))

    @property
    def tv_excess(self) -> float | None:
        """Mean excess a position; None where the rule does not measure it."""
        found = [output.stats.tv_excess for output in self.outputs for _ in output.images]
        return None if any(each is None for each in found) else fmean(found)

    @property
    def label(self) -> str:
        """The label that holds for all images."""
        from ragspec.visual.image_output import weakest

        return weakest([output.label for output in self.outputs])

    @property
    def seeds(self) -> list[int | None]:
        """The seed of each image."""
        return [seed for output in self.outputs for seed in output.stats.seeds]

    @property
    def codes_per_forward(self) -> float:
        """Codes by forward pass of decoding, the reading of conditions left out."""
        reports = [report for output in self.outputs for report in output.stats.reports]
        passes = sum(report.forwards for report in reports)
        codes = sum(report.tokens - 1 for report in reports)
        return float(codes / max(1, passes))


def load_pipeline(asked: Asked) -> ImagePipeline:
    """Return the pipeline that was asked for; raises what `ImagePipeline` does."""
    from ragspec.visual.image_pipeline import ImagePipeline

    source = asked.source()
    be_quiet()
    return ImagePipeline.from_pretrained(
        source,
        asked.drafter,
        asked.rule,
        device=asked.device,
        dtype=asked.dtype,
        budget=asked.budget,
        **asked.given(),
    )


def draw_images(
    asked: Asked, out: Path, json: Path | None, compare: bool, terminal: Terminal
) -> None:
    """Draw, write the pictures into the folder and the figures into the JSON file."""
    from ragspec.noise import fresh_seed

    asked.source()
    with terminal.working("loading"):
        pipe = load_pipeline(asked)
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
    found = figures(asked, drawn, plain, seed, written)
    if json is not None:
        json.write_text(json_text.dumps(found, indent=1) + "\n", encoding="utf-8")
    _tell(found, drawn, out, terminal)


def figures(
    asked: Asked, drawn: Drawn, plain: Drawn | None, seed: int, written: Sequence[Path]
) -> dict[str, Any]:
    """Return what the JSON file holds; what only a comparison knows is None without one."""
    same = None if plain is None else (drawn.codes == plain.codes).flatten(1).all(1)
    return {
        "label": drawn.label,
        "forwards": drawn.forwards,
        "forwards_plain": None if plain is None else plain.forwards,
        "seconds": drawn.seconds,
        "seconds_plain": None if plain is None else plain.seconds,
        "ratio": None if plain is None else _ratio(drawn, plain),
        "equal": None if same is None else bool(same.all()),
        "equal_images": None if same is None else int(same.sum()),
        "tv_excess": drawn.tv_excess,
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


def _both(pipe: ImagePipeline, asked: Asked, seed: int) -> tuple[Drawn, Drawn]:
    """Draw every image speculatively and plainly, one at a time and in turns."""
    from ragspec.visual.image_pipeline import ImagePipeline

    bare = ImagePipeline(pipe.model, pipe.tokenizer, None, folder=pipe.folder)
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


def _ratio(drawn: Drawn, plain: Drawn) -> float:
    """Return the median over images of plain seconds by ours."""
    pairs = zip(plain.outputs, drawn.outputs, strict=True)
    return float(median(one.stats.seconds / max(1e-9, two.stats.seconds) for one, two in pairs))


def _write(asked: Asked, drawn: Drawn, plain: Drawn | None, seed: int, out: Path) -> list[Path]:
    """Write each image as it is, a sheet of all, and the comparison; return the images' paths."""
    from ragspec.visual import pictures

    if out.exists() and not out.is_dir():
        raise InputError(f"--out {out} is a file; expected a folder, made if it is not there.")
    out.mkdir(parents=True, exist_ok=True)
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


def comparison_picture(asked: Asked, drawn: Drawn, plain: Drawn, seed: int) -> Image:
    """Return plain and speculative images side by side, and what was accepted."""
    from ragspec.visual import pictures

    maps = []
    for output in drawn.outputs:
        for image, together, excess in zip(
            output.images, output.acceptance_map, output.stats.excess, strict=True
        ):
            relaxed = None
            if output.label == "approximate" and set(excess.reshape(-1).tolist()) <= {0.0, 1.0}:
                relaxed = excess > 0
            maps.append(pictures.heat_map(image, together, relaxed))
    same = int((drawn.codes == plain.codes).flatten(1).all(1).sum())
    notes = [f"label {drawn.label} · {same} of {len(drawn.images)} images the same as plain ones"]
    if drawn.tv_excess is not None and not drawn.label.startswith("exact"):
        notes[0] += f" · tv_excess {drawn.tv_excess:.4f} a position"
    columns = [
        pictures.Column("plain", _told(plain), plain.images[:MOST_ROWS]),
        pictures.Column(asked.rule_told(), _told(drawn), drawn.images[:MOST_ROWS]),
        pictures.Column(
            "what was accepted", f"{drawn.codes_per_forward:.2f} codes a forward", maps[:MOST_ROWS]
        ),
    ]
    title = f"{asked.subject}, seed {seed}: {_ratio(drawn, plain):.2f} times as fast"
    return pictures.comparison(columns, title=title, notes=notes)


def _told(drawn: Drawn) -> str:
    return f"{drawn.forwards} forwards, {drawn.seconds:.2f} s"


def _tell(found: Mapping[str, Any], drawn: Drawn, out: Path, terminal: Terminal) -> None:
    count = len(found["images"])
    line = f"{count} image{'s' * (count > 1)} in {out}: {_told(drawn)}, "
    line += f"{found['codes_per_forward']:.2f} codes a forward, label {found['label']}"
    if found["tv_excess"] is not None and not drawn.label.startswith("exact"):
        line += f", tv_excess {found['tv_excess']:.4f} a position"
    terminal.line(line)
    if found["seconds_plain"] is not None:
        terminal.line(
            f"plain: {found['forwards_plain']} forwards, {found['seconds_plain']:.2f} s; "
            f"{found['ratio']:.2f} times as fast, {found['equal_images']} of {count} the same"
        )


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:LETTERS] or "image"
