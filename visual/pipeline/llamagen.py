"""`LlamaGenPipeline`: images of classes or prompts from LlamaGen's published files."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import torch

from ragspec.errors import InputError
from ragspec.models.device import pick_device
from ragspec.rules.base import Rule
from ragspec.visual.models.llamagen_checkpoint import load_llamagen
from ragspec.visual.models.vq import VQTokenizer
from ragspec.visual.pipeline.diffusers_mixin import check_loading
from ragspec.visual.pipeline.folder import load_published
from ragspec.visual.pipeline.pipeline import ImagePipeline


class LlamaGenPipeline(ImagePipeline):
    """An `ImagePipeline` that opens LlamaGen's published files (arXiv 2406.06525), and folders.

    Class-conditional models take class_labels, the others prompts. The latter need text_encoder,
    for the published models google/flan-t5-xl.
    """

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
        vq: VQTokenizer | str | Path | None = None,
        grid_size: int | None = None,
        num_attention_heads: int | None = None,
        allow_namespace: bool = False,
        **settings: Any,
    ) -> Self:
        """Return a pipeline over a published file or a folder; see `ImagePipeline.from_pretrained`.

        Args:
            name: Also a published file such as c2i_B_256.pt.
            drafter: Also the published file of a smaller model.
            vq, tokenizer: A published file (vq_ds16_c2i.pt) or a folder, required with a file.
            grid_size, num_attention_heads, allow_namespace: Of files, see `load_llamagen`.
        """
        if vq is not None and tokenizer is not None:
            raise InputError("got vq and tokenizer; expected one of the two names of one thing.")
        book = tokenizer if vq is None else vq
        if isinstance(book, str | Path):
            book = VQTokenizer.from_pretrained(Path(book), allow_namespace=allow_namespace)
        opening: dict[str, Any] = {"grid_size": grid_size, "allow_namespace": allow_namespace}
        dtype = settings.pop("torch_dtype", None) or dtype or cls._default_dtype
        device, offline = check_loading(settings, device)
        place = pick_device(device)
        if book is not None:
            book.model.to(place)
        if isinstance(drafter, str | Path) and Path(drafter).is_file():
            drafter = load_published(load_llamagen, Path(drafter), place, dtype, **opening)
        path = Path(name or "").expanduser()
        if not path.is_file():
            settings |= {"tokenizer": book, "device": place, "local_files_only": offline}
            return super().from_pretrained(name, drafter, rule, dtype=dtype, **settings)
        if book is None:
            raise InputError(
                f"got the checkpoint {path.name} without a tokenizer of its codes; expected "
                "vq=PATH, the vq_ds16_c2i.pt or vq_ds16_t2i.pt that was published beside it."
            )
        opening["num_attention_heads"] = num_attention_heads
        model = load_published(load_llamagen, path, place, dtype, **opening)
        rule = cls._default_rule if isinstance(rule, str) and rule == "auto" else rule
        return cls(model, book, drafter, rule, **settings)
