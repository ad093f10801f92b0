import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from unittest.mock import Mock

import pytest

from ragspec.errors import DocumentError, InputError
from ragspec.retrievers.corpus.index import CorpusIndex
from ragspec.retrievers.formats.markup import markdown_headings, read_rst
from ragspec.retrievers.formats.readers import extract_text
from ragspec.retrievers.search import documents
from ragspec.retrievers.search.documents import load_document, load_documents
from ragspec.retrievers.search.passage_index import PassageIndex
from tests.support.toy_embedder import make_embedder
from tests.support.toy_pdf import pdf_of


def test_folder_is_read_recursively_sorted_without_hidden_files(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config.txt").write_text("hidden")
    (tmp_path / ".secret.txt").write_text("hidden")
    (tmp_path / "b" / "two.md").write_text("# Second\n\nText.")
    (tmp_path / "a.txt").write_text("First text.")
    (tmp_path / "c.py").write_text("def f():\n    return 1\n")
    result = load_documents(tmp_path)
    assert [document.name for document in result.documents] == ["a.txt", "b/two.md", "c.py"]
    assert result.documents[1].title == "Second"
    assert result.documents[2].headings == ((0, "f"),)
    assert result.skipped == ()


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.zip", b"PK", "archive"),
        ("a.parquet", b"{}", "data file"),
        ("a.png", b"\x89PNG", "picture"),
        ("a.odt", b"PK", "word-processor"),
        ("blob", bytes(range(256)) * 8, "binary"),
        ("a.txt", b"\x00\x01\x02" * 50, "binary"),
        ("a.txt", b"", "no text"),
        ("a.txt", b" \n", "no text"),
        ("a.csv", b"\n\n", "no text"),
        ("a.pdf", b"hello", "no PDF"),
        ("a.pdf", b"%PDF-1.7\n" + b"\x00" * 200, "broken PDF"),
        ("a.pdf", b"%PDF-1.4 nothing more", "broken PDF"),
        ("a.html", b"<script>x()</script>", "no text"),
        ("a.docx", b"PK\x03\x04 cut", "is damaged, or no .docx file"),
        ("a.xlsx", b"\xd0\xcf\x11\xe0 ole", "is encrypted"),
        ("a.ipynb", b"[1]", "is no notebook"),
        ("a.mbox", b"hello", "is no mailbox"),
        ("a.eml", b"\n\nhello", "is no mail"),
        ("a.1", b".so man1/b.1\n", "only refers to man1/b.1"),
        ("a.txt.gz", b"\x1f\x8b cut", "is a broken gzip file"),
        ("a.tar.gz", b"\x1f\x8b", "archive"),
        ("a.doc", b"x", "word-processor"),
    ],
)
def test_unusable_file_is_refused_and_skipped_in_a_folder(
    tmp_path: Path, name: str, data: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DocumentError, match=message):
        load_documents(tmp_path / name)
    (tmp_path / "good.txt").write_text("Text.")
    result = load_documents([tmp_path])
    assert [document.name for document in result.documents] == ["good.txt"]
    ((path, reason),) = ((skipped.path, skipped.reason) for skipped in result.skipped)
    assert path == str(tmp_path / name) and message in reason


def test_missing_path_empty_folder_no_path_and_too_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = [([f"{tmp_path}/x"], "missing"), ([str(tmp_path)], "holds no file"), ([], "No path")]
    for paths, message in [*empty, (["x" * 300], "File name too long")]:
        with pytest.raises(DocumentError, match=message):
            load_documents(paths)
    for other in ("", [""], [b"docs"], [None]):
        with pytest.raises(InputError, match="expected a path, or a list of paths"):
            load_documents(other)  # type: ignore[arg-type]
    (tmp_path / "large.txt").write_text("word " * 100)
    monkeypatch.setattr(documents, "MAX_BYTES", 99)
    with pytest.raises(DocumentError, match="500 bytes, more than the limit of 99"):
        load_documents(tmp_path / "large.txt")
    (tmp_path / "large.txt").rename(tmp_path / "only.png")
    with pytest.raises(DocumentError, match=r"1 skipped: .*only\.png"):
        load_documents(tmp_path)
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(DocumentError, match="not a regular file"):
        load_document(tmp_path / "pipe.txt")


def test_unreadable_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse = Mock(side_effect=PermissionError(13, "Permission denied"))
    (tmp_path / "locked.txt").write_text("Text.")
    monkeypatch.setattr(Path, "read_bytes", refuse)  # the tests may run as root, who may read all
    with pytest.raises(DocumentError, match=r"cannot be read \(Permission denied\)"):
        load_documents(tmp_path / "locked.txt")


def test_broken_link_is_reported(tmp_path: Path) -> None:
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere.txt")
    with pytest.raises(DocumentError, match=r"gone\.txt is a link to something that is missing"):
        load_document(tmp_path / "gone.txt")
    (tmp_path / "good.txt").write_text("Text.")
    (skipped,) = load_documents(tmp_path).skipped
    assert skipped.path == str(tmp_path / "gone.txt")
    assert skipped.reason.startswith("is a link")  # the path stands before it


