"""Emu3 (arXiv 2409.18869), which draws images of any height and width."""

from dataclasses import replace
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from ragspec.types import PreTrainedModel
from ragspec.visual.families.multimodal import (
    Ids,
    PromptFamily,
    TextCodesTarget,
    codes_in_order,
    mark,
    text_ids,
)
from ragspec.visual.models.raster import Raster

AREA = 518_400  # pixels of an image by default, as in the model's processor


class Emu3Target(TextCodesTarget):
    """Emu3 (`Emu3ForConditionalGeneration`) as a target.

    A line end, the last code of the vocabulary here (V - 1), follows every row of codes, as in the
    model. It is allowed nowhere else, and no other code is allowed there.

    Args:
        prompts: Token ids that end with the image wrapper token.
        raster: Rows, and codes per row; `ends` is set to 1.
    """

    kind = "emu3"

    def __init__(self, *inputs: Any, raster: Raster, **settings: Any) -> None:
        super().__init__(*inputs, raster=replace(raster, ends=1), **settings)
        self.width = raster.width
        self._is_end = torch.arange(self.vocab_size, device=self.device) == self.vocab_size - 1

    @staticmethod
    def parts_of(model: PreTrainedModel) -> tuple[PreTrainedModel, Ids]:
        """Return the text decoder, and the codes and the line end."""
        mapping = model.vocabulary_mapping
        return model.model.text_model, [*codes_in_order(mapping.img2bpe), mapping.eol_token_id]

    def allowed(self, index: Tensor) -> Tensor:
        """Return which codes are allowed at indices i64 [B, k]: bool [B, k, V]."""
        fitting = (index % (self.width + 1) == self.width)[..., None] == self._is_end
        free = super().allowed(index)
        return fitting if free is None else fitting & free


class Emu3(PromptFamily):
    """An `Emu3ForConditionalGeneration`; see `PromptFamily`.

    The template adds the size of the image in codes and the begin-of-image token to a prompt. Each
    row of codes ends with an end-of-row token; the other tokens that end an image are certain and
    are not generated. Guidance leads away from negative_prompt in the same template, by default an
    empty one. `stats.codes_per_forward` includes the end-of-row tokens.
    """

    kind = "emu3"
    model_class = "Emu3ForConditionalGeneration"
    target = Emu3Target
    guidance = 3.0
    any_size = True

    def usual_raster(self) -> Raster:
        """Return the square of the processor's area."""
        side = max(1, round(sqrt(AREA) / self.codec.reduction))
        return Raster(side, side, ends=1)

    def ids(self, text: str, raster: Raster) -> list[int]:
        """Return the token ids of a text, the size of the image and the first image token."""
        begin = mark(self.text_tokenizer, "boi_token", "<|image start|>")
        first = mark(self.text_tokenizer, "image_wrapper_token", "<|image token|>")
        bos = mark(self.text_tokenizer, "bos_token")  # the tokenizer itself adds none
        whole = f"{bos}{text}{begin}{raster.height}*{raster.width}{first}"
        return text_ids(self.text_tokenizer, whole, first)

    def unconditional(self, ids: list[int], raster: Raster) -> list[int]:
        """Return the ids of an empty prompt."""
        return self.ids("", raster)
