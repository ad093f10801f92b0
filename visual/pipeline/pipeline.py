"""`ImagePipeline`: images from a class or a prompt, with the conventions of diffusers.

The codes of an image come out of the same engine as text does. Seeds are drawn from the torch
generator, one for each image, so that an image is a function of model, condition, settings and its
seed alone: under an exact rule the same with and without a drafter.
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
from ragspec.visual.pipeline.base import NODES, CodePipeline, chosen_rule
from ragspec.visual.pipeline.diffusers_mixin import check_loading, saving
from ragspec.visual.pipeline.drafter_choice import Conditions, draft_source
from ragspec.visual.pipeline.folder import (
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
    """Draws images with a model of image codes, with or without speculation.

    Args:
        model: A `LlamaGenModel`.
        tokenizer: Of its codes.
        drafter: See `draft_source`.
        rule: A Rule, or a name and its settings (neighbours, delta, lam, tv_budget, ...), see
            `make_rule`; without any, those that were measured for this model, see `relaxation`.
        budget: A number of draft nodes, "auto" (slow to learn: an image is short), or a policy.
        draft_mode: How a model or a head drafts.
        min_expected_gain: The accepted codes for which it reads on, see `ModelDrafter`; 0 uses up
            the budget, which pays where a forward of the draft is next to free.
        text_encoder: Of a model that reads features of prompts: a folder or model id for
            transformers (LlamaGen's is google/flan-t5-xl), or a function of texts; None takes the
            bundled embedder where it fits.
        folder: Where the drafters called "starter", "model" and "head" lie.
        batch_size: Images that are drawn in one batch.

    Raises:
        UnsupportedModelError, TokenizerMismatchError, ModelNotFoundError, UnknownNameError,
            InputError, RuleError: What is wrong, and a remedy.
    """

    _default_rule: ClassVar[str] = "exact"
    _default_set: ClassVar[str] = "tiles"
    _default_dtype: ClassVar[str] = "auto"

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
        draft = self.source.model
        self.register_modules(model=model, vq=tokenizer.model, draft=draft)
        self._interrupt = False

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
        """Return a pipeline over a bundled set ("tiles" where none is named, "emoji") or a folder.

        Args:
            rule: "auto" takes the one that the folder was saved with, and its drafter and budget
                where none are named; else "exact".
            tokenizer: Where the folder has none.
            dtype: Also as torch_dtype; None is "auto", of latents float32.
            settings: See `ImagePipeline`; what loaders of diffusers are told, see `check_loading`.
                Raises what `ImagePipeline` does, ModelError for a model that does not load,
                InputError for what a folder of this kind has not.
        """
        dtype = settings.pop("torch_dtype", None) or dtype or cls._default_dtype
        device, offline = check_loading(settings, device)
        folder = find_folder(name or cls._default_set, offline)
        drafter, rule, settings = as_saved(folder.index, cls._default_rule, drafter, rule, settings)
        place = pick_device(device)
        model = cls._load(folder.target, place, dtype)
        if tokenizer is None:
            tokenizer = load_tokenizer(folder, place)
        elif isinstance(tokenizer, str | Path):
            tokenizer = VQTokenizer.from_pretrained(tokenizer)
            tokenizer.model.to(place)
        return cls(model, tokenizer, drafter, rule, folder=folder, **settings)

    @staticmethod
    def _load(folder: Path, device: torch.device, dtype: str | torch.dtype) -> Any:
        """Return the model of a folder."""
        return load_model(folder, device, dtype)

    @property
    def components(self) -> dict[str, Any]:
        """The parts that further pipelines may share: `ImagePipeline(**pipe.components)`."""
        return {"model": self.model, "tokenizer": self.tokenizer, "folder": self.folder}

    def save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> None:
        """Write target, tokenizer, draft model and head to a folder that `from_pretrained` reads.

        A draft model and a head that lie with the target are copied where no others draft.
        """
        root = Path(save_directory)
        self.model.save_pretrained(root / "target", **saving(kwargs))
        self.tokenizer.save_pretrained(root / "tokenizer", dtype=torch.float32)
        if self.draft is not None:
            self.draft.save_pretrained(root / "draft", **saving(kwargs))
        head = self.source.head
        if head is not None:
            head.save(root / "head")
        if self.folder is not None and self.folder.relaxation is not None:
            shutil.copyfile(self.folder.relaxation, root / self.folder.relaxation.name)
        for name in ("draft", "head"):
            part = getattr(self.folder, name, None)
            if part is not None and not (root / name).exists():
                shutil.copytree(part, root / name)
        write_setup(root, self, self._summary())

    def _summary(self) -> dict[str, Any]:
        """Return what a loader must be told so that the same is drawn."""
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
        """Return an `ImageOutput`, or a tuple of its fields where return_dict is False.

        prompt: for a text-conditional model, of any lengths; class_labels: numbers or names, for
        one of classes. negative_prompt: what guidance leads away from, one for all or one each, in
        place of what the model learned for no prompt.
        height, width: in pixels, up to the size that the model was made for.
        num_images_per_prompt: images of each, next to each other.
        generator: seeds are drawn from it, or from one an image; None is torch's global one
        (`stats.seeds` tells them). temperature 0 is greedy. guidance_interval: indices
        of the codes for which guidance is on, the last excluded (LlamaGen's cfg_interval=i is (0, i
        + 2)). codes i64 [h, w] or [n]: those that are given, -1 where one is to be drawn; each is
        drawn after those before it in raster order alone. callback_on_step_end(pipeline, step,
        codes, {"codes": i64 [B, h * w]}): called after every pass, -1 where no code stands yet;
        `codes` is their number in the image that is furthest behind.
        callback_on_step_end_tensor_inputs: what
        it is told, [] for nothing. Raises InputError, SamplingError.
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
        """The model whose conditions and grid these are."""
        return self.model

    def label_of(self, inputs: int | str) -> int:
        """Return the number of a class given by number or by name; raises InputError."""
        return class_number(inputs, self.class_names, int(self.trunk.config.num_classes))

    def _target(self, table: ConditionTable, config: ImageConfig) -> ImageTarget:
        """Return the target of one call."""
        scale, interval = config.guidance_scale, config.guidance_interval
        return ImageTarget(
            self.model, table, scale, interval, fixed=config.fixed, raster=config.raster
        )

    def _sized(self, height: int | None, width: int | None) -> Raster:
        """Return how the codes of an image of so many pixels lie; raises InputError."""
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
        if len(beside[0]) not in (1, len(features[0])):
            raise InputError(
                f"got {len(beside[0])} negative prompts for {len(features[0])} prompts; expected "
                "one for all, or one each."
            )
        return Conditions(*features, *beside)

    def _features(self, texts: Any) -> tuple[Tensor, tuple[int, ...]]:
        """Return features [R, L, d] of texts, and how many first ones of each are padding."""
        if self.captions is None:
            raise InputError(
                "got a prompt, but this model reads the features of a text encoder that is not "
                "bundled; expected text_encoder=NAME_OR_FOLDER for the pipeline, or a function "
                "that returns features [n, d] of each text."
            )
        features = self.captions(checked_texts(some(texts)))
        return padded_features(features, int(self.trunk.config.condition_length))
