"""The autoencoder, the iterations and the checks of a pipeline over masked latents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ragspec.errors import InputError, ModelNotFoundError, UnsupportedModelError
from ragspec.visual.masked.model import MaskedModel
from ragspec.visual.masked.schedule import masked_counts
from ragspec.visual.models.kl import KLAutoencoder
from ragspec.visual.models.vq import VQTokenizer
from ragspec.visual.pipeline.saved_setup import rule_record

Autoencoder = VQTokenizer | KLAutoencoder
ITERATIONS = 64  # the default in plain decoding; fewer if there are fewer latents


def iterations_of(inputs: int | None, places: int, drafted: bool) -> int:
    """Return the iterations of an image.

    Raises:
        InputError: They are below 1 or above `places`, or differ from `places` with a drafter.
    """
    if inputs is None:
        return places if drafted else min(ITERATIONS, places)
    masked_counts(places, inputs)  # raises InputError
    if drafted and inputs != places:
        raise InputError(
            f"got {inputs} iterations with a drafter; expected {places}, one a latent: drafts are "
            "judged as if drawn one after the other. Leave iterations out, or the drafter."
        )
    return inputs


def autoencoder_of(path: Path, allow_namespace: bool) -> Autoencoder:
    """Open the autoencoder of a file or folder, a `VQTokenizer` if the folder's config says so."""
    config = path / "config.json"
    if config.is_file() and '"VQModel"' in config.read_text(encoding="utf-8"):
        return VQTokenizer.from_pretrained(path)
    if not path.exists():
        raise ModelNotFoundError(
            f"got the autoencoder {str(path)!r}, which does not exist; expected a folder or a file "
            "such as kl16.ckpt."
        )
    return KLAutoencoder.from_pretrained(path, allow_namespace=allow_namespace)


def masked_record(pipe: Any) -> dict[str, Any]:
    """Return the settings of a masked pipeline to save."""
    schedule, drafts = pipe.schedule, pipe.drafts
    record = {"iterations": pipe.iterations, "steps": schedule.steps, "floor": schedule.floor}
    record |= {"batch_size": pipe.batch_size, "drafter": pipe.drafter_name or "none"}
    if drafts is not None:
        record |= {"window": drafts.window, "prefill": drafts.prefill, **rule_record(pipe)}
    return record


def check_parts(model: Any, autoencoder: Any) -> None:
    """Raise UnsupportedModelError or InputError unless model and autoencoder fit together."""
    if not isinstance(model, MaskedModel):
        raise UnsupportedModelError(
            f"got a {type(model).__name__}; expected a MaskedModel. Causal models of latents are "
            "drawn with by LatentPipeline, models of codes by ImagePipeline."
        )
    if not isinstance(autoencoder, VQTokenizer | KLAutoencoder):
        raise UnsupportedModelError(
            f"got a {type(autoencoder).__name__} as autoencoder; expected a KLAutoencoder or a "
            "VQTokenizer. Wrap a diffusers model in one of them."
        )
    if autoencoder.width != model.config.latent_dim:
        raise InputError(
            f"got an autoencoder with latents of {autoencoder.width} numbers for a model of "
            f"{model.config.latent_dim}; expected the one that the model was trained on."
        )
