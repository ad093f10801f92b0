"""What `ragspec draw` was asked for, checked before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragspec.errors import InputError

if TYPE_CHECKING:
    import torch

    from ragspec.pipelines.cli.kept_codes import Kept

_LEAST_SEED, _MOST_SEED = -(2**63), 2**64 - 1  # of a torch generator


@dataclass(frozen=True, slots=True)
class Asked:
    """What is to be drawn, and how; settings are those of the rule, None where not given.

    rule: None until it is known what draws. rules: the columns of a sheet. image, mask: a picture
    of which a part is kept. kept: what of it is, once that is known.
    """

    prompts: tuple[str, ...]
    classes: tuple[str, ...]
    image_set: str | None
    model: str | None
    drafter: tuple[str, ...]
    rule: str | None
    settings: Mapping[str, Any]
    budget: str | int
    count: int
    seed: int | None
    guidance: float
    temperature: float
    top_k: int
    device: str
    dtype: str
    rules: tuple[str, ...] = ()
    image: Path | None = None
    mask: Path | None = None
    kept: Kept | None = None

    def source(self) -> str:
        """Return the set or folder to draw with; raises InputError for contradictions."""
        if bool(self.prompts) == bool(self.classes):
            got = "both" if self.prompts else "neither a prompt nor --class"
            raise InputError(f"got {got}; expected a prompt such as 'red heart', or --class 3.")
        if self.image_set is not None and self.model is not None:
            raise InputError("got --set and --model; expected one of them.")
        return self.model or self.image_set or ("tiles" if self.classes else "emoji")

    def check(self) -> None:
        """Raise InputError, before any work, for contradictions and values out of range."""
        self.source()
        if self.seed is not None and not _LEAST_SEED <= self.seed <= _MOST_SEED:
            raise InputError(
                f"--seed is {self.seed}; expected a whole number of 64 bits, "
                f"{_LEAST_SEED} to {_MOST_SEED}."
            )
        if {"", "none"} & set(self.drafter):
            raise InputError(
                f"got --drafter {'+'.join(self.drafter)!r}; expected auto, starter, head, jacobi "
                "or a folder, several joined by +, or none by itself."
            )
        if (self.image is None) != (self.mask is None):
            got, other = ("--image", "--mask") if self.mask is None else ("--mask", "--image")
            raise InputError(f"got {got} alone; expected {other} with it: see draw --help.")
        for path in (self.image, self.mask):
            if path is not None and not path.is_file():
                raise InputError(f"there is no file {path}; expected a picture such as a PNG.")

    def check_kind(self, classes: bool) -> None:
        """Raise InputError for a prompt where the model draws classes, and the other way round."""
        if classes and not self.classes:
            raise InputError(
                f"got the prompt {self.prompts[0]!r}, but {self.source()} draws classes; expected "
                "--class with a number or a name, or --set emoji, which reads prompts."
            )
        if self.classes and not classes:
            raise InputError(
                f"got --class {self.classes[0]}, but {self.source()} reads prompts; expected one "
                "such as 'red heart', or --set tiles, which draws classes."
            )

    @property
    def subjects(self) -> list[str]:
        """What is drawn, in words, one after the other."""
        if self.prompts:
            return list(self.prompts)
        return [f"class {name}" if name.strip().isdecimal() else name for name in self.classes]

    @property
    def subject(self) -> str:
        """All that is drawn, in words."""
        return ", ".join(self.subjects)

    def named(self, names: Sequence[str], number: Callable[[str], int]) -> Asked:
        """Return the same with classes by name, where the model has names."""
        return replace(self, classes=tuple(names[number(each)] for each in self.classes))

    def given(self) -> dict[str, Any]:
        """Return the settings of the rule that were given."""
        return {name: value for name, value in self.settings.items() if value is not None}

    def rule_told(self) -> str:
        """Return the rule with its settings, for people."""
        given = ", ".join(f"{name} {value:g}" for name, value in self.given().items())
        return f"{self.rule} ({given})" if given else str(self.rule)

    def arguments(self, subject: int | None = None) -> dict[str, Any]:
        """Return what a pipeline is called with for all images, or for one of subject number."""
        name, every = ("prompt", self.prompts) if self.prompts else ("class_labels", self.classes)
        given: dict[str, Any] = {
            name: list(every if subject is None else every[subject : subject + 1]),
            "guidance_scale": self.guidance,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "num_images_per_prompt": self.count if subject is None else 1,
        }
        return given if self.kept is None else {**given, "codes": self.kept.codes}


def generator(seed: int) -> torch.Generator:
    """Return what seeds are drawn from."""
    import torch

    return torch.Generator().manual_seed(seed)
