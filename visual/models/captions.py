"""From a prompt to the features that a text-conditional image model reads.

The bundled image models read the token vectors of the bundled static embedder (`starter-embedder`),
one row a token, zeros behind the last: small, and no network to run. Models that were trained on
another text encoder's features are given those as `prompt_embeds`.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ragspec.errors import InputError, ModelError, ModelNotFoundError

EMBEDDER = "starter-embedder"
_WEIGHT = "embedding.weight"


class CaptionEncoder:
    """Turns texts into features f32 [B, L, d]: the vectors of their tokens, zeros behind.

    tokenizer: of the tokenizers package. vectors f32 [V, d]: one a token. length: L; longer texts
    are cut there, with a warning.
    """

    def __init__(self, tokenizer: Any, vectors: torch.Tensor, length: int) -> None:
        self.tokenizer = tokenizer
        self.vectors = vectors
        self.length = length

    @classmethod
    def from_pretrained(cls, folder: Path, length: int) -> CaptionEncoder:
        """Read a static embedder's folder (tokenizer.json and model.safetensors).

        Raises ModelNotFoundError where a file is missing, ModelError where one does not load.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load_file
        from tokenizers import Tokenizer

        files = folder / "tokenizer.json", folder / "model.safetensors"
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise ModelNotFoundError(
                f"{folder} lacks {', '.join(missing)}; expected a static embedder's folder."
            )
        try:
            weights = load_file(files[1])
            return cls(Tokenizer.from_file(str(files[0])), weights[_WEIGHT].float(), length)
        except (SafetensorError, KeyError) as error:
            raise ModelError(
                f"{folder} holds no static embedder ({error}); expected {_WEIGHT} in its "
                "model.safetensors."
            ) from error

    @property
    def width(self) -> int:
        """The length of a feature, d."""
        return int(self.vectors.shape[1])

    def __call__(self, texts: Sequence[str]) -> torch.Tensor:
        """Return the features f32 [B, L, d] of texts.

        Raises InputError for a text that is empty or holds no token that the embedder knows.
        """
        features = torch.zeros(len(texts), self.length, self.width)
        found = self.tokenizer.encode_batch(list(texts), add_special_tokens=False)
        for row, (text, encoding) in enumerate(zip(texts, found, strict=True)):
            if not encoding.ids:
                raise InputError(
                    f"got the prompt {text!r}, which holds no word; expected a few words such as "
                    "'red heart'."
                )
            if len(encoding.ids) > self.length:
                warnings.warn(
                    f"the prompt {text!r} has {len(encoding.ids)} tokens; the model reads the "
                    f"first {self.length}.",
                    UserWarning,
                    stacklevel=2,
                )
            ids = encoding.ids[: self.length]
            features[row, : len(ids)] = self.vectors[ids]
        return features
