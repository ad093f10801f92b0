"""`ChameleonPipeline`: images by Chameleon and Anole (arXiv 2405.09818, 2407.06135)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from ragspec.errors import ModelError, TokenizerMismatchError
from ragspec.visual.models.raster import Raster
from ragspec.visual.models.transformers_targets import ChameleonTarget
from ragspec.visual.models.vq import ModelVQ, VQTokenizer
from ragspec.visual.models.vq_checkpoint import JANUS
from ragspec.visual.pipeline.folder import kind_of
from ragspec.visual.pipeline.prompt_parts import mark, text_ids
from ragspec.visual.pipeline.prompted import PromptPipeline

_ROUNDED = 0.05  # the most relative error of a code-book in half precision


class ChameleonPipeline(PromptPipeline):
    """Generates with a `ChameleonForConditionalGeneration`; see `PromptPipeline`.

    The template adds the separator and the begin-of-image token to a prompt; only image codes may
    follow. Guidance leads away from negative_prompt in the same template. By default that is the
    begin of text and the begin of image alone.

    Args:
        vq: The decoder, which transformers' model lacks: the published file (`vqgan.ckpt`), or a
            folder or an object in the layout of diffusers' VQModel or transformers' JanusVQVAE.
            Without one, calls support only output_type "latent", the codes.
    """

    target_kind = ChameleonTarget
    guidance = 3.0

    def _vq(self, model: Any, vq: Any) -> Any:
        model_book = ModelVQ(model.model.vqmodel)
        if vq is None:
            return model_book
        tokenizer = vq if isinstance(vq, VQTokenizer) else _opened(vq)
        book, expected = tokenizer.model.quantize.embedding.weight, model_book.codebook()
        if book.shape != expected.shape or _differ(book, expected):
            raise TokenizerMismatchError(
                f"got a decoder with a code-book of {list(book.shape)} that is not the model's, of "
                f"{list(expected.shape)}; expected the one that it was trained with."
            )
        tokenizer.model.to(model.device)
        return tokenizer

    def _raster_of(self, model: Any) -> Raster:
        config = model.model.vqmodel.config
        side = max(1, int(config.resolution) // ModelVQ(model.model.vqmodel).reduction)
        return Raster(side, side)

    def _check_decoder(self, output_type: str) -> None:
        if output_type != "latent" and self.vq is None:
            raise ModelError(
                f"got output_type {output_type!r}; transformers' Chameleon has no decoder of "
                "pictures. Expected vq=PATH for the pipeline, the vqgan.ckpt that was published "
                "with the model or a VQModel or JanusVQVAE of it, or output_type='latent'."
            )

    def _ids(self, text: str, raster: Raster) -> list[int]:
        begin = self._begin()
        after = mark(self.text_tokenizer, "sep_token", "<reserved08706>")
        return text_ids(self.text_tokenizer, f"{text}{after}{begin}", begin)

    def _begin(self) -> str:
        return mark(self.text_tokenizer, "boi_token", "<racm3:break>")

    def _nothing(self, ids: list[int], raster: Raster) -> list[int]:
        begin = self._begin()
        return text_ids(self.text_tokenizer, begin, begin)


def _differ(book: Tensor, expected: Tensor) -> bool:
    """Return whether two code-books differ by more than rounding to half precision explains."""
    difference = book.detach().float().to(expected.device) - expected
    return bool(difference.abs().mean() > _ROUNDED * expected.abs().mean())


def _opened(vq: Any) -> VQTokenizer:
    """Open a decoder; its code-book is compared by plain distance, without normalisation."""
    if not isinstance(vq, str | Path):
        return VQTokenizer(vq, normalised=False)
    path = Path(vq).expanduser()
    if kind_of(path) == JANUS:
        from transformers.models.janus.modeling_janus import JanusVQVAE

        try:
            vqvae = JanusVQVAE.from_pretrained(path, local_files_only=True)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise ModelError(
                f"{vq} does not load as a JanusVQVAE ({error}); expected what its "
                "save_pretrained wrote."
            ) from error
        return VQTokenizer(vqvae, normalised=False)
    return VQTokenizer.from_pretrained(path, normalised=False)
