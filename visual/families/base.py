"""`Family`: all that `ImagePipeline` needs to know about one kind of image model."""

import logging
import reprlib
from collections.abc import Sequence, Sized
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import torch
import transformers
from torch import Tensor

from ragspec.drafters.base import Drafter
from ragspec.drafters.heads.head import DraftHead
from ragspec.errors import InputError, ModelError, TokenizerMismatchError, UnsupportedModelError
from ragspec.models.device import AnyDevice, AnyDtype, pick_device, pick_dtype
from ragspec.reports.generation import Generation
from ragspec.rules.base import Rule
from ragspec.sampling.settings import whole
from ragspec.types import PreTrainedModel
from ragspec.verification.causal import CausalTarget
from ragspec.visual import loading
from ragspec.visual.call import ImageCall, ImageConfig, PipelineOptions, some
from ragspec.visual.checks import class_number
from ragspec.visual.models.raster import Raster
from ragspec.visual.output import ImageSample, codes_of, samples_of
from ragspec.visual.rules.by_name import make_rule

_ROUNDED = 0.01  # tolerance for means and deviations of the same latents, which are bfloat16


class Family:
    """An image model with its tokenizer, grid, rules and drafters.

    A subclass names its models in `kind` and overrides what differs. `registry.NAMES` lists it.

    Args:
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
    model_class: ClassVar[type[PreTrainedModel] | str]  # of its models, or a name in transformers
    guidance: ClassVar[float] = 2.0  # the default guidance_scale
    top_k: int = 0  # the default top_k, 0 for all codes
    default_rule: ClassVar[str] = "exact"
    plain_rule: ClassVar[str | None] = None  # the name of drawing by `plain_samples`, if it does
    dtype: ClassVar[str] = "auto"
    nodes: int = 12  # the budget of draft nodes; the default one before `settle`
    adaptive_budget: ClassVar[bool] = True  # whether a budget may depend on measured times
    batch_size: ClassVar[int] = 16
    options: ClassVar[frozenset[str]] = frozenset()  # further arguments of the constructor
    step: int = 0  # codes, of which the sides of images are multiples; 0 for images of one size
    unit: ClassVar[str] = "codes"  # what it generates, codes or latents
    unsupported: ClassVar[dict[str, str]] = {}  # arguments of a call, each with the reason
    condition: str | None = "prompt"  # or "class_labels", or None: what a call must have

    codec: Any
    tokenizer: Any
    raster: Raster
    class_names: tuple[str, ...] = ()
    text_encoder: Any = None

    def __init__(
        self, model: PreTrainedModel, tokenizer: object, folder: loading.ImageFolder | None = None
    ) -> None:
        loading.expect_kind(model, self.kind)
        self.model, self.tokenizer, self.folder = model, tokenizer, folder

    @classmethod
    def load(
        cls,
        folder: loading.ImageFolder,
        device: torch.device,
        dtype: AnyDtype,
        options: dict[str, object],
    ) -> tuple[PreTrainedModel, object]:
        """Return the model and the tokenizer of a folder or a published file.

        Args:
            device, dtype: Of the models; dtype as in `pick_dtype`.
            options: Keywords of `from_pretrained`; those about loading are removed: tokenizer, an
                object to use in place of the folder's.

        Raises:
            MissingModelError, UnsupportedModelError, ModelError: A part is missing or broken.
        """
        model = cls.load_model(folder.target, device, dtype)
        return model, options.pop("tokenizer", None) or cls.load_tokenizer(folder)

    @classmethod
    def load_tokenizer(cls, folder: loading.ImageFolder) -> object:
        """Return the tokenizer of a folder, or where it is; see `load`."""
        raise NotImplementedError

    @classmethod
    def load_model(
        cls, folder: Path, device: AnyDevice = "auto", dtype: AnyDtype = "auto"
    ) -> PreTrainedModel:
        """Return the model of a folder, in eval mode on the device.

        Raises:
            MissingModelError, UnsupportedModelError, ModelError: The folder holds no such model.
            InputError: The device or dtype is not available.
        """
        place, actual = pick_device(device), loading.read_kind(folder, f"a {cls.kind!r} model")
        if actual not in (None, cls.kind):
            raise UnsupportedModelError(
                f"{folder} is a {actual!r} model; expected {cls.kind!r}.{loading.advice(actual)}"
            )
        kind = cls.model_class
        loader = getattr(transformers, kind) if isinstance(kind, str) else kind
        subject = f"{folder} does not load as a {loader.__name__}"
        expected = "what its save_pretrained wrote. Copy it again."
        with loading.expect_readable(subject, expected), ExitStack() as stack:
            report, nothing = logging.getLogger("transformers.modeling_utils"), logging.Filter("-")
            stack.callback(report.removeFilter, nothing)
            report.addFilter(nothing)  # it would name weights that `complete` converts
            model, info = loader.from_pretrained(
                folder,
                dtype=pick_dtype(dtype, place),
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
            missing = {*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])}
            missing = cls.complete(model, folder, missing)
        if missing:  # transformers would use random ones
            why = f"lacks the weights {', '.join(sorted(missing)[:3])}, or has them in other sizes"
            raise ModelError(f"{folder} {why}; expected all. Copy it again.")
        model = model.to(place).eval()
        for each in model.parameters():  # mapped files lack alignment, which affects rounding
            if each.data_ptr() % 64:
                each.data = each.data.clone()
        return model

    @classmethod
    def complete(cls, model: PreTrainedModel, folder: Path, missing: set[str]) -> set[str]:
        """Convert weights that a folder has in another layout; return those still missing."""
        return missing

    def save(self, root: Path, **options: object) -> None:
        """Write the model and the tokenizer to a folder for `load`."""
        self.model.save_pretrained(root, **options)
        self.tokenizer.save_pretrained(root)

    @property
    def record(self) -> dict[str, object]:
        """The further arguments of the constructor to save."""
        return {}

    @property
    def components(self) -> dict[str, object]:
        """The parts that other pipelines may share."""
        return {"model": self.model, "tokenizer": self.tokenizer, "folder": self.folder}

    @property
    def trunk(self) -> PreTrainedModel:
        """The transformer that reads conditions, and codes or latents."""
        return self.model

    @property
    def modules(self) -> list[torch.nn.Module]:
        """The torch modules beside the model; they move, but keep their dtype."""
        parts = (getattr(part, "model", None) for part in (self.codec, self.text_encoder))
        return [part for part in parts if isinstance(part, torch.nn.Module)]

    # The images of a call

    def check(self, call: ImageCall) -> None:
        """Raise InputError or ModelError for arguments that the family does not support."""
        passed = [name for name in ("prompt", "class_labels") if getattr(call, name) is not None]
        if passed != ([] if self.condition is None else [self.condition]):
            expected = self.condition or "none: the model draws without conditions"
            got = " and ".join(passed) or "nothing to draw"
            raise InputError(f"got {got}; expected {expected}.")
        usual = ImageCall(top_k=0, guidance_scale=1.0)  # which have no effect
        for name, reason in self.unsupported.items():
            value, off = getattr(call, name), getattr(usual, name)
            if value is not None and (many := some(value, 0)) != [off] * max(1, len(many)):
                raise InputError(f"got {name}={value!r}; {reason}")
        if call.negative_prompt and self.condition != "prompt":
            raise InputError(
                "got negative_prompt for a model without prompts; expected none. Leave it out: "
                "guidance leads away from the model's own embedding of no condition."
            )

    def sized(self, height: int | None, width: int | None) -> Raster:
        """Return the grid of an image of this size in pixels; raise InputError if there is none."""
        reduction, sides = int(self.codec.reduction), list(self.raster.shape)
        for axis, (name, pixels) in enumerate((("height", height), ("width", width))):
            if pixels is None:
                continue
            codes, rest = divmod(whole(pixels) or 0, reduction)
            if rest or codes < 1 or (codes % self.step if self.step else codes != sides[axis]):
                usual = f"{sides[axis] * reduction} pixels, for which the model was made"
                expected = f"a multiple of {reduction * self.step} pixels" if self.step else usual
                raise InputError(f"got {name}={pixels!r}; expected {expected}. Leave it out.")
            sides[axis] = codes
        return Raster(sides[0], sides[1], self.raster.ends)

    def label_of(self, inputs: int | str) -> int:
        """Return the number of a class by its number or name; raise InputError if there is none."""
        return class_number(inputs, self.class_names, int(self.trunk.config.num_classes))

    def conditions(self, call: ImageCall, raster: Raster) -> Sized:
        """Return a condition for each prompt or class; raise InputError for one that is refused."""
        raise NotImplementedError

    def open(self, model: PreTrainedModel, conditions: Any, config: ImageConfig) -> CausalTarget:
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

    def step_values(self, target: Any, tokens: Tensor) -> Tensor:
        """Return the codes or latents of the tokens i64 [B, n] so far, -1 for missing ones."""
        return tokens.clone()

    def values(self, target: Any, row: int, tokens: list[int], raster: Raster) -> Tensor:
        """Return the codes or latents [h, w, ...] of the image of a row."""
        return codes_of(tokens, raster)

    def pixels(self, codes: Tensor) -> Tensor:
        """Decode codes or latents [B, h, w, ...] into images f32 [B, 3, H, W] in [-1, 1]."""
        return cast(Tensor, self.codec.decode(codes))

    # Rules and drafters

    def make_rule(self, rule: str, settings: dict[str, Any]) -> tuple[Rule, dict[str, Any]]:
        """Return a rule by name and its settings; without any, those measured on the model apply.

        Raises:
            InputError: The rule has no such setting.
            UnknownNameError: No rule has the name.
            ModelError: The file of measured settings cannot be read.
        """
        file = None if self.folder is None else self.folder.relaxation
        settings = settings or loading.relaxation_of(file, rule)
        grid, codec = self.raster, self.codec
        sizes = {"positions": grid.tokens, "marks": grid.ends, "normalised": codec.normalised}
        return make_rule(rule, codec.codebook(), **sizes, **settings), settings

    def settle(self, rule: Rule, drafter: str | None, nodes: int) -> None:
        """Prepare for rule, drafter (by name) and draft nodes; raise InputError for a misfit."""
        self.nodes = nodes

    def usual_drafter(self, mode: str, named: bool) -> str | None:
        """Return the name of the drafter for "auto"; `named` says whether the user named a rule."""
        return "jacobi" if mode in ("coupled", "sampled") else "model"

    def load_draft(self, path: Path) -> PreTrainedModel:
        """Return the draft model of a folder or a published file."""
        return self.load_model(path, self.model.device, self.model.dtype)

    def shared(self, model: PreTrainedModel) -> dict[str, object]:
        """Return what a draft model must have in common with its target, by name."""
        return {}

    def check_draft(self, draft: object) -> bool:
        """Tell draft models from others; raise TokenizerMismatchError for one of another target."""
        if (kind := loading.kind_of_model(draft)) is None:
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

    def make_drafter(
        self, draft: Any, target: Any, conditions: Any, settings: PipelineOptions
    ) -> Drafter:
        """Return a drafter that runs a draft model under equal conditions and guidance.

        Args:
            draft: The model; None drafts from the target's last forward, which is "jacobi".
        """
        mode, raster = settings.draft_mode, target.raster or self.raster
        if draft is None:
            from ragspec.visual.drafting.jacobi import JacobiDrafter

            end, branches = target.vocab_size - 1 if raster.ends else None, int(mode == "coupled")
            return JacobiDrafter(form=mode, width=raster.line, branches=branches, end=end)
        from ragspec.drafters.model.drafter import ModelDrafter

        config = ImageConfig(target.guidance_scale, target.guidance_interval, raster)
        smaller, gain = self.open(draft, conditions, config), settings.min_expected_gain
        return ModelDrafter(smaller, mode=mode, min_expected_gain=gain)


@dataclass(frozen=True, slots=True, eq=False)
class DraftSource:
    """Creates the drafters of each call, which the engine fuses.

    Attributes:
        parts: The name and the object of each: a draft model, a head, a drafter, or None for the
            target's last forward ("jacobi").
        settings: How a model or a head drafts.
    """

    parts: Sequence[tuple[str, object]]
    family: Family
    settings: PipelineOptions

    @property
    def name(self) -> str | None:
        """The drafter's name, several joined by "+"; None for plain decoding."""
        return "+".join(name for name, _ in self.parts) or None

    def first(self, name: str) -> object:
        """Return the first draft model ("model") or draft head ("head"); None without one."""
        parts = (part for each, part in self.parts if each == name)
        return next((part for part in parts if not isinstance(part, Drafter)), None)

    def make(self, target: CausalTarget, conditions: object) -> list[Drafter]:
        """Return the drafters for a target and its conditions."""
        return [self._drafter(part, target, conditions) for _, part in self.parts]

    def _drafter(self, part: object, target: CausalTarget, conditions: object) -> Drafter:
        if isinstance(part, Drafter):
            return part
        if isinstance(part, DraftHead):
            from ragspec.drafters.heads.drafter import HeadDrafter

            mode, gain = self.settings.draft_mode, self.settings.min_expected_gain
            return HeadDrafter(part, target, mode=mode, min_expected_gain=gain)
        return self.family.make_drafter(part, target, conditions, self.settings)


def _same(expected: object, actual: object) -> bool:
    """Return whether two values are equal; numbers that are not whole may be rounded."""
    if not isinstance(expected, float | list):
        return bool(expected == actual)
    first, second = np.asarray(expected), np.asarray(actual)
    return first.shape == second.shape and np.allclose(second, first, _ROUNDED, _ROUNDED)
