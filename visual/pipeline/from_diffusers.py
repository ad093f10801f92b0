"""The classes by which diffusers' own `DiffusionPipeline.from_pretrained` loads a saved pipeline.

It loads the folders by the names of a constructor's parameters and calls it with what it loaded;
see `model_index`. What comes out are the ordinary pipelines.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from diffusers import AutoencoderKL, VQModel

from ragspec.drafters.eagle.head import FeatureHead
from ragspec.errors import InputError
from ragspec.visual.latents.model import LatentModel
from ragspec.visual.masked.model import MaskedModel
from ragspec.visual.models.kl import KLAutoencoder
from ragspec.visual.models.llamagen import LlamaGenModel
from ragspec.visual.models.vq import VQTokenizer
from ragspec.visual.pipeline.base import NODES
from ragspec.visual.pipeline.latent_source import NODES as LATENTS
from ragspec.visual.pipeline.latents import LatentPipeline
from ragspec.visual.pipeline.masked import MaskedLatentPipeline
from ragspec.visual.pipeline.masked_drafts import WINDOW
from ragspec.visual.pipeline.model_index import AUTO
from ragspec.visual.pipeline.pipeline import ImagePipeline

__all__ = [
    "AutoencoderKL",
    "HeadFolder",
    "LatentModel",
    "LlamaGenModel",
    "MaskedModel",
    "SavedImagePipeline",
    "SavedLatentPipeline",
    "SavedMaskedPipeline",
    "VQModel",
]


class HeadFolder:
    """Loads a feature head where diffusers expects a class with `from_pretrained`."""

    @classmethod
    def from_pretrained(cls, folder: str | Path, **settings: Any) -> FeatureHead:
        """Return the head of a folder; see `FeatureHead.load`."""
        return FeatureHead.load(folder)


class SavedImagePipeline(ImagePipeline):
    """An `ImagePipeline` made of the folders that its `save_pretrained` wrote.

    rule: its name and settings, or the name. drafter: "model" and "head" are those of the folder.
    """

    _optional_components: ClassVar[list[str]] = ["draft", "head"]

    def __init__(
        self,
        target: LlamaGenModel,
        tokenizer: VQModel,
        draft: LlamaGenModel | None = None,
        head: FeatureHead | None = None,
        *,
        drafter: str = AUTO,
        rule: dict | str = "exact",  # type: ignore[type-arg]
        budget: int | str = NODES,
        draft_mode: str | None = None,
        draft_worth: float | None = None,
        batch_size: int = 16,
    ) -> None:
        name, settings = _rule(rule)
        super().__init__(
            target,
            VQTokenizer(tokenizer),
            _drafter(drafter, {"model": draft, "head": head}),
            name,
            budget=budget,
            draft_mode=draft_mode,
            draft_worth=draft_worth,
            batch_size=batch_size,
            **settings,
        )
        self.__class__ = ImagePipeline  # the way of loading leaves no trace


class SavedLatentPipeline(LatentPipeline):
    """A `LatentPipeline` made of the folders that its `save_pretrained` wrote."""

    _optional_components: ClassVar[list[str]] = ["draft"]

    def __init__(
        self,
        target: LatentModel,
        tokenizer: VQModel,
        draft: LatentModel | None = None,
        *,
        drafter: str = AUTO,
        rule: dict | str = "aligned",  # type: ignore[type-arg]
        steps: int | None = None,
        floor: float | None = None,
        budget: int | str = LATENTS,
        batch_size: int = 16,
    ) -> None:
        name, settings = _rule(rule)
        super().__init__(
            target,
            VQTokenizer(tokenizer),
            _drafter(drafter, {"model": draft}),
            name,
            steps=steps,
            floor=floor,
            budget=budget,
            batch_size=batch_size,
            **settings,
        )
        self.__class__ = LatentPipeline


class SavedMaskedPipeline(MaskedLatentPipeline):
    """A `MaskedLatentPipeline` made of the folders that its `save_pretrained` wrote."""

    _optional_components: ClassVar[list[str]] = ["tokenizer", "vae", "draft"]

    def __init__(
        self,
        target: MaskedModel,
        tokenizer: VQModel | None = None,
        vae: AutoencoderKL | None = None,
        draft: MaskedModel | None = None,
        *,
        iterations: int = 64,
        steps: int = 100,
        floor: float = 0.0,
        drafter: str = "none",
        rule: dict | str = "aligned",  # type: ignore[type-arg]
        window: int = WINDOW,
        prefill: float = 0.0,
        batch_size: int = 16,
    ) -> None:
        name, settings = _rule(rule)
        super().__init__(
            target,
            KLAutoencoder(vae) if vae is not None else VQTokenizer(tokenizer),
            iterations=iterations,
            steps=steps,
            floor=floor,
            drafter=_drafter(drafter, {"model": draft}),
            rule=name,
            window=window,
            prefill=prefill,
            batch_size=batch_size,
            **settings,
        )
        self.__class__ = MaskedLatentPipeline


def _rule(told: dict[str, Any] | str) -> tuple[str, dict[str, Any]]:
    settings = {"name": told} if isinstance(told, str) else dict(told)
    return str(settings.pop("name")), settings


def _drafter(told: str, parts: dict[str, Any]) -> Any:
    """Return what is told in words, with the models that were loaded in their place."""
    if told == "none":
        return None
    words = told.split("+")
    lacking = [word for word in words if parts.get(word, word) is None]
    if lacking:
        raise InputError(
            f"got drafter {told!r} without {lacking[0]!r}: the index of the folder lists none; "
            "expected a drafter that was saved. Load it with ImagePipeline.from_pretrained."
        )
    found = [parts.get(word, word) for word in words]
    return found if len(found) > 1 else found[0]
