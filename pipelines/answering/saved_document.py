"""A prefilled document on disk: its text, and its keys and values.

The store is complete or absent, and every file is hashed. Opening maps the keys and values into
memory without reading them. They belong to one model, dtype and tokenizer.
"""

import json
import shutil
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from ragspec.engine.engine import Engine
from ragspec.errors import StoreError
from ragspec.pipelines.answering.template import PromptTemplate
from ragspec.retrievers.fingerprints import check_prints, prints_of_engine
from ragspec.retrievers.search.documents import Document
from ragspec.retrievers.search.passage_index import read_document as parse_document
from ragspec.storage.manifest import Contents
from ragspec.storage.store import open_store, publish
from ragspec.verification.sequence_cache import Layers

KIND = "saved document"
CACHE, DOCUMENT = "cache.safetensors", "document.json"


@dataclass(frozen=True, slots=True)
class SavedDocument:
    """A document, the template of its questions, and its keys and values.

    Attributes:
        token_range: The document's own tokens that are read, from and to; None for all.
        tokens: Tokens of the prompt up to the end of the document [T].
        layers: Keys and values of `tokens`, by layer; none before it is read.
    """

    document: Document
    template: PromptTemplate
    token_range: tuple[int, int] | None = None
    tokens: tuple[int, ...] = ()
    layers: Layers = field(default_factory=dict)


def save_document(path: Path, saved: SavedDocument, engine: Engine) -> None:
    """Write a prefilled document to a folder; raise StoreError if it cannot be written."""

    def fill(folder: Path) -> Contents:
        from safetensors.torch import save_file

        pairs = ((n, i, part) for n, pair in saved.layers.items() for i, part in enumerate(pair))
        tensors = {f"{n}.{i}": part.detach().cpu().contiguous() for n, i, part in pairs}
        record = asdict(replace(saved, layers={}))
        del record["layers"]  # of the other file
        save_file(tensors, folder / CACHE)
        (folder / DOCUMENT).write_text(json.dumps(record, ensure_ascii=False), encoding="utf-8")
        shutil.copymode(folder / DOCUMENT, folder / CACHE)  # `save_file` writes for the owner alone
        parameters = {
            "dtype": str(engine.target.dtype),
            "name": saved.document.name,
            "prompt_tokens": len(saved.tokens),
        }
        return Contents(parameters, prints_of_engine(engine))

    publish(Path(path), KIND, fill)


def open_document(path: Path, engine: Engine) -> SavedDocument:
    """Open a saved document; raise StoreError if it is damaged or of another model or dtype."""
    from safetensors.torch import load_file

    store = open_store(path, KIND, verify="full")
    what = f"the saved document {path}"
    check_prints(what, store.manifest.fingerprints, prints_of_engine(engine))
    dtype = engine.target.dtype
    if store.manifest.parameters.get("dtype") != str(dtype):
        raise StoreError(
            f"{what} holds numbers of {store.manifest.parameters.get('dtype')}, the model works in "
            f"{dtype}; load the model in that type (dtype=), or save the document again."
        )
    text, cache = store.file(DOCUMENT), store.file(CACHE)
    try:
        record = json.loads(text.read_text(encoding="utf-8"))
        template = record["template"]
        tensors = load_file(cache, device=str(engine.target.device))
        return SavedDocument(
            parse_document(record["document"]),
            PromptTemplate(**template | {"stop": tuple(template["stop"])}),
            record["token_range"] and tuple(record["token_range"]),
            tuple(record["tokens"]),
            {n: (tensors[f"{n}.0"], tensors[f"{n}.1"]) for n in range(len(tensors) // 2)},
        )
    except Exception as error:  # the file was written by something else
        raise StoreError(f"{path} cannot be read ({error}); save the document again.") from error
