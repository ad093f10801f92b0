"""`ChameleonPipeline`: images by Chameleon and Anole (arXiv 2405.09818, 2407.06135)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from ragspec.errors import ModelError, TokenizerMismatchError
from ragspec.visual.models.raster import Raster
from ragspec.visual.models.transformers_targets import ChameleonTarget
from ragspec.visual.models.vq import BookAlone, VQTokenizer
from ragspec.visual.models.vq_checkpoint import JANUS
from ragspec.visual.pipeline.prompt_parts import mark, text_ids
from ragspec.visual.pipeline.prompted import PromptPipeline

_ROUNDED = 0.05  # of the size of its numbers, by which a code-book in half precision may be off


class ChameleonPipeline(PromptPipeline):
    """Draws with a `ChameleonForConditionalGeneration`; see `PromptPipeline`.

    A prompt is followed by the separator and the begin-of-image token; codes of images alone are
    drawn after it. Guidance leads away from negative_prompt in the same template, None being begin
    of text and of image alone.

    Attributes:
        vq: Transformers' model has no decoder, so give the published one (`vqgan.ckpt`), a folder
            or an object in the layout of diffusers' VQModel or of transformers' JanusVQVAE; without
            one there is output_type "latent", the codes.
    """

    kind = "chameleon"
    target_kind = ChameleonTarget
    guidance = 3.0

    def _vq(self, model: Any, vq: Any) -> Any:
        current = BookAlone(model.model.vqmodel)
        if vq is None:
            return current
        tokenizer = vq if isinstance(vq, VQTokenizer) else _opened(vq)
        book, known = tokenizer.model.quantize.embedding.weight, current.codebook()
        if book.shape != known.shape or _differ(book, known):
            raise TokenizerMismatchError(
                f"got a decoder with a code-book of {list(book.shape)} that is not the model's, of "
                f"{list(known.shape)}; expected the one that it was trained with."
            )
        tokenizer.model.to(model.device)
        return tokenizer

    def _raster_of(self, model: Any) -> Raster:
        config = model.model.vqmodel.config
        side = max(1, int(config.resolution) // BookAlone(model.model.vqmodel).reduction)
        return Raster(side, side)

    def _check_decoder(self, output_type: str) -> None:
        if output_type != "latent" and self.vq is None:
            raise ModelError(
                f"got output_type {output_type!r}; transformers' Chameleon has no decoder of "
                "pictures. Expected vq=PATH for the pipeline, the vqgan.ckpt that was published "
                "with the model or a VQModel or JanusVQVAE of it, or output_type='latent'."
            )

    def decode(self, codes: Any, output_type: str = "pil") -> Any:
        """Return the images of codes i64 [B, h, w]; raises ModelError without a decoder."""
        self._check_decoder(output_type)
        return super().decode(codes, output_type)

    def _ids(self, text: str, raster: Raster) -> list[int]:
        begin = self._begin()
        after = mark(self.text_tokenizer, "sep_token", "<reserved08706>")
        return text_ids(self.text_tokenizer, f"{text}{after}{begin}", begin)

    def _begin(self) -> str:
        return mark(self.text_tokenizer, "boi_token", "<racm3:break>")

    def _nothing(self, ids: list[int], raster: Raster) -> list[int]:
        begin = self._begin()
        return text_ids(self.text_tokenizer, begin, begin)


def _differ(book: Tensor, known: Tensor) -> bool:
    """Tell whether two code-books differ by more than how their numbers were rounded."""
    result = book.detach().float().to(known.device)
    return bool((result - known).abs().mean() > _ROUNDED * known.abs().mean())


def _opened(vq: Any) -> VQTokenizer:
    """Return the tokenizer of a model, a file or a folder; codes are told by plain distance."""
    if not isinstance(vq, str | Path):
        return VQTokenizer(vq, normalised=False)
    config = Path(vq).expanduser() / "config.json"
    if config.is_file() and _model_type(config) == JANUS:
        from transformers.models.janus.modeling_janus import JanusVQVAE

        try:
            vqvae = JanusVQVAE.from_pretrained(config.parent, local_files_only=True)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise ModelError(
                f"{vq} does not load as a JanusVQVAE ({error}); expected what its "
                "save_pretrained wrote."
            ) from error
        return VQTokenizer(vqvae, normalised=False)
    return VQTokenizer.from_pretrained(Path(vq).expanduser(), normalised=False)


def _model_type(config: Path) -> Any:
    try:
        record = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record.get("model_type") if isinstance(record, dict) else None