def test_linked_folder_is_skipped_unless_named(tmp_path: Path) -> None:
    docs, elsewhere = tmp_path / "docs", tmp_path / "elsewhere"
    for folder in (docs, elsewhere):
        folder.mkdir()
        (folder / f"{folder.name}.txt").write_text("Text.")
    (docs / "link").symlink_to(elsewhere)
    (docs / "round.zip").symlink_to(docs)
    (docs / ".hidden").symlink_to(elsewhere)
    result = load_documents(docs)
    assert [document.name for document in result.documents] == ["docs.txt"]
    paths = [skipped.path for skipped in result.skipped]
    assert paths == [str(docs / "link"), str(docs / "round.zip")]
    assert all(skipped.reason.startswith("is a link to a folder") for skipped in result.skipped)
    (named,) = load_documents(docs / "link").documents
    assert named.name == "elsewhere.txt"


def test_index_among_documents_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "good.txt").write_text("Text.")
    for _ in range(2):  # the second time beside an index
        result = load_documents(tmp_path)
        assert [document.name for document in result.documents] == ["good.txt"]
        assert result.skipped == ()
        PassageIndex.build(result.documents, embedder=None).save(tmp_path / "good.idx")
    with pytest.raises(DocumentError, match="is an index, expected documents"):
        load_documents(tmp_path / "good.idx")
    CorpusIndex.build([[1, 2]], 9, tmp_path / "c.store").close()
    with pytest.raises(DocumentError, match=r"is a store of text, .* with --store"):
        load_documents(tmp_path / "c.store")


def test_file_names_outside_utf_8_are_indexed_and_saved(tmp_path: Path) -> None:
    folder = tmp_path / "docs"
    folder.mkdir()
    for name, data in {
        b"caf\xe9.txt": b"Coffee is made here.",
        b"caf\xea.txt": b"Tea is made there.",
        b"caf\xe9.pdf": pdf_of("Milk is made nowhere."),
        b"caf\xe9.png": b"x",
    }.items():
        try:
            Path(os.fsdecode(bytes(folder) + b"/" + name)).write_bytes(data)
        except OSError:
            pytest.skip("this file system takes UTF-8 names alone")
    shutil.copytree(folder, tmp_path / "again")
    result = load_documents([folder, tmp_path / "again"])
    json.dumps(asdict(result), ensure_ascii=False).encode()
    names = [document.name for document in result.documents]
    foreign = [rf"caf\udc{code}" for code in ("e9.pdf", "e9.txt", "ea.txt")]
    assert len(set(names)) == 6 and names[:3] == foreign
    assert result.documents[0].headings == ((0, "caf?.pdf, page 1"),)
    assert result.documents[1].title == "caf?.txt"
    assert result.skipped[0].path == str(folder / r"caf\udce9.png")
    embedder = str(make_embedder(tmp_path / "toy"))
    PassageIndex.build(result.documents, embedder=embedder).save(tmp_path / "docs.idx")


def test_equal_names_of_two_folders_are_distinct(tmp_path: Path) -> None:
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text(folder)
    result = load_documents([tmp_path / "x", tmp_path / "y", tmp_path / "y", tmp_path / "x/a.txt"])
    names = [document.name for document in result.documents]
    assert names == ["a.txt", (tmp_path / "y" / "a.txt").as_posix()], "and each is read once"


def test_headings_of_markdown_and_rst() -> None:
    markdown = "# One\n\ntext\n\n```\n# no heading\n```\n\nTwo\n===\n\n### Three ###\n# C# \n"
    result = markdown_headings(markdown)
    assert [heading for _, heading in result] == ["One", "Two", "Three", "C#"]
    assert markdown_headings(wide := f"# a{' ' * 20_000}b") == ((0, wide[2:]),)
    assert markdown[result[2][0] :].startswith("### Three")
    rst = read_rst(Path("a.rst"), b"=======\n Title\n=======\n\ntext\n\nPart\n----\n")
    assert [heading for _, heading in rst.headings] == ["Title", "Part"]
    assert extract_text(Path("a.txt"), markdown.encode()).headings == ()
    fences = "# One\n```\n# no\n```\n~~~~ c\n```\n# no\n~~~~\n## Two\n" * 2
    assert [heading for _, heading in markdown_headings(fences)] == ["One", "Two"] * 2
    mixed = "```a b```\n\n ## One\n- a\nb\n---\n> c\n---\n***\n---\n1. ```\n# no\n   ```\n"
    mixed += "<br>\nThree\n---\n[a]: b\nFour\n---\n|a|\n|-|\n|b|\n---\n"
    mixed += "<!--\n# no\n-->\n<PRE>\n# no\n</pre>\nTwo  \nwords\n---\na\nb\nc\nd\n---\n"
    titles = ["One", "Three", "Four", "Two words"]
    assert [heading for _, heading in markdown_headings(mixed)] == titles


def test_bundled_guide_is_readable(root: Path) -> None:
    result = load_documents(root / "ragspec" / "starter" / "guide")
    assert len(result.documents) == 8
    assert all(400 <= len(document.text.split()) <= 900 for document in result.documents)
    assert all(document.title and document.headings for document in result.documents)
    assert result.skipped == ()
