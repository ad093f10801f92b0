"""`ImagePipeline`: images from a class or a prompt, with the conventions of diffusers.

The engine generates the codes of an image as it generates text. The torch generator yields one seed
for each image. Model, condition, settings and seed alone determine an image: under an exact rule it
is the same with and without a drafter.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from ragspec.errors import InputError
from ragspec.models.device import pick_device
from ragspec.rules.base import Rule
from ragspec.visual.models.raster import Raster
from ragspec.visual.models.vq import VQTokenizer
from ragspec.visual.pipeline.base import CodePipeline, chosen_rule
from ragspec.visual.pipeline.diffusers_mixin import ClassPipeline, check_loading, saving
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
from ragspec.visual.pipeline.request import check_negatives, checked_texts, padded_features, some
from ragspec.visual.pipeline.saved_setup import as_saved, pipeline_record, write_setup


class ImagePipeline(CodePipeline, ClassPipeline):
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

    _by_side = True
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
        check_model(model)
        check_tokenizer(model, tokenizer)
        super().__init__(tokenizer, budget, batch_size, folder)
        self.side = int(model.config.grid_size)
        self.raster = Raster(self.side, self.side)
        self.rule_is_named = isinstance(rule, str)
        self.rule, self.rule_name, self.settings = chosen_rule(
            rule,
            tokenizer.codebook(),
            settings,
            positions=self.raster.codes,
            relaxation=None if folder is None else folder.relaxation,
            normalised=tokenizer.normalised,
        )
        self.source = draft_source(drafter, self.rule, model, folder, draft_mode, min_expected_gain)
        self.class_names = class_names(model)
        self.captions = caption_encoder(model, text_encoder)
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
        if (folder := self.folder) is not None:
            if folder.relaxation is not None:
                shutil.copyfile(folder.relaxation, root / folder.relaxation.name)
            for name, part in (("draft", folder.draft), ("head", folder.head)):
                if part is not None and not (root / name).exists():
                    shutil.copytree(part, root / name)
        write_setup(root, self, self._summary())

    def _summary(self) -> dict[str, Any]:
        """Return the settings with which a loader restores this pipeline."""
        return pipeline_record(self, self.source.name)

    def _conditions(
        self, prompt: Any, labels: Any, negative: Any, height: int | None, width: int | None
    ) -> Conditions:
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
