"""`PromptPipeline`: from a prompt to an image with a model of transformers that draws codes.

What `JanusPipeline`, `Emu3Pipeline` and `ChameleonPipeline` share. A prompt becomes token ids by
the model's template, the codes come out of the engine, and the model's own decoder, or one that is
given, makes images of them.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from diffusers.image_processor import VaeImageProcessor
from torch import Tensor

from ragspec.budget.policy import make_budget
from ragspec.errors import InputError
from ragspec.models.device import pick_device
from ragspec.models.resolve import resolve_model
from ragspec.rules.base import Rule
from ragspec.sampling.settings import Sampling
from ragspec.visual.checks import checked_count
from ragspec.visual.models.raster import Raster, codes_along
from ragspec.visual.models.target import ImageTarget
from ragspec.visual.pipeline.base import NODES, CodePipeline, chosen_rule
from ragspec.visual.pipeline.diffusers_mixin import check_loading, saving
from ragspec.visual.pipeline.drafter_choice import prompt_source
from ragspec.visual.pipeline.prompt_parts import (
    PromptConditions,
    check_prompt_draft,
    expect_kind,
    load_part,
    load_processor,
)
from ragspec.visual.pipeline.relaxation import FILE
from ragspec.visual.pipeline.request import (
    TENSORS,
    ImageConfig,
    check_output_type,
    checked_callback,
    checked_codes,
    checked_texts,
    seeds_of,
    some,
)
from ragspec.visual.pipeline.saved_setup import SETUP, as_saved, pipeline_record, write_setup

BATCH = 4  # these models are large


class PromptPipeline(CodePipeline):
    """Draws images of prompts with a model of transformers, with or without speculation.

    Args:
        model: Of transformers.
        processor: The model's, or its text tokenizer.
        drafter: See `prompt_source`.
        rule, budget, draft_mode, min_expected_gain, settings: See `ImagePipeline`.
        vq: What decodes codes, where the model cannot.
        prompt_template: A text with {prompt} in it, in place of the model's own; negative prompts
            stand alone.
        folder: Where draft/ and relaxation.json lie.
        batch_size: Images that are drawn in one batch.

    Raises:
        UnsupportedModelError, TokenizerMismatchError, ModelNotFoundError, UnknownNameError,
            InputError, RuleError: What is wrong, and a remedy.
    """

    kind: ClassVar[str]  # the model_type of its models
    target_kind: ClassVar[Any]
    guidance: ClassVar[float]  # the scale that is usual

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
        super().__init__()
        expect_kind(model, self.kind)
        if not callable(getattr(processor, "tokenizer", processor)):
            raise InputError(
                f"got the processor {processor!r}; expected the model's, or its tokenizer."
            )
        self.processor = processor
        self.text_tokenizer = getattr(processor, "tokenizer", processor)
        if prompt_template is not None and "{prompt}" not in str(prompt_template):
            raise InputError(
                f"got prompt_template {prompt_template!r}; expected a text with {{prompt}} in it."
            )
        self.prompt_template = prompt_template
        self.tokenizer = self._vq(model, vq)
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
        load = partial(load_part, kind=self.kind, device=model.device, dtype=model.dtype)
        self.source = prompt_source(
            drafter,
            self.rule,
            model,
            folder,
            load,
            check_prompt_draft,
            draft_mode,
            min_expected_gain,
        )
        self.budget = make_budget(budget)
        self.batch_size = checked_count(batch_size, "batch_size")
        self.folder = folder
        self.image_processor = VaeImageProcessor(vae_scale_factor=self.tokenizer.reduction)
        vqmodel = None if vq is None else self.tokenizer.model
        draft = self.source.model
        self.register_modules(model=model, vq=vqmodel, draft=draft)
        self._interrupt = False

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
        """Return a pipeline over a folder or a model id; settings: see the class.

        rule: "auto" takes the one that the folder was saved with, and its drafter and budget where
        none are named; else "exact". dtype: also as torch_dtype. What loaders of diffusers are
        told: see `check_loading`. Raises what the class does, and ModelError.
        """
        dtype = settings.pop("torch_dtype", None) or dtype
        device, offline = check_loading(settings, device)
        place = pick_device(device)
        result = resolve_model(name, offline=offline)
        folder = Path(result.folder)
        setup = folder / SETUP if (folder / SETUP).is_file() else None
        drafter, rule, settings = as_saved(setup, "exact", drafter, rule, settings)
        model = load_part(folder, cls.kind, place, dtype)
        processor = settings.pop("processor", None) or load_processor(folder)
        current = folder / "vq"
        if current.is_dir():
            settings.setdefault("vq", current)
        return cls(model, processor, drafter, rule, folder=folder, **settings)

    @property
    def components(self) -> dict[str, Any]:
        """The parts that further pipelines may share: `JanusPipeline(**pipe.components)`."""
        vq = None if self.vq is None else self.tokenizer
        parts = {"model": self.model, "processor": self.processor, "vq": vq}
        return {**parts, "folder": self.folder, "prompt_template": self.prompt_template}

    def save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> None:
        """Write all models, tokenizer and settings to a folder for `from_pretrained`.

        A draft model that lies with the model is copied where no other drafts.
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
        """Return the token ids of prompts, and of what each is guided from, as a call reads them.

        Raises:
            InputError: For no prompt, and a negative one that the model has no use for.
        """
        raster = self._sized(height, width)
        current = [self._ids(self._request(text), raster) for text in checked_texts(some(prompt))]
        if negative_prompt is None:
            return current, [self._nothing(ids, raster) for ids in current]
        self._check_negative()
        texts = some(negative_prompt)
        if not all(isinstance(text, str) for text in texts):
            raise InputError(f"got negative_prompt {negative_prompt!r}; expected texts.")
        beside = [self._ids(text, raster) for text in texts]
        return current, _each(beside, len(current))

    def __call__(
        self,
        prompt: str | Sequence[str] | None = None,
        *,
        negative_prompt: str | Sequence[str] | None = None,
        height: int | None = None,
        width: int | None = None,
        guidance_scale: float | None = None,
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

        prompt: a text or several, of any lengths. negative_prompt: what guidance leads away from,
        one for all or one each; None for what the model takes as no prompt. height, width: in
        pixels; None for the model's own. guidance_scale: None for the one that is usual, 1 for
        none. codes i64 [h, w]: those that are given, -1 where one is to be drawn. The rest: see
        `ImagePipeline`. Raises InputError, SamplingError, PromptTooLongError.
        """
        check_output_type(output_type)
        self._check_decoder(output_type)
        callback = checked_callback(callback_on_step_end, callback_on_step_end_tensor_inputs)
        count = checked_count(num_images_per_prompt, "num_images_per_prompt")
        raster = self._sized(height, width)
        current, beside = self.encode_prompt(some(prompt), negative_prompt, height, width)
        conditions = PromptConditions(current, beside, self._target)
        rows = [row for row in range(len(conditions.prompts)) for _ in range(count)]
        seeds = seeds_of(generator, len(rows))
        fixed = checked_codes(codes, raster.codes, self.tokenizer.vocab_size)
        if fixed is not None and raster.ends:
            fixed = torch.tensor(raster.laid(fixed.tolist()))
        scale = self.guidance if guidance_scale is None else guidance_scale
        target = self._target(
            self.model, conditions, ImageConfig(scale, guidance_interval, raster, fixed)
        )
        sampling = Sampling(
            temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seeds
        )
        output = self._create(target, conditions, rows, sampling, callback, output_type)
        return output if return_dict else output.to_tuple()

    def _sized(self, height: int | None, width: int | None) -> Raster:
        """Return how the codes of an image of so many pixels lie; raises InputError."""
        usual, reduction = self.raster, self.tokenizer.reduction
        rows, line = (
            side if pixels is None else codes_along(pixels, reduction, None, name)
            for pixels, side, name in (
                (height, usual.height, "height"),
                (width, usual.width, "width"),
            )
        )
        most = self._most_codes()
        if most is not None and rows * line > most:
            raise InputError(
                f"got {rows * reduction} x {line * reduction} pixels, "
                f"{rows * line} codes; expected at most {most}, for which the model was made."
            )
        return Raster(rows, line, usual.ends)

    def _check_negative(self) -> None:
        """Raise InputError where the model has no use for a negative prompt."""

    def _check_decoder(self, output_type: str) -> None:
        """Raise ModelError where images are asked for that cannot be decoded."""

    def _most_codes(self) -> int | None:
        """Return the codes that an image may have, None where positions alone set a bound."""
        return self.raster.codes

    def _vq(self, model: Any, inputs: Any) -> Any:
        """Return the code-book and decoder of a model."""
        raise NotImplementedError

    def _raster_of(self, model: Any) -> Raster:
        """Return how the codes lie where no size is asked for."""
        raise NotImplementedError

    def _request(self, prompt: str) -> str:
        """Return a prompt in the words of the template."""
        template = self.prompt_template
        return prompt if template is None else template.replace("{prompt}", prompt)

    def _ids(self, text: str, raster: Raster) -> list[int]:
        """Return the token ids of a text, up to the token after which codes are drawn."""
        raise NotImplementedError

    def _nothing(self, ids: list[int], raster: Raster) -> list[int]:
        """Return what the prompt of these ids is guided from where no negative one is given."""
        raise NotImplementedError

    @classmethod
    def _target(cls, model: Any, conditions: PromptConditions, image: ImageConfig) -> ImageTarget:
        """Return the target of one call over a model."""
        target: ImageTarget = cls.target_kind(
            model,
            conditions.prompts,
            conditions.unconditional,
            image.guidance_scale,
            image.guidance_interval,
            raster=image.raster,
            fixed=image.fixed,
        )
        return target


def _each(beside: list[list[int]], count: int) -> list[list[int]]:
    """Return one negative prompt for each of `count` prompts; raises InputError."""
    if len(beside) not in (1, count):
        raise InputError(
            f"got {len(beside)} negative prompts for {count} prompts; expected one for all, or one "
            "each."
        )
    return beside * count if len(beside) == 1 else beside
