"""`PromptPipeline`: images from prompts with a transformers model of image codes.

It is the base of `JanusPipeline`, `Emu3Pipeline` and `ChameleonPipeline`. The model's template
turns a prompt into token ids, the engine generates the codes, and the model's or the user's decoder
turns them into images.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import torch

from ragspec.errors import InputError
from ragspec.models.device import pick_device
from ragspec.models.resolve import resolve_model
from ragspec.rules.base import Rule
from ragspec.visual.models.raster import Raster
from ragspec.visual.pipeline.base import CodePipeline, chosen_rule
from ragspec.visual.pipeline.diffusers_mixin import check_loading, saving
from ragspec.visual.pipeline.drafter_choice import NODES, prompt_source
from ragspec.visual.pipeline.prompt_parts import (
    PromptConditions,
    expect_kind,
    load_part,
    load_processor,
)
from ragspec.visual.pipeline.relaxation import FILE
from ragspec.visual.pipeline.request import check_negatives, checked_texts, some
from ragspec.visual.pipeline.saved_setup import SETUP, as_saved, pipeline_record, write_setup

BATCH = 4  # these models are large


class PromptPipeline(CodePipeline):
    """Generates images from prompts with a transformers model, with or without speculation.

    Args:
        model: The transformers model.
        processor: The model's processor, or its text tokenizer.
        drafter: See `prompt_source`.
        rule, budget, draft_mode, min_expected_gain, settings: See `ImagePipeline`.
        vq: The decoder of the codes, for models without one.
        prompt_template: A text with {prompt} in it that replaces the model's template; it does not
            apply to negative prompts.
        folder: Holds draft/ and relaxation.json.

    Raises:
        UnsupportedModelError, TokenizerMismatchError: The models do not fit.
        ModelNotFoundError: A model is missing.
        UnknownNameError, InputError, RuleError: An argument is refused.
    """

    target_kind: ClassVar[Any]  # the class of targets over its models
    decoder_kind: ClassVar[Any]  # the code-book and decoder over the model's vqmodel

    def __init__(
        self,
        model: Any,
        processor: Any,
        drafter: Any = "auto",
        rule: str | Rule = "exact",
        *,
        vq: Any = None,
        prompt_template: str | None = None,
        budget: Any = NODES,
        draft_mode: str | None = None,
        min_expected_gain: float | None = None,
        folder: Path | None = None,
        batch_size: int = BATCH,
        **settings: Any,
    ) -> None:
        expect_kind(model, self.target_kind.kind)
        if not callable(getattr(processor, "tokenizer", processor)):
            raise InputError(
                f"got the processor {processor!r}; expected the model's, or its tokenizer."
            )
        if prompt_template is not None and "{prompt}" not in str(prompt_template):
            raise InputError(
                f"got prompt_template {prompt_template!r}; expected a text with {{prompt}} in it."
            )
        super().__init__(self._vq(model, vq), budget, batch_size, folder)
        self.processor = processor
        self.text_tokenizer = getattr(processor, "tokenizer", processor)
        self.prompt_template = prompt_template
        self.raster = self._raster_of(model)
        self.rule_is_named = isinstance(rule, str)
        self.rule, self.rule_name, self.settings = chosen_rule(
            rule,
            self.tokenizer.codebook(),
            settings,
            positions=self.raster.tokens,
            relaxation=None if folder is None else folder / FILE,
            normalised=self.tokenizer.normalised,
            marks=self.raster.ends,
        )
        self.source = prompt_source(
            drafter, self.rule, model, folder, draft_mode, min_expected_gain
        )
        vqmodel = None if vq is None else self.tokenizer.model
        self.register_modules(model=model, vq=vqmodel, draft=self.source.model)

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        drafter: Any = "auto",
        rule: str | Rule = "auto",
        *,
        device: str | torch.device = "auto",
        dtype: str | torch.dtype = "auto",
        **settings: Any,
    ) -> Self:
        """Return a pipeline over a folder or a model id.

        Args:
            rule: "auto" takes the rule that the folder was saved with, else "exact". With it come
                the saved settings, and for the drafter "auto" the saved drafter.
            dtype: Also as torch_dtype.
            settings: See the class, and `check_loading` for those of diffusers' loaders.

        Raises:
            ModelError: A model or the saved index does not load; further errors as the class.
        """
        dtype = settings.pop("torch_dtype", None) or dtype
        device, offline = check_loading(settings, device)
        place = pick_device(device)
        folder = Path(resolve_model(name, offline=offline).folder)
        setup = folder / SETUP if (folder / SETUP).is_file() else None
        drafter, rule, settings = as_saved(setup, "exact", drafter, rule, settings)
        model = load_part(folder, cls.target_kind.kind, place, dtype)
        processor = settings.pop("processor", None) or load_processor(folder)
        if (folder / "vq").is_dir():
            settings.setdefault("vq", folder / "vq")
        return cls(model, processor, drafter, rule, folder=folder, **settings)

    @property
    def components(self) -> dict[str, Any]:
        """The parts that other pipelines may share: `JanusPipeline(**pipe.components)`."""
        vq = None if self.vq is None else self.tokenizer
        parts = {"model": self.model, "processor": self.processor, "vq": vq}
        return {**parts, "folder": self.folder, "prompt_template": self.prompt_template}

    def save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> None:
        """Write all models, tokenizer and settings to a folder for `from_pretrained`.

        If the pipeline uses no other draft model, the one beside the model is copied.
        """
        root = Path(save_directory)
        self.model.save_pretrained(root, **saving(kwargs))
        self.processor.save_pretrained(root)
        if self.draft is not None:
            self.draft.save_pretrained(root / "draft", **saving(kwargs))
        if self.vq is not None:
            self.vq.save_pretrained(root / "vq", safe_serialization=True)
        values = pipeline_record(self, self.source.name)
        write_setup(root, self, values | {"prompt_template": self.prompt_template})
        if self.folder is None or self.folder.resolve() == root.resolve():
            return
        if (self.folder / FILE).is_file():
            shutil.copyfile(self.folder / FILE, root / FILE)
        if (self.folder / "draft").is_dir() and not (root / "draft").exists():
            shutil.copytree(self.folder / "draft", root / "draft")

    def encode_prompt(
        self,
        prompt: str | Sequence[str],
        negative_prompt: str | Sequence[str] | None = None,
        height: int | None = None,
        width: int | None = None,
    ) -> tuple[list[list[int]], list[list[int]]]:
        """Return the token ids of prompts and of their negative prompts, as a call uses them.

        Raises:
            InputError: There is no prompt, or the model supports no negative prompt.
        """
        raster = self._sized(height, width)
        prompts = [self._ids(self._request(text), raster) for text in checked_texts(some(prompt))]
        if negative_prompt is None:
            return prompts, [self._nothing(ids, raster) for ids in prompts]
        self._check_negative()
        texts = some(negative_prompt)
        if not all(isinstance(text, str) for text in texts):
            raise InputError(f"got negative_prompt {negative_prompt!r}; expected texts.")
        negatives = [self._ids(text, raster) for text in texts]
        check_negatives(len(negatives), len(prompts))
        return prompts, negatives * len(prompts) if len(negatives) == 1 else negatives

    def _conditions(
        self, prompt: Any, labels: Any, negative: Any, height: int | None, width: int | None
    ) -> PromptConditions:
        if labels is not None:
            raise InputError("got class_labels; expected prompt.")
        ids = self.encode_prompt(prompt, negative, height, width)
        return PromptConditions(*ids, self.target_kind)

    def _check_negative(self) -> None:
        """Raise InputError if the model supports no negative prompt."""

    def _vq(self, model: Any, vq: Any) -> Any:
        """Return the code-book and decoder of a model; raise InputError for a second decoder."""
        if vq is not None:
            name = self.target_kind.kind.capitalize()
            raise InputError(f"got vq for {name}, which has a decoder of its own; leave it out.")
        return self.decoder_kind(model.model.vqmodel)

    def _raster_of(self, model: Any) -> Raster:
        """Return the grid of codes of the default size."""
        raise NotImplementedError

    def _request(self, prompt: str) -> str:
        """Insert a prompt into the template."""
        template = self.prompt_template
        return prompt if template is None else template.replace("{prompt}", prompt)

    def _ids(self, text: str, raster: Raster) -> list[int]:
        """Return the token ids of a text, up to the token that the first code follows."""
        raise NotImplementedError

    def _nothing(self, ids: list[int], raster: Raster) -> list[int]:
        """Return the ids of the unconditional prompt for a prompt of these ids."""
        raise NotImplementedError
