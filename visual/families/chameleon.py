"""Chameleon, Anole and Lumina-mGPT (arXiv 2405.09818, 2407.06135, 2408.02657).

Folders of Lumina-mGPT are those of its training code, whose configuration has a z_loss_weight. They
lack the VQ model, and the norms of queries and keys have one row for all heads that share it.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ragspec.errors import InputError, ModelError, TokenizerMismatchError
from ragspec.types import PreTrainedModel
from ragspec.visual.call import ImageCall
from ragspec.visual.families import multimodal
from ragspec.visual.models.raster import Raster
from ragspec.visual.models.vq import ModelVQ, VQTokenizer

_ROUNDED = 0.05  # the most relative error of a code-book in half precision
_REQUEST = "Generate an image of {width}x{height} according to the following prompt:\n{prompt}"


class ChameleonTarget(multimodal.TextCodesTarget):
    """Chameleon or Anole (`ChameleonForConditionalGeneration`) as a target.

    The model's own forward excludes codes, so the target runs its decoder and head itself.

    Args:
        prompts: Token ids that end with the begin-of-image token.
    """

    kind = "chameleon"

    @staticmethod
    def parts_of(model: PreTrainedModel) -> tuple[PreTrainedModel, multimodal.Ids]:
        """Return the text decoder, and the codes."""
        return model.model, multimodal.codes_in_order(model.model.vocabulary_mapping.img2bpe)


class LuminaTarget(multimodal.RowEndsTarget):
    """Lumina-mGPT as a target; its prompts end with the begin, height and width of the image."""

    kind = "chameleon"

    @staticmethod
    def parts_of(model: PreTrainedModel) -> tuple[PreTrainedModel, multimodal.Ids]:
        """Return the text decoder, and the codes and the line end."""
        inner, codes = ChameleonTarget.parts_of(model)
        return inner, [*codes, model.model.vocabulary_mapping.vocab_map["<reserved08799>"]]


class Chameleon(multimodal.PromptFamily):
    """A `ChameleonForConditionalGeneration`; see `PromptFamily`.

    The template adds the separator and the begin-of-image token to a prompt; only image codes may
    follow. Guidance leads away from negative_prompt in the same template. By default that is the
    begin of text and the begin of image alone.

    Lumina-mGPT draws any height and width in steps of two codes. Its template asks for the size in
    words and adds the two tokens of the size; guidance leads away from those and the begin of image
    alone. A row-end token follows each row of codes.

    Args:
        vq: The decoder, which transformers' model lacks: the published file (`vqgan.ckpt`), or a
            folder or an object of diffusers' VQModel. Without one, calls support only output_type
            "latent", the codes. A model without its VQ model needs it.
    """

    kind = "chameleon"
    model_class = "ChameleonForConditionalGeneration"
    target: type[multimodal.TextCodesTarget] = ChameleonTarget
    guidance = 3.0

    def __init__(self, *inputs: Any, **options: Any) -> None:
        super().__init__(*inputs, **options)
        if hasattr(self.model.config, "z_loss_weight"):
            self.target, self.step, self.top_k = LuminaTarget, 2, 2000  # as in its solver
            self.raster = replace(self.raster, ends=1)

    @classmethod
    def complete(cls, model: PreTrainedModel, folder: Path, missing: set[str]) -> set[str]:
        """Repeat the norms that heads share, and remove a VQ model without any weights."""
        from safetensors import safe_open

        inner = {f"model.vqmodel.{name}" for name in model.model.vqmodel.state_dict()}
        if inner <= missing:
            model.model.vqmodel, missing = None, missing - inner
        norms = {name for name in missing if "_norm." in name}  # of queries and keys
        for file in folder.glob("*.safetensors") if norms else ():
            with safe_open(file, "pt") as tensors:
                for name in norms & {*tensors.keys()}:
                    weight, rows = model.get_parameter(name), tensors.get_tensor(name)
                    weight.data.copy_(rows.repeat_interleave(len(weight) // len(rows), 0))
                    missing.discard(name)
        return missing

    def decoder(self, vq: str | Path | nn.Module | VQTokenizer | None) -> ModelVQ | VQTokenizer:
        """Return a decoder that has the model's code-book; without `vq` the code-book alone."""
        inner, config = self.model.model.vqmodel, self.model.config.vq_config
        if vq is None:
            self._expect_decoder(inner)
            return ModelVQ(inner)
        # Codes are compared by plain distance, without normalisation.
        if isinstance(vq, str | Path):
            vq = VQTokenizer.from_pretrained(Path(vq).expanduser(), normalised=False)
        tokenizer = vq if isinstance(vq, VQTokenizer) else VQTokenizer(vq, normalised=False)
        book = tokenizer.model.quantize.embedding.weight.detach().float().to(self.model.device)
        expected = book if inner is None else ModelVQ(inner).codebook()
        size, most = [config.num_embeddings, config.embed_dim], _ROUNDED * expected.abs().mean()
        if list(book.shape) != size or (book - expected).abs().mean() > most:
            raise TokenizerMismatchError(
                f"got a decoder with a code-book of {list(book.shape)} that is not the model's, of "
                f"{size}; expected the one that it was trained with."
            )
        tokenizer.model.to(self.model.device)
        return tokenizer

    def usual_raster(self) -> Raster:
        """Return the square of the model's resolution."""
        side = max(1, int(self.model.config.vq_config.resolution) // self.codec.reduction)
        return Raster(side, side)

    def check(self, call: ImageCall) -> None:
        """Raise ModelError if the output needs a decoder and there is none."""
        super().check(call)
        if call.output_type != "latent" or call.on_image is not None:
            self._expect_decoder(self.vq)

    def pixels(self, codes: Tensor) -> Tensor:
        """Decode codes; raise ModelError without a decoder."""
        self._expect_decoder(self.vq)
        return super().pixels(codes)

    def _expect_decoder(self, decoder: object) -> None:
        if decoder is None:
            raise ModelError(
                "transformers' Chameleon has no decoder of pictures, and Lumina-mGPT no code-book. "
                "Expected vq=PATH for the pipeline, the published vqgan.ckpt of Chameleon or a "
                "VQModel of it, or a folder that save_pretrained wrote with vq. With a code-book, "
                "output_type='latent' needs none."
            )

    def ids(self, text: str, raster: Raster) -> list[int]:
        """Return the token ids of a text, the separator, the begin of an image and its size."""
        if self.step:
            height, width = (side * self.codec.reduction for side in raster.shape)
            text = _REQUEST.format(width=width, height=height, prompt=text)
        after = multimodal.mark(self.text_tokenizer, "sep_token", "<reserved08706>")
        begin = self._begin()
        known = self.model.model.vocabulary_mapping.vocab_map
        names = [f"<reserved{8800 + side // 2:05d}>" for side in raster.shape if self.step]
        if any(name not in known for name in names):
            last = int(max(name for name in known if name.startswith("<reserved"))[9:-1])
            raise InputError(
                f"got an image of {height} x {width} pixels; expected at most "
                f"{(last - 8800) * 2 * self.codec.reduction} in height and width: the model has no "
                "token for a longer side."
            )
        ids = multimodal.text_ids(self.text_tokenizer, f"{text}{after}{begin}", begin)
        return [*ids, *(known[name] for name in names)]

    def unconditional(self, ids: list[int], raster: Raster) -> list[int]:
        """Return the begin of text and of image, for Lumina-mGPT of image and its size."""
        if self.step:
            return ids[-3:]
        begin = self._begin()
        return multimodal.text_ids(self.text_tokenizer, begin, begin)

    def _begin(self) -> str:
        return multimodal.mark(self.text_tokenizer, "boi_token", "<racm3:break>")
