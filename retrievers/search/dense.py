"""Dense search: embed text as unit vectors, and search among them.

A sentence-transformers model embeds the text. Folders with only a static embedding table, such as
the bundled one, are read directly: the same vectors without importing sentence-transformers.
"""

import json
import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from ragspec.errors import InputError, ModelError
from ragspec.models.checks import check_embedder, read_config
from ragspec.models.resolve import fingerprint
from ragspec.retrievers.search.documents import ProgressCallback
from ragspec.retrievers.search.nearest import FLAT, Exact, Floats, Nearest, Numbers, build_nearest

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

DEFAULT_EMBEDDER = "starter-embedder"
STATIC_FILES = "tokenizer.json", "model.safetensors"
WORDLLAMA_FILES = (
    "tokenizers/l2_supercat_tokenizer_config.json",
    "weights/l2_supercat_256.safetensors",
)
BATCH = 256
OPTIONS: Any = {"local_files_only": True, "model_kwargs": {"use_safetensors": True}}
T = TypeVar("T")
ROUND = 2048  # texts between two calls of `on_progress`


@runtime_checkable
class Embedder(Protocol):
    """A model that embeds text."""

    @property
    def name(self) -> str:
        """The name or path that loads the model again."""

    @property
    def fingerprint(self) -> str:
        """A hash of the model's weights and tokenizer, which identifies it under any name."""

    def encode(self, texts: Sequence[str], *, query: bool = False) -> Floats:
        """Return unit vectors f32 [texts, dimensions]; some models treat queries differently."""


EmbedderSpec = str | Path | Embedder | None


class StaticEmbedder:
    """A table of token vectors; the vector of a text is their normalized mean."""

    def __init__(
        self, name: str, folder: Path, fingerprint: str, files: tuple[str, str] = STATIC_FILES
    ) -> None:
        from safetensors.torch import load_file
        from tokenizers import Tokenizer

        self.name, self.fingerprint = name, fingerprint
        tokenizer, weights = (str(folder / file) for file in files)
        self._tokenizer = Tokenizer.from_file(tokenizer)
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        (table,) = load_file(weights).values()
        self._table = table.float()

    def encode(self, texts: Sequence[str], *, query: bool = False) -> Floats:
        """Return unit vectors f32 [texts, dimensions]; a text without known tokens gives zeros."""
        rows = [self._table[:0]]
        for start in range(0, len(texts), BATCH):
            some = list(texts[start : start + BATCH])
            encodings = self._tokenizer.encode_batch_fast(some, add_special_tokens=False)
            ids = [encoding.ids for encoding in encodings]
            flat = torch.tensor([token for row in ids for token in row], dtype=torch.long)
            starts = torch.tensor([0] + [len(row) for row in ids[:-1]]).cumsum(0)
            means = torch.nn.functional.embedding_bag(flat, self._table, starts, mode="mean")
            rows.append(torch.nn.functional.normalize(means, dim=-1))
        return torch.cat(rows).numpy()

    def rarity(self, word: str) -> float:
        """Return how rare a word is in the text that the tokenizer was trained on.

        Tokens are numbered by frequency, so that it is the logarithm of a rank, of each token.
        """
        tokens = self._tokenizer.encode(" " + word, add_special_tokens=False).ids
        return sum(math.log(token + 2) for token in tokens)


class SentenceEmbedder:
    """Any sentence-transformers model, imported and loaded at the first `encode`."""

    def __init__(self, name: str, folder: Path, fingerprint: str) -> None:
        self.name, self.fingerprint, self._folder = name, fingerprint, folder

    @cached_property
    def model(self) -> "SentenceTransformer":
        """The SentenceTransformer object."""
        from sentence_transformers import SentenceTransformer

        return load_safely(partial(SentenceTransformer, str(self._folder), **OPTIONS), self._folder)

    def encode(self, texts: Sequence[str], *, query: bool = False) -> Floats:
        """Return unit vectors f32 [texts, dimensions], with the model's own prompts."""
        if not texts:
            return np.zeros((0, int(self.model.get_embedding_dimension())), np.float32)
        encode = self.model.encode_query if query else self.model.encode_document
        vectors = encode(list(texts), normalize_embeddings=True, show_progress_bar=False)
        # In half precision a text without known tokens comes back as NaN; zeros match nothing.
        return np.nan_to_num(np.asarray(vectors, dtype=np.float32))

    def warn_of_cuts(self, texts: Sequence[str]) -> None:
        """Warn if texts are longer than what the model reads of one."""
        most = self.model.max_seq_length or math.inf
        long = [text for text in texts if len(text) > most]
        rows = self.model.tokenizer(long, verbose=False)["input_ids"] if long else []
        if cut := sum(len(row) > most for row in rows):
            warnings.warn(
                f"{self.name} reads {most} tokens of a passage, and {cut} of {len(texts)} have "
                "more, which dense search ignores. Name an embedder that reads more.",
                stacklevel=3,
            )


def load_safely(load: Callable[[], T], folder: Path) -> T:
    """Load a model of sentence-transformers; raise ModelError if it needs code or is damaged."""
    try:
        return load()
    except (MemoryError, RuntimeError):
        raise
    except Exception as error:  # tokenizers and safetensors share no class of errors
        reason = "it needs code of its folder, which ragspec does not run"
        raise ModelError(
            f"{folder} cannot be loaded ({reason if 'remote_code' in str(error) else error}); "
            "expected a model of sentence-transformers. Download it again, or name another."
        ) from error


