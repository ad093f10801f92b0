"""`ragspec draw`: load a model, draw, and write images and figures.

The PNG text "ragspec" of every image has the settings that determine it. No file is overwritten.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from io import BytesIO
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragspec.errors import InputError, pluralize
from ragspec.models.checks import CONFIG, check_dtype, check_place, read_config
from ragspec.pipelines.console import checks
from ragspec.pipelines.console import options as o
from ragspec.pipelines.console.records import argument, option, split_drafters, takes_records
from ragspec.pipelines.console.terminal import Terminal
from ragspec.registry import entries, expect_known, names
from ragspec.sampling.settings import checked_seed, fresh_seed
from ragspec.storage.filesystem import check_folder, write_output
from ragspec.visual import checks as visual
from ragspec.visual.loading import check_drafts, class_labels, find_folder, read_kind

if TYPE_CHECKING:
    from PIL.Image import Image

    from ragspec.visual.pipeline import ImagePipeline

KEY = "ragspec"
NAME_LETTERS = 40  # most letters of the subject in a file name
PLACE, CALL = ("device", "dtype"), ("height", "width", "top_k", "top_p", "min_p")


@dataclass(frozen=True, slots=True)
class DrawOptions:
    """The prompts or classes to draw, and the settings; checked before any model is loaded."""

    prompt: list[str] = argument([], "Prompts to draw, such as 'red heart'.")
    classes: list[str] = option([], "Class to draw by number or name; repeatable.", "--class", "-c")
    model: str | None = option(
        None,
        "Folder of a pipeline, or a bundled set: emoji, latent-emoji (prompts), tiles, "
        "latent-tiles, masked-tiles (classes). Default: emoji for prompts, tiles for classes.",
        "--model",
        "-m",
    )
    family: str | None = option(
        None, "Image family by name, default: what the folder holds; else see docs."
    )
    rule: str | None = option(
        None,
        "Acceptance rule: exact, lantern, lantern++, gsd, rejection; of latents near, "
        "aligned, horizon, path. Default: exact, of latents aligned.",
    )
    setting: list[str] = option(
        [],
        "A setting of the rule (delta, lam, neighbours, tv_budget, least_gain, r, s), of "
        "denoising (steps, floor, iterations), of sampling (top_k, top_p, min_p), device, dtype, "
        "or height and width in pixels (of Emu3 and Lumina-mGPT alone); repeatable.",
        "--set",
        "-s",
        metavar="NAME=VALUE",
    )
    drafter: str = option(
        "auto", "auto, jacobi, model, head, a folder, several joined by +, or none."
    )
    budget: str | None = option(
        None, "Draft nodes per step: auto, or a number. Default: 12, of masked 4."
    )
    n: int = option(1, "Images of each prompt or class.", "--n", "-n", min=1)
    seed: int | None = option(None, "Random seed. Chosen at random and printed if omitted.")
    guidance: float | None = option(
        None, "Guidance scale, 1 for none. Default: the family's, mostly 2."
    )
    temperature: float = option(
        1.0, "Temperature; 0: the best code.", "--temperature", "-t", min=0, max=100
    )
    out: Path = option(Path("images"), "Folder for the images.", "--out", "-o", file_okay=False)
    json: Path | None = option(None, "Write figures to this file.", "--json", dir_okay=False)

    def __post_init__(self) -> None:
        for text in self.prompt:
            if not checks.checked_text(text):
                raise InputError("Expected a prompt of some words, got the prompt ''.")
        check_place(self.settings().get("device", "auto"))
        check_dtype(self.settings().get("dtype", "auto"))
        if self.seed is not None:
            checked_seed(self.seed, self.n * len(self.subjects))
        if self.budget is not None:
            checks.check_budget(self.budget)
        if self.guidance is not None:
            visual.check_setting("guidance_scale", self.guidance)
        if self.family is not None:
            expect_known("family", [self.family], names("family"))
        check_folder(self.out)
        if self.json is not None and (self.json.parent != self.out or self.json.exists()):
            checks.check_output(self.json, checks.JSON)
        self._check_model()

    def _check_model(self) -> None:
        """Raise an error for a condition, rule, setting or drafter that the model does not have."""
        folder = find_folder(self.source)
        kind = read_kind(folder.target)
        alone = kind == "imagegpt" or kind not in visual.KINDS  # may draw without conditions
        if bool(self.prompt) == bool(self.classes) and (self.prompt or not alone):
            got = "both" if self.prompt else "neither"
            raise InputError(f"Expected a prompt or --class, got {got}. Give 'sun', or --class 3.")
        if kind not in visual.KINDS:  # of another package's family
            return
        if self.rule or folder.index is None:
            visual.check_rule(kind, self.rule, self.settings(*PLACE, *CALL))
        mode = "deterministic" if "tv_budget" in self.settings() else "coupled"
        check_drafts(self.drafters, folder, kind, mode)
        config = read_config(folder.target / CONFIG, "model_type")
        classes = class_labels(config) if kind in ("llamagen", *visual.DENOISING) else None
        if classes is None and self.classes and not alone:
            raise InputError(
                f"Expected a prompt, got --class {self.classes[0]}: {self.source} reads prompts. "
                "Give one such as 'red heart', or use --model tiles."
            )
        if classes is not None and not self.classes:
            raise InputError(
                f"Expected --class, got the prompt {self.prompt[0]!r}: {self.source} draws "
                "classes. Give a number or a name, or use --model emoji."
            )
        for label in self.classes if classes else ():
            visual.class_number(label, classes or (), len(classes or ()))

    @property
    def subjects(self) -> list[str]:
        """The prompts, or the classes in words."""
        names = [f"class {name}" if name.strip().isdecimal() else name for name in self.classes]
        return self.prompt or names or ["image"]

    @property
    def source(self) -> str:
        """The folder or bundled set of the model."""
        return self.model or ("tiles" if self.classes else "emoji")

    @property
    def drafters(self) -> list[str]:
        """Names or folders of drafters; empty draws plainly."""
        return [] if self.drafter == "none" else split_drafters(self.drafter)

    def settings(self, *others: str) -> dict[str, Any]:
        """Return the settings by name, without some others; raise InputError for other texts."""
        settings, whole = dict[str, Any](), {*visual.WHOLE, *CALL} - {"top_p", "min_p"}
        for text in self.setting:
            name, _, value = text.partition("=")
            name = name.strip().replace("-", "_").replace("lambda", "lam")
            convert: type[Any] = str if name in PLACE else int if name in whole else float
            try:
                settings[name] = convert(value)
            except ValueError as error:
                kind = "whole number" if name in whole else "number, such as delta=0.3"
                raise InputError(
                    f"Expected --set NAME=VALUE, got {text!r}. Give a {kind}."
                ) from error
        return {name: value for name, value in settings.items() if name not in others}

    def arguments(self) -> dict[str, object]:
        """Return a pipeline's call arguments."""
        name, every = ("prompt", self.prompt) if self.prompt else ("class_labels", self.classes)
        settings = self.settings()
        return {
            name: every or None,
            "guidance_scale": self.guidance,
            "temperature": self.temperature,
            "num_images_per_prompt": self.n,
            **{name: settings[name] for name in CALL if name in settings},
        }


