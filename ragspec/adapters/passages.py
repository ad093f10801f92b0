"""Conversion between documents of hosts and passages of ragspec."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from ragspec.errors import InputError
from ragspec.retrievers.formats.readers import MAX_BYTES
from ragspec.retrievers.search.fusion import FunctionRetriever, Hit

PLACE = re.compile(r"(\w+) (\d{1,9})(?:, row (\d{1,9}))?(?: to \D|$)")


def hits_of(documents: Iterable[object]) -> tuple[Hit, ...]:
    """Return documents of a host as hits, in their order, without empty ones.

    The metadata source, name and title are used. So are start and end, characters of the whole
    document, and the place, if they fit the text. Blanks stand for the text before it.

    Args:
        documents: Texts, documents of LangChain or Haystack, nodes of LlamaIndex, or triples of
            text, score and metadata.

    Raises:
        InputError: One is none of these, or has no text.
    """
    records = [each for each in map(_record, documents) if each[0].strip()]
    hits = FunctionRetriever(lambda query: records).search("", len(records))
    return tuple(_placed(hit, meta) for hit, (_, _, meta) in zip(hits, records, strict=True))


def _record(document: object) -> tuple[str, float, Mapping[str, object]]:
    """Return text, score and metadata of a document."""
    if isinstance(document, tuple) and document and isinstance(document[0], str):
        return document
    node = getattr(document, "node", document)  # LlamaIndex holds scores apart
    texts = (getattr(node, name, None) for name in ("page_content", "content", "text"))
    text = next((each for each in texts if each is not None), node)
    if not isinstance(text, str):
        raise InputError(
            f"got {type(document).__name__} without text among the documents; expected texts, or "
            "documents of the host that have text."
        )
    meta = getattr(node, "metadata", None) or getattr(node, "meta", None) or {}
    score = getattr(document, "score", None) or meta.get("score")
    name = meta.get("file_name") or meta.get("file_path")
    return text, float(score) if isinstance(score, int | float) else 0.0, {"name": name, **meta}


def _placed(hit: Hit, meta: Mapping[str, object]) -> Hit:
    start, end, text = meta.get("start"), meta.get("end"), hit.passage.text
    if not isinstance(start, int) or not 0 <= start <= MAX_BYTES or end != start + len(text):
        return hit
    match, breaks = PLACE.match(str(meta.get("place"))), meta.get("breaks")
    unit, part, row = (match[1], int(match[2]), int(match[3] or 1)) if match else ("", 0, 1)
    if breaks is None and unit in ("line", "row"):  # a text whose lines are counted
        part, row = 0, part
    if max(part, row) > start + 1 or not isinstance(breaks, list | tuple | None):
        unit, part, row, breaks = "", 0, 1, ()
    pages = (*[0] * part, *(each for each in breaks or () if isinstance(each, int)))
    before = "\n" * (row - 1) + " " * (start - row + 1)
    document = replace(hit.document, text=before + text, pages=pages, unit=unit)
    return replace(hit, document=document, passage=replace(hit.passage, start=start, end=end))


def facts_of(hit: Hit) -> dict[str, object]:
    """Return the facts of a passage as metadata of a host's document.

    Its breaks are the characters where further parts begin in it, such as pages.
    """
    document, passage = hit.document, hit.passage
    facts = {
        "source": document.path or document.name,
        "name": document.name,
        "title": passage.title,
        "start": passage.start,
        "end": passage.end,
        "score": float(hit.score),
    }
    if document.unit:
        facts["place"] = document.place(passage.start, passage.end)
    if document.pages:
        facts["breaks"] = [at for at in document.pages if passage.start < at < passage.end]
    page = document.page_of(passage.start)
    return facts if page is None else {**facts, "page": page}
