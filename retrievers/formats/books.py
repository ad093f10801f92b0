"""Electronic books: the chapters of an EPUB file in the order of its spine."""

from dataclasses import replace
from io import BytesIO
from pathlib import Path
from posixpath import dirname, join, normpath
from urllib.parse import unquote
from zipfile import ZipFile

from ragspec.errors import DocumentError
from ragspec.retrievers.formats.encodings import Extract, clean, joined
from ragspec.retrievers.formats.html import read_page
from ragspec.retrievers.formats.readers import left_out, parsing


def read_epub(path: Path, data: bytes) -> Extract:
    """Return the chapters of an electronic book; raise DocumentError if it is protected."""
    from lxml import etree

    notes, parser = left_out(path, data), etree.XMLParser(resolve_entities=False)
    with parsing(path), ZipFile(BytesIO(data)) as archive:
        names = set(archive.namelist())
        if names & {"META-INF/rights.xml", "META-INF/sinf.xml"}:
            raise DocumentError(f"{path} is protected by digital rights management.")
        container = etree.fromstring(archive.read("META-INF/container.xml"), parser)
        package = container.xpath("string(//@full-path)")
        root = etree.fromstring(archive.read(package), parser)
        items = root.iterfind(".//{*}item[@href]")
        hrefs = {item.get("id"): unquote(item.get("href")) for item in items}
        spine = [each.get("idref", "") for each in root.iterfind(".//{*}itemref")]
        places = [normpath(join(dirname(package), hrefs.get(each, each))) for each in spine]
        chapters = [(place, archive.read(place)) for place in places if place in names]
        title = " ".join((root.findtext(".//{*}title") or "").split())
    notes += [f"the chapter {clean(place)} is missing" for place in places if place not in names]
    parts = [read_page(path / place, chapter) for place, chapter in chapters]
    notes = [*dict.fromkeys(note for part in parts for note in part.notes), *notes]
    title = title or next((part.title for part in parts), "")
    return replace(joined([part for part in parts if part.text], title), notes=tuple(notes))
