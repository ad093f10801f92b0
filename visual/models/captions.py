"""Caption encoders: from prompts to the features that a text-conditional image model reads.

The bundled image models read the token vectors of the bundled static embedder (`starter-embedder`),
one row per token, padded with zeros. It is small, and no network has to run. Models trained on
another text encoder's features need that encoder: LlamaGen's read those of Flan-T5.
"""

import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from unicodedata import category

import torch
from torch import Tensor

from ragspec.errors import InputError
from ragspec.models.load import LOCAL
from ragspec.models.resolve import resolve_model
from ragspec.visual.loading import expect_readable

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

EMBEDDER = "starter-embedder"
_QUOTES = str.maketrans("`\u00b4\u00ab\u00bb\u201c\u201d\u00a8\u2018\u2019", '"' * 7 + "'" * 2)
# Maps texts to features: one tensor [R, L, d], or a tensor [n, d] for each text.
Captions = Callable[[Sequence[str]], Tensor | list[Tensor]]


@dataclass(slots=True, eq=False)
class CaptionEncoder:
    """Encodes texts as their token vectors, padded with zeros: features f32 [B, L, d].

    Args:
        vectors: One vector per token, f32 [V, d].
        length: L, in tokens. Longer texts are truncated with a warning.
    """

    tokenizer: "Tokenizer"
    vectors: Tensor
    length: int

    @classmethod
    def from_pretrained(cls, folder: Path, length: int) -> "CaptionEncoder":
        """Load the folder of the bundled embedder (tokenizer.json and model.safetensors)."""
        from safetensors.torch import load_file
        from tokenizers import Tokenizer

        vectors = load_file(folder / "model.safetensors")["embedding.weight"].float()
        return cls(Tokenizer.from_file(str(folder / "tokenizer.json")), vectors, length)

    @property
    def width(self) -> int:
        """The size of a feature, d."""
        return int(self.vectors.shape[1])

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """Return the features f32 [B, L, d] of texts; raise InputError for one without tokens."""
        features = torch.zeros(len(texts), self.length, self.width)
        encodings = self.tokenizer.encode_batch(list(texts), add_special_tokens=False)
        _warn_of_length([len(each.ids) for each in encodings], self.length)
        for row, (text, encoding) in enumerate(zip(texts, encodings, strict=True)):
            if not encoding.ids:
                raise InputError(
                    f"the prompt {text!r} holds no word; expected words such as 'red heart'."
                )
            ids = encoding.ids[: self.length]
            features[row, : len(ids)] = self.vectors[ids]
        return features


@dataclass(slots=True, eq=False)
class TextEncoder:
    """Encodes texts as the last hidden states of a transformers encoder (LlamaGen: Flan-T5).

    Texts are read in lower case, with plain dashes, quotes and spaces, as LlamaGen's training did.
    It also removed addresses, brackets and other marks, which stay here.

    Args:
        length: Maximum tokens per text, end token included. Longer texts are cut with a warning.
    """

    tokenizer: "PreTrainedTokenizerBase"
    model: "PreTrainedModel"
    length: int

    @classmethod
    def from_pretrained(
        cls, name: str | Path, length: int, device: torch.device, dtype: torch.dtype
    ) -> "TextEncoder":
        """Load an encoder from a folder or by model id; raise ModelError if it does not load."""
        from transformers import AutoModelForTextEncoding, AutoTokenizer

        folder = resolve_model(str(name)).folder
        expected = "one such as T5 with its tokenizer, which the image model was trained with."
        with expect_readable(f"{folder} holds no text encoder that loads", expected):
            encoder = AutoModelForTextEncoding.from_pretrained(folder, dtype=dtype, **LOCAL)
            tokenizer = AutoTokenizer.from_pretrained(folder, **LOCAL)
        return cls(tokenizer, encoder.to(device).eval(), length)

    @property
    def width(self) -> int:
        """The size of a feature, d."""
        return int(self.model.config.hidden_size)

    @torch.no_grad()
    def __call__(self, texts: Sequence[str]) -> list[Tensor]:
        """Return the features [n, d] of each text, one per token including the end token."""
        texts = [_plain(text) for text in texts]
        _warn_of_length([len(ids) for ids in self.tokenizer(texts).input_ids], self.length)
        form = {"padding": True, "truncation": True, "max_length": self.length}
        read = self.tokenizer(texts, **form, return_tensors="pt").to(self.model.device)
        ids, mask = read.input_ids, read.attention_mask
        states = self.model(input_ids=ids, attention_mask=mask).last_hidden_state
        return [row[real.bool()] for row, real in zip(states, mask, strict=True)]


def _plain(text: str) -> str:
    """Return a text in lower case with plain dashes, quotes and spaces."""
    dashed = "".join("-" if category(each) == "Pd" else each for each in text.lower())
    return " ".join(re.sub("-+", "-", dashed.translate(_QUOTES)).split())


def _warn_of_length(counts: Sequence[int], length: int) -> None:
    if max(counts, default=0) > length:
        text = f"a prompt has {max(counts)} tokens; the model reads the first {length}."
        warnings.warn(text, stacklevel=3)  # without the prompt: Python remembers every warning
