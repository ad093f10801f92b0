"""`ImagePipeline`: images from a class or a prompt, with the conventions of diffusers.

The engine generates the codes of an image as it generates text. The torch generator yields one seed
for each image. Model, condition, settings and seed alone determine an image: under an exact rule it
is the same with and without a drafter.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from diffusers.image_processor import VaeImageProcessor
from torch import Tensor

from ragspec.budget.policy import make_budget
from ragspec.errors import InputError
from ragspec.models.device import pick_device
from ragspec.rules.base import Rule
from ragspec.sampling.settings import Sampling
from ragspec.visual.checks import checked_count, class_number
from ragspec.visual.models.raster import Raster, codes_along
from ragspec.visual.models.target import ConditionTable, ImageTarget
from ragspec.visual.models.vq import VQTokenizer
from ragspec.visual.pipeline.base import CodePipeline, chosen_rule
from ragspec.visual.pipeline.diffusers_mixin import check_loading, saving
from ragspec.visual.pipeline.drafter_choice import NODES, Conditions, draft_source
from ragspec.visual.pipeline.folder import (
    CODES,
    ImageFolder,
    caption_encoder,
    check_model,
    check_tokenizer,
    class_names,
    find_folder,
    load_model,
    load_tokenizer,
)
from ragspec.visual.pipeline.request import (
    TENSORS,
    ImageConfig,
    check_negatives,
    check_output_type,
    checked_callback,
    checked_codes,
    checked_texts,
    padded_features,
    seeds_of,
    some,
)
from ragspec.visual.pipeline.saved_setup import as_saved, pipeline_record, write_setup


class ImagePipeline(CodePipeline):
    """Generates images with a model of image codes, with or without speculation.

    Args:
        model, tokenizer: A `LlamaGenModel`, and the tokenizer of its codes.
        drafter: See `draft_source`.
        rule: A Rule, or a name and its settings (neighbours, delta, lam, tv_budget, ...), see
            `make_rule`. Without settings, those measured on this model apply, see `relaxation`.
        budget: A number of draft nodes, "auto" (slow to learn: an image is short), or a policy.
        draft_mode: How a model or a head drafts, see `draft_source`.
        min_expected_gain: The accepted codes that a further draft forward must promise, see
            `ModelDrafter`. 0 uses up the budget, which pays if a draft forward is nearly free.
        text_encoder: For models of prompts: a folder or model id for transformers (LlamaGen's is
            google/flan-t5-xl), or a function of texts; None takes the bundled embedder if it fits.
        folder: Holds the drafters "starter", "model" and "head".

    Raises:
        UnsupportedModelError, TokenizerMismatchError: The models do not fit.
        ModelNotFoundError: A model is missing.
        UnknownNameError, InputError, RuleError: An argument is refused.
    """

    _default_rule: ClassVar[str] = "exact"
    _default_set: ClassVar[str] = "tiles"
    _default_dtype: ClassVar[str] = "auto"
    _model_kind: ClassVar[str] = CODES

    def __init__(
        self,
        model: Any,
        tokenizer: VQTokenizer,
        drafter: Any = None,
        rule: str | Rule = "exact",
        *,
        budget: Any = NODES,
        draft_mode: str | None = None,
        min_expected_gain: float | None = None,
        text_encoder: Any = None,
        folder: ImageFolder | None = None,
        batch_size: int = 16,
        **settings: Any,
    ) -> None:
        super().__init__()
        check_model(model)
        check_tokenizer(model, tokenizer)
        self.tokenizer = tokenizer
        self.side = int(model.config.grid_size)
        self.rule_is_named = isinstance(rule, str)
        self.rule, self.rule_name, self.settings = chosen_rule(
            rule,
            tokenizer.codebook(),
            settings,
            positions=self.side**2,
            relaxation=getattr(folder, "relaxation", None),
            normalised=tokenizer.normalised,
        )
        self.source = draft_source(drafter, self.rule, model, folder, draft_mode, min_expected_gain)
        self.budget = make_budget(budget)
        self.batch_size = checked_count(batch_size, "batch_size")
        self.folder = folder
        self.class_names = class_names(model)
        self.captions = caption_encoder(model, text_encoder)
        self.image_processor = VaeImageProcessor(vae_scale_factor=tokenizer.reduction)
        self.register_modules(model=model, vq=tokenizer.model, draft=self.source.model)

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path | None = None,
        drafter: Any = "auto",
        rule: str | Rule = "auto",
        *,
        tokenizer: VQTokenizer | str | Path | None = None,
        device: str | torch.device = "auto",
        dtype: str | torch.dtype | None = None,
        **settings: Any,
    ) -> Self:
        """Return a pipeline over a bundled set or a folder.

        Args:
            name: A bundled set ("tiles", the default, or "emoji"), a folder or a model id.
            rule: "auto" takes the rule that the folder was saved with, else "exact". With it come
                the saved settings, and for the drafter "auto" the saved drafter.
            tokenizer: For folders without one.
            dtype: Also as torch_dtype; None is "auto", for latents float32.
            settings: See `ImagePipeline`, and `check_loading` for those of diffusers' loaders.

        Raises:
            ModelError: A model or the saved index does not load; further errors as the class.
        """
        dtype = settings.pop("torch_dtype", None) or dtype or cls._default_dtype
        device, offline = check_loading(settings, device)
        folder = find_folder(name or cls._default_set, offline)
        drafter, rule, settings = as_saved(folder.index, cls._default_rule, drafter, rule, settings)
        place = pick_device(device)
        model = load_model(folder.target, place, dtype, cls._model_kind)
        if tokenizer is None:
            tokenizer = load_tokenizer(folder, place)
        elif isinstance(tokenizer, str | Path):
            tokenizer = VQTokenizer.from_pretrained(tokenizer)
            tokenizer.model.to(place)
        return cls(model, tokenizer, drafter, rule, folder=folder, **settings)

    @property
    def components(self) -> dict[str, Any]:
        """The parts that other pipelines may share: `ImagePipeline(**pipe.components)`."""
        return {"model": self.model, "tokenizer": self.tokenizer, "folder": self.folder}

    def save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> None:
        """Write target, tokenizer, draft model and head to a folder for `from_pretrained`.

        If the pipeline uses no other draft model or head, those beside the target are copied.
        """
        root = Path(save_directory)
        self.model.save_pretrained(root / "target", **saving(kwargs))
        self.tokenizer.save_pretrained(root / "tokenizer", dtype=torch.float32)
        if self.draft is not None:
            self.draft.save_pretrained(root / "draft", **saving(kwargs))
        if self.source.head is not None:
            self.source.head.save(root / "head")
        if self.folder is not None and self.folder.relaxation is not None:
            shutil.copyfile(self.folder.relaxation, root / self.folder.relaxation.name)
        for name in ("draft", "head"):
            part = getattr(self.folder, name, None)
            if part is not None and not (root / name).exists():
                shutil.copytree(part, root / name)
        write_setup(root, self, self._summary())

    def _summary(self) -> dict[str, Any]:
        """Return the settings with which a loader restores this pipeline."""
        return pipeline_record(self, self.source.name)

    def __call__(
        self,
        prompt: str | Sequence[str] | None = None,
        class_labels: int | str | Sequence[int | str] | None = None,
        *,
        negative_prompt: str | Sequence[str] | None = None,
        height: int | None = None,
        width: int | None = None,
        guidance_scale: float = 2.0,
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
        num_images_per_prompt: int = 1,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        guidance_interval: tuple[int, int] | None = None,
        codes: Tensor | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
        callback_on_step_end: Callable[..., Any] | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] | None = TENSORS,
    ) -> Any:
        """Generate images; return an `ImageOutput`, or a tuple of its fields without return_dict.

        Args:
            prompt: For a text-conditional model, of any lengths.
            class_labels: Numbers or names, for a class-conditional model.
            negative_prompt: The text that guidance leads away from, one for all or one each; None
                for the embedding that the model learned for no prompt.
            height, width: In pixels, up to the size that the model was made for.
            generator: The source of the seeds, or one for each image; None is torch's global one.
                `stats.seeds` records the seeds.
            num_images_per_prompt: Images of each prompt or class, next to each other.
            temperature: 0 is greedy.
            guidance_interval: (first, last) indices of the codes under guidance, last excluded;
                LlamaGen's cfg_interval=i is (0, i + 2).
            codes i64 [h, w] or [n]: Fixed codes, -1 for codes to generate. A code depends on those
                before it in raster order alone.
            callback_on_step_end: Called after each forward with (pipeline, step, codes, {"codes":
                i64 [B, h * w]}). `codes` counts the codes of the image that is furthest behind;
                the tensor holds -1 for codes that are still missing.
            callback_on_step_end_tensor_inputs: Names of the tensors it receives, [] for none.

        Raises:
            InputError, SamplingError: An argument is refused.
        """
        check_output_type(output_type)
        callback = checked_callback(callback_on_step_end, callback_on_step_end_tensor_inputs)
        raster = self._sized(height, width)
        conditions = self._conditions(prompt, class_labels, negative_prompt)
        count = checked_count(num_images_per_prompt, "num_images_per_prompt")
        rows = [row for row in range(len(conditions.condition)) for _ in range(count)]
        seeds = seeds_of(generator, len(rows))
        fixed = checked_codes(codes, raster.codes, int(self.trunk.config.vocab_size))
        config = ImageConfig(guidance_scale, guidance_interval, raster, fixed)
        sampling = Sampling(
            temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seeds
        )
        target = self._target(conditions.table(self.trunk), config)
        output = self._create(target, conditions, rows, sampling, callback, output_type)
        return output if return_dict else output.to_tuple()

    @property
    def trunk(self) -> Any:
        """The transformer that reads conditions and codes."""
        return self.model

    def label_of(self, inputs: int | str) -> int:
        """Return the number of a class that is given by number or by name.

        Raises:
            InputError: The model has no such class.
        """
        return class_number(inputs, self.class_names, int(self.trunk.config.num_classes))

    def _target(self, table: ConditionTable, config: ImageConfig) -> ImageTarget:
        """Return the target of one call."""
        scale, interval = config.guidance_scale, config.guidance_interval
        return ImageTarget(
            self.model, table, scale, interval, fixed=config.fixed, raster=config.raster
        )

    def _sized(self, height: int | None, width: int | None) -> Raster:
        """Return the grid of an image of this size in pixels, or raise InputError."""
        sides, side, reduction = (height, width), self.side, self.tokenizer.reduction
        rows, line = (
            side if pixels is None else codes_along(pixels, reduction, side, name)
            for pixels, name in zip(sides, ("height", "width"), strict=True)
        )
        return Raster(rows, line)

    def _conditions(self, prompt: Any, labels: Any, negative: Any) -> Conditions:
        sources = {"prompt": prompt, "class_labels": labels}
        named = [name for name, value in sources.items() if value is not None]
        classes = self.trunk.config.condition == "class"
        expected = "class_labels" if classes else "prompt"
        if named != [expected]:
            raise InputError(
                f"got {' and '.join(named) or 'nothing to draw'}; expected {expected}."
            )
        if classes:
            if negative is not None:
                raise InputError(
                    "got a negative prompt for a model of classes; expected none. Leave it out: "
                    "guidance leads away from the model's own class of nothing."
                )
            return Conditions(torch.tensor([self.label_of(label) for label in some(labels)]))
        features = self._features(prompt)
        if negative is None:
            return Conditions(*features)
        beside = self._features(negative)
        check_negatives(len(beside[0]), len(features[0]))
        return Conditions(*features, *beside)

    def _features(self, texts: Any) -> tuple[Tensor, tuple[int, ...]]:
        """Return features [R, L, d] of texts, and the number of padding rows before each."""
        if self.captions is None:
            raise InputError(
                "got a prompt, but this model reads the features of a text encoder that is not "
                "bundled; expected text_encoder=NAME_OR_FOLDER for the pipeline, or a function "
                "that returns features [n, d] of each text."
            )
        features = self.captions(checked_texts(some(texts)))
        return padded_features(features, int(self.trunk.config.condition_length))
