"""`Emu3Pipeline`: images by Emu3 (arXiv 2409.18869), of any height and width."""

from __future__ import annotations

from math import sqrt
from typing import Any

from ragspec.errors import InputError
from ragspec.visual.models.raster import Raster
from ragspec.visual.models.transformers_targets import Emu3Target
from ragspec.visual.models.vq import Emu3VQ
from ragspec.visual.pipeline.prompt_parts import mark, text_ids
from ragspec.visual.pipeline.prompted import PromptPipeline

AREA = 518_400  # pixels of an image where no size is asked for, as the model's processor has it


class Emu3Pipeline(PromptPipeline):
    """Draws with an `Emu3ForConditionalGeneration`; see `PromptPipeline`.

    A prompt is followed by the size of the image in codes, which ends in the token that begins
    one. Every row of codes ends with a token of its own, which alone may stand there; those that
    end the image are certain and not drawn. Guidance leads away from negative_prompt in the same
    template, None being an empty one. `stats.codes_per_forward` counts the ends of rows.
    """

    kind = "emu3"
    target_kind = Emu3Target
    guidance = 3.0

    def _vq(self, model: Any, vq: Any) -> Any:
        if vq is not None:
            raise InputError("got vq for Emu3, which has a decoder of its own; leave it out.")
        return Emu3VQ(model.model.vqmodel)

    def _raster_of(self, model: Any) -> Raster:
        side = max(1, round(sqrt(AREA) / self.tokenizer.reduction))
        return Raster(side, side, ends=1)

    def _most_codes(self) -> int | None:
        return None

    def _ids(self, text: str, raster: Raster) -> list[int]:
        begin = mark(self.text_tokenizer, "boi_token", "<|image start|>")
        first = mark(self.text_tokenizer, "image_wrapper_token", "<|image token|>")
        bos = mark(self.text_tokenizer, "bos_token")  # the tokenizer itself puts none
        whole = f"{bos}{text}{begin}{raster.height}*{raster.width}{first}"
        return text_ids(self.text_tokenizer, whole, first)

    def _nothing(self, ids: list[int], raster: Raster) -> list[int]:
        return self._ids("", raster)
