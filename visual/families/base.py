"""`Family`: all that `ImagePipeline` needs to know about one kind of image model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from ragspec.drafters.base import Drafter
from ragspec.errors import InputError, UnsupportedModelError
from ragspec.models.device import pick_device
from ragspec.registry import names, resolve
from ragspec.reports.generation import Generation
from ragspec.rules.base import Rule, expect_rule
from ragspec.visual.call import ImageCall
from ragspec.visual.checks import class_number
from ragspec.visual.loading import ImageFolder, load_weights, read_kind
from ragspec.visual.models.raster import Raster
from ragspec.visual.output import ImageSamples, codes_of, samples_of
from ragspec.visual.progress import Progress
from ragspec.visual.rules.by_name import make_rule
from ragspec.visual.rules.tv_budget import Surprising
from ragspec.visual.saved import relaxation_of


@dataclass(frozen=True, slots=True, eq=False)
class ImageConfig:
    """The settings of one call's target.

    Attributes:
        guidance_scale, guidance_interval: See `ImageTarget`.
        raster: The grid of codes.
        fixed: The fixed codes, as the first tokens of an image.
        rows: The number of the condition of each image.
        seeds: Of each image.
        temperature: Of the call.
    """

    guidance_scale: float
    guidance_interval: tuple[int, int] | None = None
    raster: Raster | None = None
    fixed: Tensor | None = None
    rows: Sequence[int] = ()
    seeds: Sequence[int] = ()
    temperature: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class ModelFiles:
    """The files from which a family loads.

    Attributes:
        folder: The parts of a folder, with a published file as `target` and nothing beside it.
        device, dtype: Of the models; dtype as in `pick_dtype`.
    """

    folder: ImageFolder
    device: torch.device
    dtype: str | torch.dtype

    @property
    def file(self) -> Path | None:
        """The published file; None for a folder."""
        return self.folder.target if self.folder.target.is_file() else None


class Family:
    """An image model with its tokenizer, grid, rules and drafters.

    A subclass names its models in `kind` and overrides what differs. `registry.NAMES` lists it.

    Args:
        model: The model, see `kind`.
        tokenizer: Of its codes, of its latents, or of its prompts.
        folder: Holds draft/, head/ and relaxation.json.

    Attributes:
        codec: Turns codes or latents into images; has `reduction`, `vocab_size` and `codebook`.
        raster: The grid of an image of the default size.
        class_names: Of all classes in order; empty if the model has none.

    Raises:
        UnsupportedModelError, TokenizerMismatchError: The parts do not fit.
    """

    kind: ClassVar[str]  # the model_type of its models
    guidance: ClassVar[float] = 2.0  # the default guidance_scale
    default_rule: ClassVar[str] = "exact"
    plain_rule: ClassVar[str | None] = None  # the name of drawing without the engine, if it does
    dtype: ClassVar[str] = "auto"
    nodes: ClassVar[int] = 12  # the default budget of draft nodes
    adaptive_budget: ClassVar[bool] = True  # whether a budget may depend on measured times
    batch_size: ClassVar[int] = 16
    options: ClassVar[frozenset[str]] = frozenset()  # further arguments of the constructor
    several_drafters: ClassVar[bool] = True
    unit: ClassVar[str] = "codes"  # what it generates, codes or latents
    condition: str | None = "prompt"  # or "class_labels", or None: what a call must have

    codec: Any
    raster: Raster
    class_names: tuple[str, ...] = ()
    text_encoder: Any = None

    def __init__(self, model: Any, tokenizer: Any, folder: ImageFolder | None = None) -> None:
        expect_kind(model, self.kind)
        self.model, self.tokenizer, self.folder = model, tokenizer, folder

    @classmethod
    def load(cls, files: ModelFiles, options: dict[str, Any]) -> tuple[Any, Any]:
        """Return the model and the tokenizer of a folder or a published file.

        Args:
            files: Where they are.
            options: Keywords of `from_pretrained`; those about loading are removed.

        Raises:
            ModelNotFoundError, UnsupportedModelError, ModelError: A part is missing or broken.
        """
        raise NotImplementedError

    @classmethod
    def model_class(cls) -> Any:
        """Return the class of the models, with transformers' `from_pretrained`."""
        raise NotImplementedError

    @classmethod
    def load_model(
        cls, folder: Path, device: str | torch.device = "auto", dtype: str | torch.dtype = "auto"
    ) -> Any:
        """Return the model of a folder, in eval mode on the device.

        Raises:
            ModelNotFoundError, UnsupportedModelError, ModelError: The folder holds no such model.
            InputError: The device or dtype is not available.
        """
        actual = read_kind(folder, cls.kind)
        if actual not in (None, cls.kind):
            raise UnsupportedModelError(
                f"{folder} is a {actual!r} model; expected {cls.kind!r}.{_advice(actual)}"
            )
        return load_weights(cls.model_class(), folder, pick_device(device), dtype)

    def save(self, root: Path, **options: Any) -> None:
        """Write the model and the tokenizer to a folder for `load`."""
        raise NotImplementedError

    @property
    def record(self) -> dict[str, Any]:
        """The further arguments of the constructor to save."""
        return {}

    @property
    def components(self) -> dict[str, Any]:
        """The parts that other pipelines may share."""
        return {"model": self.model, "tokenizer": self.tokenizer, "folder": self.folder}

    @property
    def trunk(self) -> Any:
        """The transformer that reads conditions, and codes or latents."""
        return self.model

    @property
    def modules(self) -> dict[str, Any]:
        """The torch modules beside the model, by name; they move, but keep their dtype."""
        vq = getattr(self.codec, "model", None)
        encoder = getattr(self.text_encoder, "model", None)
        parts = {"vq": vq, "text_encoder": encoder}
        return {name: part for name, part in parts.items() if isinstance(part, torch.nn.Module)}

    # What a call generates

    def check(self, call: ImageCall) -> None:
        """Raise InputError or ModelError for arguments that the family does not support."""

    def sized(self, height: int | None, width: int | None) -> Raster:
        """Return the grid of an image of this size in pixels.

        Raises:
            InputError: The model does not generate this size.
        """
        rows, line = self.raster.shape
        for pixels, codes, name in ((height, rows, "height"), (width, line, "width")):
            if pixels not in (None, codes * self.codec.reduction):
                raise InputError(
                    f"got {name}={pixels!r}; expected {codes * self.codec.reduction} pixels, for "
                    "which the model was made. Leave it out."
                )
        return self.raster

    def label_of(self, inputs: int | str) -> int:
        """Return the number of a class that is given by number or by name.

        Raises:
            InputError: The model has no such class.
        """
        return class_number(inputs, self.class_names, int(self.trunk.config.num_classes))

    def conditions(self, call: ImageCall, raster: Raster) -> Any:
        """Return the conditions of a call, one for each prompt or class.

        Raises:
            InputError: A prompt or a class is refused.
        """
        raise NotImplementedError

    def open(self, model: Any, conditions: Any, config: ImageConfig) -> Any:
        """Return a target of the engine over this model, or over a draft model."""
        raise NotImplementedError

    def prompts(self, target: Any, config: ImageConfig) -> list[list[int]]:
        """Return the prompt of each image."""
        return [target.prompt(row) for row in config.rows]

    def samples(
        self, generations: Sequence[Generation], target: Any, rule: Rule, raster: Raster
    ) -> ImageSamples:
        """Return what the engine generated, and what became of the drafts."""
        return samples_of(generations, raster)

    def plain_samples(
        self, conditions: Any, config: ImageConfig, progress: Progress
    ) -> ImageSamples:
        """Generate a batch without drafts and without the engine, if `plain_rule` has a name."""
        raise NotImplementedError

    def step_tensor(self, target: Any) -> tuple[str, Callable[[Tensor], Tensor]]:
        """Return the name of the callback's tensor, and what makes it of the tokens i64 [B, n]."""
        return "codes", torch.clone

    def values(self, target: Any, row: int, tokens: list[int], raster: Raster) -> Tensor:
        """Return the codes or latents [1, h, w, ...] of one complete image.

        Args:
            target: Of the call.
            row: The number of the image in it.
            tokens: Of the image.
            raster: Its grid.
        """
        return codes_of([tokens], raster)

    def pixels(self, codes: Tensor) -> Tensor:
        """Decode codes or latents [B, h, w, ...] into images f32 [B, 3, H, W] in [-1, 1]."""
        images: Tensor = self.codec.decode(codes)
        return images

    # Rules and drafters

    def make_rule(self, rule: str | Rule, settings: dict[str, Any]) -> tuple[Rule, dict[str, Any]]:
        """Return a rule and its settings; without any, those measured on the model apply.

        Raises:
            InputError: A Rule comes with settings, or the rule has no such setting.
            UnknownNameError: No rule has the name.
            ModelError: The file of measured settings cannot be read.
        """
        if not isinstance(rule, str):
            return without_settings(rule, settings), {}
        file = None if self.folder is None else self.folder.relaxation
        settings = settings or relaxation_of(file, rule)
        positions = self.raster.tokens
        codec, ends = self.codec, self.raster.ends
        return make_rule(
            rule,
            codec.codebook(),
            positions=positions,
            normalised=codec.normalised,
            marks=ends,
            **settings,
        ), settings

    def judging(self, rule: Rule) -> Rule:
        """Return the rule of a call, which also measures the NLL gap of each code."""
        return Surprising(rule)

    def settle(self, rule: Rule, drafter: Any, nodes: int) -> None:
        """Take note of the rule, the drafter (a `DraftSource`) and the draft nodes of a pipeline.

        Raises:
            InputError: They do not fit.
        """

    def usual_drafter(self, mode: str, named: bool) -> str | None:
        """Return the name of the drafter for "auto".

        Args:
            mode: How a draft model would draft.
            named: Whether the user named a rule.
        """
        return "jacobi" if mode in ("coupled", "sampled") else "model"

    def load_draft(self, path: Path) -> Any:
        """Return the draft model of a folder or a published file."""
        return self.load_model(path, self.model.device, self.model.dtype)

    def check_draft(self, draft: Any) -> bool:
        """Return whether an object is a draft model of this family.

        Raises:
            TokenizerMismatchError, InputError: It is one, but for another target.
        """
        raise NotImplementedError

    def model_drafter(self, draft: Any, target: Any, conditions: Any, settings: Any) -> Drafter:
        """Return a drafter that runs a smaller model under equal conditions and guidance.

        Args:
            draft: The smaller model.
            target, conditions: Of the call.
            settings: A `DraftSettings`.
        """
        from ragspec.drafters.model.drafter import ModelDrafter

        config = ImageConfig(target.guidance_scale, target.guidance_interval, target.raster)
        return ModelDrafter(
            self.open(draft, conditions, config),
            mode=settings.mode,
            min_expected_gain=settings.min_expected_gain,
        )

    def check_jacobi(self, settings: Any) -> None:
        """Raise InputError if the rule needs other drafts than those of the target's own noise."""
        if settings.mode not in ("coupled", "sampled"):
            raise InputError(
                f"got drafter 'jacobi' where {settings.mode} drafts are needed; expected 'model' "
                "or 'head'. Use one of them, another rule, or no tv_budget."
            )

    def jacobi_drafter(self, target: Any, settings: Any) -> Drafter:
        """Return a drafter from the target's last forward; see `model_drafter`."""
        from ragspec.visual.drafting.jacobi import JacobiDrafter

        coupled, raster = settings.mode == "coupled", target.raster or self.raster
        end = target.vocab_size - 1 if raster.ends else None
        return JacobiDrafter(
            form="coupled" if coupled else "sampled",
            width=raster.line,
            branches=int(coupled),
            end=end,
        )


