"""Emu3 (arXiv 2409.18869), which draws images of any height and width."""

from math import sqrt

from ragspec.types import PreTrainedModel
from ragspec.visual.families import multimodal
from ragspec.visual.models.raster import Raster

AREA = 518_400  # pixels of an image by default, as in the model's processor


class Emu3Target(multimodal.RowEndsTarget):
    """Emu3 as a target; its prompts end with the image wrapper token."""

    kind = "emu3"

    @staticmethod
    def parts_of(model: PreTrainedModel) -> tuple[PreTrainedModel, multimodal.Ids]:
        """Return the text decoder, and the codes and the line end."""
        mapping = model.vocabulary_mapping
        codes = multimodal.codes_in_order(mapping.img2bpe)
        return model.model.text_model, [*codes, mapping.eol_token_id]


class Emu3(multimodal.PromptFamily):
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
    top_k = 2048  # as in the model's generation config
    step = 1

    def usual_raster(self) -> Raster:
        """Return the square of the processor's area."""
        side = max(1, round(sqrt(AREA) / self.codec.reduction))
        return Raster(side, side, ends=1)

    def ids(self, text: str, raster: Raster) -> list[int]:
        """Return the token ids of a text, the size of the image and the first image token."""
        begin = multimodal.mark(self.text_tokenizer, "boi_token", "<|image start|>")
        first = multimodal.mark(self.text_tokenizer, "image_wrapper_token", "<|image token|>")
        bos = multimodal.mark(self.text_tokenizer, "bos_token")  # the tokenizer itself adds none
        whole = f"{bos}{text}{begin}{raster.height}*{raster.width}{first}"
        return multimodal.text_ids(self.text_tokenizer, whole, first)