@takes_records
def draw(options: DrawOptions) -> None:
    """Draw images from a prompt or a class, with or without speculation."""
    from PIL.PngImagePlugin import PngInfo

    terminal, out = Terminal(), options.out
    with terminal.working("loading"):
        from ragspec.visual import ImagePipeline

        o.silence_transformers()
        pipe = ImagePipeline.from_pretrained(
            options.source,
            options.drafters or None,
            options.rule or "auto",
            family=options.family,
            budget=None if options.budget is None else o.number_or_name(options.budget),
            **options.settings(*CALL),
        )
    if names := pipe.class_names:
        classes = [names[pipe.family.label_of(each)] for each in options.classes]
        options = replace(options, classes=classes)
    out.mkdir(parents=True, exist_ok=True)
    pipe.set_progress_bar_config(disable=not terminal.err.is_terminal, leave=False)
    seed = fresh_seed() if options.seed is None else options.seed
    described = describe_images(options, seed, pipe)
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
    subjects = [described[number].pop("subject") for number in sorted(paths)]
    figures |= {"images": images, "subjects": subjects, **described[0], "seed": seed}
    if options.json is not None:
        write_output(options.json, "the figures", json.dumps(figures, indent=1) + "\n")
    _print_figures(figures, out, terminal)


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


def describe_images(
    options: DrawOptions, seed: int, pipe: "ImagePipeline"
) -> list[dict[str, object]]:
    """Return the settings that determine each image, as JSON types."""
    record, family = pipe.record, pipe.family
    drafts = {name: record.pop(name, None) for name in ("drafter", "budget", "batch_size")}
    drafts |= {} if "auto" in options.drafters else {"drafter": options.drafter}
    usual = {"top_k": family.top_k} if family.top_k else {}
    common: dict[str, Any] = {
        "model": options.source,
        "family": next(name for name, each in entries("family") if each is type(family)),
        "rule": pipe.rule_name,
        "settings": {**usual, **record, **pipe.settings, **options.settings(*PLACE)},
        "guidance": family.guidance if options.guidance is None else options.guidance,
        "temperature": options.temperature,
        "dtype": str(pipe.dtype).removeprefix("torch."),
    }
    if pipe.rule_name != "exact" or common["dtype"] not in ("float32", "float64"):
        common |= drafts  # which change the image
    every = [subject for subject in options.subjects for _ in range(options.n)]
    return [{"subject": each, "seed": seed + n, **common} for n, each in enumerate(every)]


def _write_new(path: Path, others: Iterator[Path], contents: bytes) -> Path:
    """Write a file to a path, or to the next of the others that is free; return the path."""
    while True:
        try:
            file = path.open("xb")
        except FileExistsError:
            path = next(others)
            continue
        try:
            with file:
                file.write(contents)
        except BaseException:  # half a file would pass for a whole one
            path.unlink(missing_ok=True)
            raise
        return path


def _slug(text: str) -> str:
    """Return a text as part of a file name: letters and digits of any script, and hyphens."""
    return re.sub(r"[\W_]+", "-", text.lower()).strip("-")[:NAME_LETTERS].strip("-") or "image"