def without_settings(rule: Any, settings: dict[str, Any]) -> Rule:
    """Return a Rule; raise InputError for another object, or for settings beside it."""
    if settings:
        raise InputError(f"got a Rule and {', '.join(settings)}; expected settings by a name.")
    return expect_rule(rule)


def expect_kind(model: Any, kind: str) -> None:
    """Raise UnsupportedModelError for a model of another kind; the message names its family."""
    actual = kind_of_model(model)
    if actual != kind:
        raise UnsupportedModelError(
            f"got a {type(model).__name__} of type {actual!r}; expected {kind!r}.{_advice(actual)}"
        )


def kind_of_model(model: Any) -> Any:
    """Return the model_type of a model; None for other objects, targets among them."""
    if not isinstance(model, torch.nn.Module):
        return None
    return getattr(getattr(model, "config", None), "model_type", None)


def family_of(kind: Any, described: str) -> type[Family]:
    """Return the family of models of a model_type.

    Args:
        kind: The model_type.
        described: What was given, for the message.

    Raises:
        UnsupportedModelError: No family has it.
    """
    for name in reversed(list(names("family"))):  # those of other packages last
        family: type[Family] = resolve("family", name)
        if family.kind == kind:
            return family
    raise UnsupportedModelError(
        f"got {described}; expected an image model of one of the families "
        f"{', '.join(names('family'))}. Give the model itself, and its tokenizer."
    )


def _advice(kind: Any) -> str:
    every = {resolve("family", name).kind: name for name in names("family")}
    return f" Use family={every[kind]!r}." if kind in every else ""
