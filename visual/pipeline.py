"""`ImagePipeline`: images of every family, with the calling conventions of diffusers.

The engine generates the codes of an image as it generates text. Each image has a seed of its own.
Model, condition, settings and seed alone determine an image: under an exact rule it is the same
with and without a drafter.
"""

import json
import shutil
import tempfile
import warnings
from collections.abc import Sequence
from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor

from ragspec.budget.base import FixedBudget
from ragspec.budget.goodput import AutoBudget, make_budget
from ragspec.drafters.heads.head import DraftHead
from ragspec.errors import InputError
from ragspec.models.device import as_loaded, pick_device
from ragspec.models.load import with_adapter
from ragspec.rules.base import Rule, expect_rule
from ragspec.rules.walk import Walk
from ragspec.sampling.settings import checked_count, plain_value
from ragspec.trees.draft_tree import DraftKind
from ragspec.types import PreTrainedModel
from ragspec.visual import loading
from ragspec.visual.call import ImageCall, PipelineOptions, check_output_type
from ragspec.visual.checks import check_finite, check_mode
from ragspec.visual.choice import choose_drafter, family_of, mode_for
from ragspec.visual.families.base import Family
from ragspec.visual.output import ImageOutput, ImageSample, ImageStats, as_images, weakest
from ragspec.visual.run import CallState


