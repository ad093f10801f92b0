"""Chameleon, Anole and Lumina-mGPT (arXiv 2405.09818, 2407.06135, 2408.02657)."""

from pathlib import Path

from torch import Tensor, nn

from ragspec.errors import ModelError, TokenizerMismatchError
from ragspec.types import PreTrainedModel
from ragspec.visual.call import ImageCall
from ragspec.visual.families.multimodal import (
    Ids,
    PromptFamily,
    TextCodesTarget,
    codes_in_order,
    mark,
    text_ids,
)
from ragspec.visual.models.raster import Raster
from ragspec.visual.models.vq import ModelVQ, VQTokenizer

_ROUNDED = 0.05  # the most relative error of a code-book in half precision


class ChameleonTarget(TextCodesTarget):
    """Chameleon or Anole (`ChameleonForConditionalGeneration`) as a target.

    The model's own forward excludes codes, so the target runs its decoder and head itself.

    Args:
        prompts: Token ids that end with the begin-of-image token.
    """

    kind = "chameleon"

    @staticmethod
    def parts_of(model: PreTrainedModel) -> tuple[PreTrainedModel, Ids]:
        """Return the text decoder, and the codes."""
        return model.model, codes_in_order(model.model.vocabulary_mapping.img2bpe)


class Chameleon(PromptFamily):
    """A `ChameleonForConditionalGeneration`; see `PromptFamily`.

    The template adds the separator and the begin-of-image token to a prompt; only image codes may
    follow. Guidance leads away from negative_prompt in the same template. By default that is the
    begin of text and the begin of image alone.

    Args:
        vq: The decoder, which transformers' model lacks: the published file (`vqgan.ckpt`), or a
            folder or an object of diffusers' VQModel. Without one, calls support only output_type
            "latent", the codes.
    """

    kind = "chameleon"
    model_class = "ChameleonForConditionalGeneration"
    target = ChameleonTarget
    guidance = 3.0

    def decoder(self, vq: str | Path | nn.Module | VQTokenizer | None) -> ModelVQ | VQTokenizer:
        """Return a decoder that has the model's code-book; without `vq` the code-book alone."""
        model_book = ModelVQ(self.model.model.vqmodel)
        if vq is None:
            return model_book
        # Codes are compared by plain distance, without normalisation.
        if isinstance(vq, str | Path):
            vq = VQTokenizer.from_pretrained(Path(vq).expanduser(), normalised=False)
        tokenizer = vq if isinstance(vq, VQTokenizer) else VQTokenizer(vq, normalised=False)
        expected = model_book.codebook()
        book = tokenizer.model.quantize.embedding.weight.detach().float().to(expected.device)
        most = _ROUNDED * expected.abs().mean()
        if book.shape != expected.shape or (book - expected).abs().mean() > most:
            raise TokenizerMismatchError(
                f"got a decoder with a code-book of {list(book.shape)} that is not the model's, of "
                f"{list(expected.shape)}; expected the one that it was trained with."
            )
        tokenizer.model.to(self.model.device)
        return tokenizer

    def usual_raster(self) -> Raster:
        """Return the square of the model's resolution."""
        config = self.model.model.vqmodel.config
        side = max(1, int(config.resolution) // ModelVQ(self.model.model.vqmodel).reduction)
        return Raster(side, side)

    def check(self, call: ImageCall) -> None:
        """Raise ModelError if the output needs a decoder and there is none."""
        super().check(call)
        if call.output_type != "latent" or call.on_image is not None:
            self._expect_decoder()

    def pixels(self, codes: Tensor) -> Tensor:
        """Decode codes; raise ModelError without a decoder."""
        self._expect_decoder()
        return super().pixels(codes)

    def _expect_decoder(self) -> None:
        if self.vq is None:
            raise ModelError(
                "transformers' Chameleon has no decoder of pictures. Expected vq=PATH for the "
                "pipeline, the vqgan.ckpt that was published with the model or a VQModel of it, or "
                "output_type='latent'."
            )

    def ids(self, text: str, raster: Raster) -> list[int]:
        """Return the token ids of a text, the separator and the begin of an image."""
        begin = self._begin()
        after = mark(self.text_tokenizer, "sep_token", "<reserved08706>")
        return text_ids(self.text_tokenizer, f"{text}{after}{begin}", begin)

    def unconditional(self, ids: list[int], raster: Raster) -> list[int]:
        """Return the begin of text and the begin of image."""
        begin = self._begin()
        return text_ids(self.text_tokenizer, begin, begin)

    def _begin(self) -> str:
        return mark(self.text_tokenizer, "boi_token", "<racm3:break>")
