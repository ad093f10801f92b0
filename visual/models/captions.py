"""From a prompt to the features that a text-conditional image model reads.

The bundled image models read the token vectors of the bundled static embedder (`starter-embedder`),
one row a token, zeros behind the last: small, and no network to run. Models that were trained on
another text encoder's features, such as LlamaGen's on those of Flan-T5, are given that encoder.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ragspec.errors import InputError, ModelError, ModelNotFoundError
from ragspec.models.resolve import resolve_model

EMBEDDER = "starter-embedder"
# Texts to features: [R, L, d], or [n, d] for each.
Captions = Callable[[Sequence[str]], Tensor | list[Tensor]]
_WEIGHT = "embedding.weight"


class CaptionEncoder:
    """Turns texts into features f32 [B, L, d]: the vectors of their tokens, zeros behind.

    tokenizer: of the tokenizers package. vectors f32 [V, d]: one a token. length: L; longer texts
    are cut there, with a warning.
    """

    def __init__(self, tokenizer: Any, vectors: Tensor, length: int) -> None:
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

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """Return the features f32 [B, L, d] of texts.

        Raises InputError for a text that is empty or holds no token that the embedder knows.
        """
        features = torch.zeros(len(texts), self.length, self.width)
        result = self.tokenizer.encode_batch(list(texts), add_special_tokens=False)
        for row, (text, encoding) in enumerate(zip(texts, result, strict=True)):
            if not encoding.ids:
                raise InputError(
                    f"got the prompt {text!r}, which holds no word; expected a few words such as "
                    "'red heart'."
                )
            if len(encoding.ids) > self.length:
                _warn_of_length(text, len(encoding.ids), self.length)
            ids = encoding.ids[: self.length]
            features[row, : len(ids)] = self.vectors[ids]
        return features


class TextEncoder:
    """Turns texts into the last states of a transformers encoder, as LlamaGen does with Flan-T5.

    tokenizer, model: of transformers. length: most tokens of a text; longer ones are cut there,
    with a warning.
    """

    def __init__(self, tokenizer: Any, model: Any, length: int) -> None:
        self.tokenizer = tokenizer
        self.model = model
        self.length = length

    @classmethod
    def from_pretrained(
        cls, name: str | Path, length: int, device: torch.device, dtype: torch.dtype
    ) -> TextEncoder:
        """Load the encoder of a folder or a model id; raises ModelNotFoundError, ModelError."""
        from transformers import AutoConfig, AutoModelForTextEncoding, AutoTokenizer

        folder = resolve_model(str(name)).folder
        try:
            config = AutoConfig.from_pretrained(folder)
            encoder = AutoModelForTextEncoding.from_pretrained(folder, config=config, dtype=dtype)
            tokenizer = AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError, KeyError) as error:
            raise ModelError(
                f"{folder} holds no text encoder that transformers can load ({error}); expected "
                "one such as T5 with its tokenizer, the one that the image model was trained with."
            ) from error
        return cls(tokenizer, encoder.to(device).eval(), length)

    @property
    def width(self) -> int:
        """The length of a feature, d."""
        return int(self.model.config.hidden_size)

    @torch.no_grad()
    def __call__(self, texts: Sequence[str]) -> list[Tensor]:
        """Return the features [n, d] of each text, n its tokens, the end token included."""
        read = self.tokenizer(
            list(texts), add_special_tokens=True, padding=True, return_tensors="pt"
        )
        for text, count in zip(texts, read.attention_mask.sum(1).tolist(), strict=True):
            if count > self.length:
                _warn_of_length(text, count, self.length)
        ids, mask = (part[:, : self.length] for part in (read.input_ids, read.attention_mask))
        ids, mask = ids.to(self.model.device), mask.to(self.model.device)
        states = self.model(input_ids=ids, attention_mask=mask).last_hidden_state
        return [row[current.bool()] for row, current in zip(states, mask, strict=True)]


def _warn_of_length(text: str, count: int, length: int) -> None:
    warnings.warn(
        f"the prompt {text!r} has {count} tokens; the model reads the first {length}.",
        UserWarning,
        stacklevel=3,
    )
