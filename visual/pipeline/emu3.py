"""`Emu3Pipeline`: images by Emu3 (arXiv 2409.18869), of any height and width."""

from __future__ import annotations

from math import sqrt
from typing import Any

from ragspec.visual.models.raster import Raster
from ragspec.visual.models.transformers_targets import Emu3Target
from ragspec.visual.models.vq import ModelVQ
from ragspec.visual.pipeline.prompt_parts import mark, text_ids
from ragspec.visual.pipeline.prompted import PromptPipeline

AREA = 518_400  # pixels of an image by default, as in the model's processor


class Emu3Pipeline(PromptPipeline):
    """Generates with an `Emu3ForConditionalGeneration`; see `PromptPipeline`.

    The template adds the size of the image in codes and the begin-of-image token to a prompt. Each
    row of codes ends with an end-of-row token; the other tokens that end an image are certain and
    are not generated. Guidance leads away from negative_prompt in the same template, by default an
    empty one. `stats.codes_per_forward` includes the end-of-row tokens.
    """

    target_kind = Emu3Target
    decoder_kind = ModelVQ
    guidance = 3.0
    _by_area = False

    def _raster_of(self, model: Any) -> Raster:
        side = max(1, round(sqrt(AREA) / self.tokenizer.reduction))
        return Raster(side, side, ends=1)

    def _ids(self, text: str, raster: Raster) -> list[int]:
        begin = mark(self.text_tokenizer, "boi_token", "<|image start|>")
        first = mark(self.text_tokenizer, "image_wrapper_token", "<|image token|>")
        bos = mark(self.text_tokenizer, "bos_token")  # the tokenizer itself adds none
        whole = f"{bos}{text}{begin}{raster.height}*{raster.width}{first}"
        return text_ids(self.text_tokenizer, whole, first)

    def _nothing(self, ids: list[int], raster: Raster) -> list[int]:
        return self._ids("", raster)
