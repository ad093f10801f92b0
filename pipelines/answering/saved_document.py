"""A prefilled document on disk: its text, and its keys and values.

The store is complete or absent, and every file is hashed. Opening maps the keys and values into
memory without reading them. They belong to one model, dtype and tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ragspec.errors import StoreError
from ragspec.pipelines.answering.template import PromptTemplate
from ragspec.retrievers.fingerprints import check_prints, prints_of
from ragspec.retrievers.search.documents import Document
from ragspec.retrievers.search.passage_index import read_document as parse_document
from ragspec.storage.manifest import Contents, Verify
from ragspec.storage.store import OpenStore, open_store, publish
from ragspec.verification.sequence_cache import Layers

if TYPE_CHECKING:
    from ragspec.engine.engine import Engine

KIND = "saved document"
LAYERS, DOCUMENT, STATES = "layers.bin", "document.json", "states.bin"


@dataclass(frozen=True, slots=True)
class SavedDocument:
    """A prefilled document, with the template of its questions.

    Attributes:
        tokens: Tokens of the prompt up to the end of the document [T].
        part: The document's own tokens that were read, from and to; None for all.
        characters: The same part in characters of its text.
        layers: Keys and values of `tokens`, by layer; none if they are in the prefix cache.
        states: Inputs of the output head at `tokens` [copies, T, H], for drafters that need hidden
            states; None if not requested.
    """

    document: Document
    template: PromptTemplate
    tokens: tuple[int, ...]
    part: tuple[int, int] | None
    characters: tuple[int, int]
    layers: Layers
    states: Tensor | None = None


def save_document(path: Path, saved: SavedDocument, engine: Engine) -> None:
    """Write a prefilled document to a folder.

    Raises:
        StoreError: The folder cannot be written.
    """

    def fill(folder: Path) -> Contents:
        layers = [part for number in sorted(saved.layers) for part in saved.layers[number]]
        states = [] if saved.states is None else [saved.states]
        try:
            shapes = _write(folder / LAYERS, layers)
            shape = _write(folder / STATES, states) if states else []
            facts = {
                "document": asdict(saved.document),
                "template": asdict(saved.template),
                "tokens": list(saved.tokens),
                "part": saved.part,
                "characters": saved.characters,
            }
            text = json.dumps(facts, ensure_ascii=False)
            (folder / DOCUMENT).write_text(text, encoding="utf-8")
        except OSError as error:
            raise StoreError(
                f"{path} cannot be written ({error.strerror}); expected room for "
                f"{sum(part.nbytes for part in [*layers, *states]):,} bytes. Name another "
                "folder, or free some room."
            ) from error
        parameters = {
            "dtype": str(engine.target.dtype),
            "shapes": shapes,
            "states": shape,
            "name": saved.document.name,
            "prompt_tokens": len(saved.tokens),
        }
        return Contents(parameters, prints_of(engine.model, engine.tokenizer))

    publish(Path(path), KIND, fill)


def _write(path: Path, parts: Sequence[Tensor]) -> list[list[int]]:
    """Write tensors one after the other; return their shapes."""
    with path.open("wb") as file:
        for part in parts:
            raw = part.detach().cpu().contiguous()
            file.write(raw.view(torch.uint8).numpy().tobytes())
    return [list(part.shape) for part in parts]


def open_document(path: Path, engine: Engine, verify: Verify = "full") -> SavedDocument:
    """Open a document that `save_document` wrote with this model.

    Raises:
        StoreError: It is missing, damaged, or of another model, tokenizer or dtype.
    """
    store = open_store(Path(path), KIND, verify=verify)
    what = f"the saved document {path}"
    check_prints(what, store.manifest.fingerprints, prints_of(engine.model, engine.tokenizer))
    try:
        return _read(store, engine, what)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, StoreError):
            raise
        raise StoreError(f"{path} cannot be read ({error}); keep the document again.") from error


def _read(store: OpenStore, engine: Engine, what: str) -> SavedDocument:
    facts, dtype = store.manifest.parameters, engine.target.dtype
    if facts["dtype"] != str(dtype):
        raise StoreError(
            f"{what} holds numbers of {facts['dtype']}, the model works in {dtype}; load the model "
            "in that type (dtype=), or keep the document again."
        )
    record = json.loads(store.file(DOCUMENT).read_text(encoding="utf-8"))
    template = dict(record["template"])
    template["stop"] = tuple(template["stop"])
    part, (start, end) = record["part"], record["characters"]
    layers = _mapped(store.file(LAYERS), facts["shapes"], dtype, engine.target.device)
    if len(layers) % 2:
        raise ValueError(f"{LAYERS} has {len(layers)} parts, which are no pairs")
    shape = facts.get("states")  # missing in older stores and without a drafter that needs them
    states = _mapped(store.file(STATES), shape, dtype, engine.target.device) if shape else [None]
    return SavedDocument(
        parse_document(record["document"]),
        PromptTemplate(**template),
        tuple(int(token) for token in record["tokens"]),
        None if part is None else (int(part[0]), int(part[1])),
        (int(start), int(end)),
        dict(enumerate(zip(layers[::2], layers[1::2], strict=True))),
        states[0],
    )


def _mapped(path: Path, shapes: Any, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Map the tensors of a file that `_write` made."""
    sizes = [int(torch.Size(shape).numel()) for shape in shapes]
    if path.stat().st_size != sum(sizes) * dtype.itemsize:
        raise ValueError(f"{path.name} has {path.stat().st_size} bytes for {len(sizes)} parts")
    whole = torch.from_file(str(path), shared=False, size=sum(sizes), dtype=dtype)
    flat = torch.split(whole, sizes)
    return [part.view(*shape).to(device) for part, shape in zip(flat, shapes, strict=True)]


def nbytes(layers: Layers) -> int:
    """Return the bytes of keys and values."""
    return sum(part.nbytes for pair in layers.values() for part in pair)