def load_embedder(name: str | Path | Embedder = DEFAULT_EMBEDDER) -> Embedder:
    """Return the named embedder, which is bundled, a local folder or a hub model.

    Raises:
        MissingModelError: The name leads to no model.
        ModelError: It is no embedder, or it is damaged.
    """
    if not isinstance(name, str | Path):
        if not hasattr(name, "encode"):
            raise InputError(f"got {name!r} as embedder; expected a name, a path or an Embedder.")
        return name
    folder = check_embedder(name).folder
    is_place = os.path.isdir(name) and os.path.samefile(name, folder)
    name = os.path.abspath(name) if is_place else str(name)  # indexes find it from anywhere
    prints = "".join(fingerprint(folder))
    embedder: Callable[..., Embedder] = StaticEmbedder if is_static(folder) else SentenceEmbedder
    return load_safely(partial(embedder, name, folder, prints), folder)


def load_wordllama() -> StaticEmbedder | None:
    """Return the word vectors of the package wordllama, None without it; it is never imported.

    Raises:
        ModelError: Its files are damaged, or of another release.
    """
    spec = find_spec("wordllama")
    for root in (spec and spec.submodule_search_locations) or ():
        try:
            return StaticEmbedder("wordllama", Path(root), "", WORDLLAMA_FILES)
        except Exception as error:  # tokenizers and safetensors share no class of errors
            raise ModelError(
                f"the vectors of wordllama in {root} cannot be read ({error}); expected those of "
                "release 0.4. Run `pip install --force-reinstall 'wordllama>=0.4,<0.5'`."
            ) from error
    return None


def is_static(folder: Path) -> bool:
    """Tell whether a folder holds only a static embedding, perhaps with a normalizing layer."""
    modules = folder / "modules.json"
    if not modules.is_file() or not (folder / "model.safetensors").is_file():
        return False
    settings = folder / "config_sentence_transformers.json"
    config = read_config(settings) if settings.is_file() else {}
    if any((config.get("prompts") or {}).values()) or config.get("truncate_dim"):
        return False
    types = [module["type"].rsplit(".", 1)[-1] for module in json.loads(modules.read_bytes())]
    return types[:1] == ["StaticEmbedding"] and set(types[1:]) <= {"Normalize"}


class DenseIndex:
    """Unit vectors f32 [P, dimensions] of P passages.

    Args:
        nearest: Finds the candidates of a search, which are then scored in float64; None is exact.
    """

    def __init__(self, vectors: Floats, embedder: Embedder, nearest: Nearest | None = None) -> None:
        self.vectors = np.ascontiguousarray(vectors)
        self.embedder = embedder
        self.nearest = nearest or Exact(self.vectors)

    @classmethod
    def build(
        cls,
        texts: Sequence[str],
        embedder: Embedder,
        *,
        kind: str = FLAT,
        known: Mapping[str, Floats] = MappingProxyType({}),
        on_progress: ProgressCallback = lambda what, done, total: None,
    ) -> "DenseIndex":
        """Embed the passages' texts and index their vectors.

        Args:
            kind: One of `nearest.KINDS`.
            known: Vectors of texts that need not be embedded again.

        Raises:
            MissingExtraError: The kind needs faiss, which is missing.
        """
        new = list(dict.fromkeys(text for text in texts if text not in known))
        embedded = dict(known)
        for start in range(0, len(new), ROUND):
            on_progress("embedding passages", start, len(new))
            some = new[start : start + ROUND]
            embedded.update(zip(some, embedder.encode(some), strict=True))
        if isinstance(embedder, SentenceEmbedder):
            embedder.warn_of_cuts(new)
        vectors = np.stack([embedded[text] for text in texts])
        on_progress("indexing vectors", 0, len(vectors))
        return cls(vectors, embedder, build_nearest(vectors, kind))

    def search(self, query: str, k: int) -> list[tuple[int, float]]:
        """Return the k best (passage number, cosine), best first."""
        return self.search_vectors(self.embed([query]), k)[0]

    def embed(self, queries: Sequence[str]) -> Floats:
        """Return vectors of queries f32 [Q, d]; raise InputError if the index has another d."""
        vectors = self.embedder.encode(queries, query=True)
        if vectors.shape[1] != self.vectors.shape[1]:
            raise InputError(
                f"The embedder gives {vectors.shape[1]} dimensions, the index has "
                f"{self.vectors.shape[1]}; use the embedder that the index was built with."
            )
        return vectors

    def search_vectors(self, queries: Floats, k: int) -> list[list[tuple[int, float]]]:
        """Return the k best (passage number, cosine) for each vector, best first.

        All candidates are scored again, so a result depends neither on the other queries nor on k.
        Of equal scores the lower number comes first.
        """
        rankings = []
        for query, numbers in zip(queries, self.nearest.candidates(queries, k), strict=True):
            scores = self.scores(query, numbers)
            best = np.lexsort((numbers, -scores))[:k]
            rankings.append([*zip(numbers[best].tolist(), scores[best].tolist(), strict=True)])
        return rankings

    def scores(self, query: Floats, numbers: Sequence[int] | Numbers) -> NDArray[np.float64]:
        """Return a vector's cosines with some passages; each depends on its passage alone."""
        rows = self.vectors[np.asarray(numbers, np.int64)].astype(np.float64)
        return np.asarray((rows * query.astype(np.float64)).sum(axis=1))