class ImagePipeline:
    """Generates images with an autoregressive image model, with or without speculation.

    Args:
        model: A model of one of the families in `ragspec.visual.families`, also with adapters.
        tokenizer: What belongs to it: the tokenizer of its codes or latents, or, for models of
            transformers, the processor or tokenizer of its prompts.
        drafter: See `choose_drafter`.
        rule: A Rule, or a name and its settings (neighbours, delta, lam, tv_budget, r, s, ...), see
            `make_rule` and `make_latent_rule`. "auto" is the family's usual rule. Without settings,
            those measured on this model apply, see `relaxation_of`.
        family: A `Family` class or its name; None finds it by the model.
        folder: Holds the drafters "model" and "head".
        settings: Of the rule; the fields of `PipelineOptions`; and the arguments of the family,
            such as text_encoder, vq, steps, iterations. Numbers may be NumPy's or torch's.

    Attributes:
        model, tokenizer, folder: As passed, the model without the wrapper of peft.
        draft: The draft model; None without one.
        class_names: Of all classes in order; empty if the model has none.

    Raises:
        UnsupportedModelError, TokenizerMismatchError: The models do not fit.
        MissingModelError: A model is missing.
        UnknownNameError, InputError, RuleError: An argument is refused.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any = None,
        drafter: object = None,
        rule: str | Rule = loading.AUTO,
        *,
        family: type[Family] | str | None = None,
        folder: loading.ImageFolder | None = None,
        **settings: Any,
    ) -> None:
        self._adapted = hasattr(model, "peft_config")
        if hasattr(model, "get_base_model"):
            model = model.get_base_model()  # whose layers are those with adapters
        kind = family_of(family, loading.kind_of_model(model), f"a {type(model).__name__}")
        settings = {name: plain_value(value) for name, value in settings.items()}
        more = {name: settings.pop(name) for name in kind.options if name in settings}
        names = {field.name for field in fields(PipelineOptions)}
        options = PipelineOptions(**{name: settings.pop(name) for name in names & settings.keys()})
        self.family: Any = kind(model, tokenizer, folder, **more)
        self.model, self.tokenizer, self.folder = model, tokenizer, folder
        self.class_names: tuple[str, ...] = self.family.class_names
        self.batch_size = checked_count(
            kind.batch_size if options.batch_size is None else options.batch_size, "batch_size"
        )
        policy = make_budget(kind.nodes if options.budget is None else options.budget)
        nodes = policy.nodes if isinstance(policy, FixedBudget) else kind.nodes
        self.budget = policy if kind.adaptive_budget else make_budget(nodes)
        named = not (isinstance(rule, str) and rule == loading.AUTO)
        rule = rule if named else kind.default_rule
        self.rule: Rule
        if isinstance(rule, str):
            self.rule, self.settings = self.family.make_rule(rule, settings)
        elif settings:
            raise InputError(f"got a Rule and {', '.join(settings)}; expected settings by a name.")
        else:
            self.rule, self.settings = expect_rule(rule), settings
        self._saved_rule = rule if isinstance(rule, str) else None
        chosen = replace(options, draft_mode=mode_for(self.rule, options.draft_mode))
        self.source = choose_drafter(drafter, self.family, chosen, named)
        n, joined = len(self.source.parts), (DraftKind.COUPLED, DraftKind.DETERMINISTIC)
        if n > 1 and self.rule.accepts.isdisjoint(joined):  # it cannot judge their one tree
            raise InputError(
                f"got {n} drafters under rule {self.rule.name!r}; expected one, or rule='exact'."
            )
        self.draft: Any = self.source.first(loading.MODEL)
        self.family.settle(self.rule, self.source.name, nodes)
        plain = kind.plain_rule if self.source.name is None else None
        self.rule_name = plain or self._saved_rule or self.rule.name
        self._options, self._bar = options, dict[str, Any]()

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path = "tiles",
        drafter: object = loading.AUTO,
        rule: str | Rule = loading.AUTO,
        *,
        family: type[Family] | str | None = None,
        device: str | torch.device = "auto",
        dtype: str | torch.dtype | None = None,
        **settings: Any,
    ) -> Self:
        """Return a pipeline over a bundled set, a folder, a model id or a published file.

        Args:
            name: A bundled set ("tiles", "emoji", "latent-tiles", ...), a folder, a model id, or a
                published file, for which `family` is required.
            drafter: See `choose_drafter`; "auto" is the saved one, or the family's usual one.
            rule: "auto" takes the rule that the folder was saved with, else the family's. With it
                come the saved settings.
            device, dtype: Of the models; dtype also as torch_dtype.
            settings: See `ImagePipeline`; `lora`, the folder of an adapter saved by peft, which is
                merged; `local_files_only`; and the options of the family's `load`, such as
                `tokenizer`.

        Raises:
            ModelError: A model or the saved settings do not load; further errors as the class.
        """
        dtype = settings.pop("torch_dtype", None) or dtype
        lora = settings.pop("lora", None)
        folder = loading.find_folder(name, bool(settings.pop("local_files_only", False)))
        if family is None and folder.target.is_file():
            raise InputError(
                f"got the file {folder.target.name} without a family; expected family='llamagen' "
                "or family='mar' beside a published file."
            )
        drafter, rule, settings = loading.as_saved(folder.index, drafter, rule, settings)
        model_type = None if folder.target.is_file() else loading.read_kind(folder.target)
        kind = family_of(family, model_type, f"{folder.target}, no image model")
        if dtype is None or dtype == loading.AUTO:
            dtype = kind.dtype
        model, tokenizer = kind.load(folder, pick_device(device), dtype, settings)
        if lora is not None:
            model = with_adapter(model, lora).eval()
        beside = None if folder.target.is_file() else folder
        return cls(model, tokenizer, drafter, rule, family=kind, folder=beside, **settings)

    # The parts

    @property
    def components(self) -> dict[str, Any]:
        """The parts that other pipelines may share: `ImagePipeline(**pipe.components)`."""
        return {**self.family.components, "family": type(self.family)}

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return torch.device(self.model.device)

    @property
    def dtype(self) -> torch.dtype:
        """The model's dtype."""
        return cast(torch.dtype, self.model.dtype)

    def to(self, *args: object, **kwargs: object) -> Self:
        """Move all models to a device, and target and draft model to a dtype."""
        for module in (self.model, self.draft):
            if module is not None:
                module.to(*args, **kwargs)
        for module in self.family.modules:
            module.to(self.device)
        return self

    def save_pretrained(self, save_directory: str | Path, **options: object) -> None:
        """Write all models and settings to a folder for `from_pretrained`.

        If the pipeline uses no other draft model or head, those beside the target are copied. The
        folder is changed only once all is written, so it may be the one that was loaded.

        Args:
            save_directory: A new folder, or one with a saved pipeline, which is replaced.
            options: Of transformers' `save_pretrained`, such as max_shard_size.

        Raises:
            InputError: The model has adapters of peft, or the folder has others' files or cannot
                be written.
        """
        if self._adapted:
            raise InputError(
                "got a model that peft wraps; expected merged weights to save. Use "
                "model.merge_and_unload(), or save the adapter with model.save_pretrained()."
            )
        try:
            self._write(Path(save_directory), options)
        except (OSError, SafetensorError) as error:  # the latter for a full disk
            raise InputError(
                f"the pipeline cannot be saved in {save_directory} ({error}); expected a folder "
                "that can be written, on a disk with room. Choose another one."
            ) from error

    def _write(self, root: Path, options: dict[str, object]) -> None:
        folder = self.folder
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root) as name:
            new = Path(name)
            self.family.save(new, **options)
            if self.draft is not None:
                self.draft.save_pretrained(new / "draft", **options)
            if isinstance(head := self.source.first(loading.HEAD), DraftHead):
                from ragspec.drafters.heads.files import save_head

                save_head(head, new / "head")
            for part in () if folder is None else (folder.draft, folder.head, folder.relaxation):
                if part is not None and not (new / part.name).exists():
                    copy = shutil.copytree if part.is_dir() else shutil.copyfile
                    copy(part, new / part.name)
            record, plain = self.record, bool | int | float | str | None
            named = self._saved_rule is not None
            if named and all(isinstance(value, plain) for value in self.settings.values()):
                record["rule"] = {"name": self._saved_rule, **self.settings}
            else:
                warnings.warn(
                    "the rule is an object, which is not saved: the loaded pipeline will draw by "
                    "the default rule. Name the rule and its numbers to keep them.",
                    stacklevel=3,
                )
            text = json.dumps(record, indent=2, sort_keys=True) + "\n"
            (new / loading.SETUP).write_text(text, encoding="utf-8")
            paths = sorted(new.iterdir())
            taken = [path.name for path in paths if (root / path.name).is_dir()]
            sources = () if folder is None else (folder.target, folder.target.parent)
            loaded = root.resolve() in [each.resolve() for each in sources]
            if taken and not loaded and not (root / loading.SETUP).is_file():
                raise InputError(
                    f"{root} has {', '.join(taken)} and no {loading.SETUP}; expected a new folder, "
                    "or one that save_pretrained wrote, as these are replaced. Name another folder."
                )
            others = not loaded and (root / loading.SETUP).is_file()
            replaced = [*taken, *loading.PARTS] if others else taken
            for old in [*root.iterdir()]:
                if any(map(old.match, replaced)):
                    shutil.rmtree(old) if old.is_dir() and not old.is_symlink() else old.unlink()
            for path in paths:
                path.replace(root / path.name)

    @property
    def record(self) -> dict[str, object]:
        """The settings to save beside the rule."""
        budget: Any = loading.AUTO if isinstance(self.budget, AutoBudget) else None
        name = self.source.name or loading.NONE
        record = {
            **self.family.record,
            "drafter": name if set(name.split("+")) <= set(loading.NAMES) else None,
            "budget": self.budget.nodes if isinstance(self.budget, FixedBudget) else budget,
            "batch_size": self.batch_size,
            "draft_mode": self._options.draft_mode,
            "min_expected_gain": self._options.min_expected_gain,
        }
        return {key: value for key, value in record.items() if value is not None}

    def set_progress_bar_config(self, **config: object) -> None:
        """Set the arguments of the progress bar, such as disable=True."""
        self._bar = config

    # Calls

    def __call__(self, prompt: Any = None, class_labels: Any = None, **others: Any) -> ImageOutput:
        """Generate images.

        Args:
            prompt, class_labels: What to draw, see `ImageCall`.
            others: The other fields of `ImageCall`: seed, generator, guidance_scale, ...

        Raises:
            InputError, SamplingError, PromptTooLongError, ModelError: An argument is refused.
        """
        from tqdm.auto import tqdm  # type: ignore[import-untyped, unused-ignore]

        call = ImageCall.of({"prompt": prompt, "class_labels": class_labels, **others})
        self.family.check(call)
        for model in (self.model, self.draft, *self.family.modules):
            if model is not None:
                check_mode(model)
        raster = self.family.sized(call.height, call.width)
        conditions = self.family.conditions(call, raster)
        rows = [row for row in range(len(conditions)) for _ in range(call.num_images_per_prompt)]
        seeds, scales = call.seeds(len(rows)), call.scales(self.family.guidance, len(rows))
        progress_bar = tqdm(total=len(rows) * raster.tokens, **self._bar)
        # Later passes write to tensors of this call, perhaps in another mode than the caller's.
        mode = torch.inference_mode(False)
        with closing(progress_bar) as bar, as_loaded(self.device), mode, torch.no_grad():
            state = CallState(self, call, conditions, raster, len(rows), bar)
            return self._output(state.generate(rows, seeds, scales), seeds, state)

    def _output(
        self, samples: Sequence[ImageSample], seeds: Sequence[int], state: CallState
    ) -> ImageOutput:
        values = torch.stack([each.values for each in samples])
        latents = values if self.family.unit == "latents" else None
        if latents is not None:
            check_finite(latents, "the image model returned latents")
        # A budget that depends on time changes the drafts, and an inexact rule then the image.
        exact = self.source.name is None or self.rule.label == Walk.label
        repeatable = exact or isinstance(self.budget, FixedBudget)
        if state.call.output_type == "pil" and len(state.images) == len(seeds):
            pictures: Any = [state.images[number] for number in range(len(seeds))]
        else:
            pictures = self.decode(values, state.call.output_type)
        call = {"seconds": state.seconds, "seeds": tuple(seeds), "repeatable": repeatable}
        return ImageOutput(
            images=pictures,
            stats=ImageStats.of(samples, **call),
            acceptance_map=np.stack([each.map for each in samples]),
            label=weakest([each.label for each in samples]),
            codes=values if latents is None else None,
            latents=latents,
        )

    def decode(self, codes: Tensor, output_type: str = "pil") -> Any:
        """Decode codes or latents [B, h, w, ...] into images of an output_type; see `ImageOutput`.

        Raises:
            InputError: There is no such output_type, or no such code.
            ModelError: There is no decoder, or it returns no numbers.
        """
        check_output_type(output_type)
        if output_type == "latent":
            return codes
        # One by one, as a batch rounds differently: an image is the same alone.
        parts = torch.split(torch.as_tensor(codes), 1)
        return as_images(torch.cat([self.family.pixels(each).cpu() for each in parts]), output_type)
