"""`Family`: all that `ImagePipeline` needs to know about one kind of image model."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ragspec.drafters.base import Drafter
from ragspec.errors import InputError, TokenizerMismatchError
from ragspec.models.device import pick_device
from ragspec.reports.generation import Generation
from ragspec.rules.base import Rule, expect_rule
from ragspec.sampling.settings import whole
from ragspec.visual.call import ImageCall, ImageConfig
from ragspec.visual.checks import class_number
from ragspec.visual.loading import ImageFolder, expect_kind, kind_of_model, load_weights
from ragspec.visual.models.raster import Raster
from ragspec.visual.output import ImageSample, codes_of, samples_of
from ragspec.visual.rules.by_name import make_rule
from ragspec.visual.rules.tv_budget import Surprising
from ragspec.visual.run import Progress
from ragspec.visual.saved import relaxation_of

_ROUNDED = 0.01  # tolerance for means and deviations of the same latents, which are bfloat16


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
    model_class: ClassVar[Any]  # of its models, or the name of one of transformers
    guidance: ClassVar[float] = 2.0  # the default guidance_scale
    default_rule: ClassVar[str] = "exact"
    plain_rule: ClassVar[str | None] = None  # the name of drawing without the engine, if it does
    dtype: ClassVar[str] = "auto"
    nodes: ClassVar[int] = 12  # the default budget of draft nodes
    adaptive_budget: ClassVar[bool] = True  # whether a budget may depend on measured times
    batch_size: ClassVar[int] = 16
    options: ClassVar[frozenset[str]] = frozenset()  # further arguments of the constructor
    several_drafters: ClassVar[bool] = True
    any_size: ClassVar[bool] = False  # whether it draws images of any height and width
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
    def load(
        cls,
        folder: ImageFolder,
        device: torch.device,
        dtype: str | torch.dtype,
        options: dict[str, Any],
    ) -> tuple[Any, Any]:
        """Return the model and the tokenizer of a folder or a published file.

        Args:
            folder: Where they are.
            device, dtype: Of the models; dtype as in `pick_dtype`.
            options: Keywords of `from_pretrained`; those about loading are removed: tokenizer, an
                object to use in place of the folder's.

        Raises:
            ModelNotFoundError, UnsupportedModelError, ModelError: A part is missing or broken.
        """
        model = cls.load_model(folder.target, device, dtype)
        return model, options.pop("tokenizer", None) or cls.load_tokenizer(folder)

    @classmethod
    def load_tokenizer(cls, folder: ImageFolder) -> Any:
        """Return the tokenizer of a folder, or where it is.

        Raises:
            ModelNotFoundError, ModelError: It is missing or broken.
        """
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
        return load_weights(cls.kind, cls.model_class, folder, pick_device(device), dtype)

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
        passed = [name for name in ("prompt", "class_labels") if getattr(call, name) is not None]
        if passed != ([] if self.condition is None else [self.condition]):
            expected = self.condition or "none: the model draws without conditions"
            got = " and ".join(passed) or "nothing to draw"
            raise InputError(f"got {got}; expected {expected}.")
        if call.negative_prompt and self.condition != "prompt":
            raise InputError(
                "got a negative prompt for a model without prompts; expected none. Leave it out: "
                "guidance leads away from the model's own embedding of no condition."
            )

    def sized(self, height: int | None, width: int | None) -> Raster:
        """Return the grid of an image of this size in pixels.

        Raises:
            InputError: The model does not generate this size.
        """
        reduction, sides = int(self.codec.reduction), list(self.raster.shape)
        for axis, (name, pixels) in enumerate((("height", height), ("width", width))):
            if pixels is None:
                continue
            codes, rest = divmod(whole(pixels) or 0, reduction)
            if rest or codes < 1 or not (self.any_size or codes == sides[axis]):
                usual = f"{sides[axis] * reduction} pixels, for which the model was made"
                expected = f"a multiple of {reduction} pixels" if self.any_size else usual
                raise InputError(f"got {name}={pixels!r}; expected {expected}. Leave it out.")
            sides[axis] = codes
        return Raster(sides[0], sides[1], self.raster.ends)

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
    ) -> list[ImageSample]:
        """Return the images that the engine generated, and what became of the drafts."""
        return samples_of(generations, raster)

    def plain_samples(
        self, conditions: Any, config: ImageConfig, progress: Progress
    ) -> list[ImageSample]:
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

    def shared(self, model: Any) -> dict[str, Any]:
        """Return what a draft model must have in common with its target, by name."""
        return {}

    def check_draft(self, draft: Any) -> bool:
        """Return whether an object is a draft model of this family.

        Raises:
            TokenizerMismatchError: It is one, but for another target.
        """
        if (kind := kind_of_model(draft)) is None:
            return False
        if kind != self.kind:
            raise TokenizerMismatchError(
                f"got a draft model of type {kind!r}; expected {self.kind!r}, the target's. Draft "
                "with a smaller model of its kind."
            )
        results = self.shared(draft)
        for name, expected in self.shared(self.model).items():
            if not _same(expected, results[name]):
                raise TokenizerMismatchError(
                    f"got a draft model with {name} {reprlib.repr(results[name])}; expected "
                    f"{reprlib.repr(expected)}, the target's. Draft with a model that was trained "
                    f"on the same {self.unit} and conditions."
                )
        return True

    def model_drafter(self, draft: Any, target: Any, conditions: Any, settings: Any) -> Drafter:
        """Return a drafter that runs a smaller model under equal conditions and guidance.

        Args:
            draft: The smaller model.
            target, conditions: Of the call.
            settings: `PipelineOptions` with a mode.
        """
        from ragspec.drafters.model.drafter import ModelDrafter

        raster = target.raster or self.raster
        config = ImageConfig(target.guidance_scale, target.guidance_interval, raster)
        return ModelDrafter(
            self.open(draft, conditions, config),
            mode=settings.draft_mode,
            min_expected_gain=settings.min_expected_gain,
        )

    def jacobi_drafter(self, target: Any, settings: Any) -> Drafter:
        """Return a drafter from the target's last forward; see `model_drafter`."""
        from ragspec.visual.drafting.jacobi import JacobiDrafter

        coupled, raster = settings.draft_mode == "coupled", target.raster or self.raster
        end = target.vocab_size - 1 if raster.ends else None
        return JacobiDrafter(
            form="coupled" if coupled else "sampled",
            width=raster.line,
            branches=int(coupled),
            end=end,
        )


def _same(expected: Any, actual: Any) -> bool:
    """Return whether two values are equal; numbers that are not whole may be rounded."""
    if not isinstance(expected, float | list):
        return bool(expected == actual)
    same_shape = np.shape(expected) == np.shape(actual)
    return same_shape and np.allclose(actual, expected, _ROUNDED, _ROUNDED)


def without_settings(rule: Any, settings: dict[str, Any]) -> Rule:
    """Return a Rule; raise InputError for another object, or for settings beside it."""
    if settings:
        raise InputError(f"got a Rule and {', '.join(settings)}; expected settings by a name.")
    return expect_rule(rule)
