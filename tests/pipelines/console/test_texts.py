import gzip
import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import datasets
import pytest

from ragspec.errors import DocumentError, InputError
from ragspec.pipelines.console.texts import TextColumns, read_prompts, read_texts

ROWS: list[Any] = [{"text": text, "n": n} for n, text in enumerate(("one", None, "two"), 1)]


def read(
    *sources: object, skipped: Any = lambda path, reason: None, **selection: Any
) -> list[str | list[int]]:
    return list(read_texts(map(str, sources), TextColumns(**selection), skipped))


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if path.suffix == ".parquet":
        datasets.Dataset.from_list(rows).to_parquet(str(path))
    else:
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.ndjson", "rows.jsonl.gz", "rows.parquet"])
def test_rows_of_files(tmp_path: Path, name: str) -> None:
    path = write_rows(tmp_path / name, ROWS)
    assert read(path, path) == ["one", "two"] * 2


def test_a_data_set_by_name_is_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    load = Mock(return_value=ROWS)
    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    assert read("hf:owner/name", split="test", config="en") == ["one", "two"]
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    assert read("hf:owner/name") == ["one", "two"]
    assert load.mock_calls == [
        call("owner/name", "en", split="test", streaming=True),
        call("owner/name", None, split="train", streaming=False),
    ]
    with pytest.raises(DocumentError, match=r"owner/name is missing.*hf:NAME"):
        read("owner/name")


def test_columns_of_token_ids_and_of_other_names(tmp_path: Path) -> None:
    ids = write_rows(tmp_path / "ids.jsonl", [{"ids": [1, 2]}, {"ids": [3]}])
    assert read(ids) == [[1, 2], [3]]
    odd = write_rows(tmp_path / "odd.jsonl", [{"body": "x", "n": 1}])
    assert read(odd) == ["x"]  # the only text there is
    empty = write_rows(tmp_path / "empty.jsonl", [{"text": None, "content": "y"}])
    assert read(empty) == ["y"]
    for turns in [{"role": "user"}], {"a": "b"}:
        chat = write_rows(tmp_path / "chat.jsonl", [{"id": "81", "turns": turns}])
        with pytest.raises(InputError, match="no column of a usual name; it has id"):
            read(chat)
    assert read(write_rows(tmp_path / "two.jsonl", [{"a": "x", "b": "y"}]), field="b") == ["y"]
    with pytest.raises(InputError, match="line 1 holds int"):
        read(odd, field="n")


def test_a_folder_has_documents_and_rows_and_reports_skipped_files(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("# text")
    (tmp_path / "b.pdf").write_bytes(b"no pdf")
    write_rows(tmp_path / "c.jsonl", ROWS)
    (tmp_path / "d.jsonl").write_text("{broken")
    write_rows(tmp_path / "e.jsonl", [{"x": 1, "y": 2}])
    write_rows(tmp_path / "f.jsonl", [*ROWS, {"text": 7}, *ROWS])
    (tmp_path / ".hidden.txt").write_text("secret")
    reasons: dict[str, str] = {}
    result = read(tmp_path, skipped=lambda path, why: reasons.update({Path(path).name: why}))
    assert result == ["# text", "one", "two", "one", "two"]
    assert list(reasons) == ["b.pdf", "d.jsonl", "e.jsonl", "f.jsonl"]
    assert reasons["f.jsonl"].startswith(f"from here on: line {len(ROWS) + 1} holds int")
    assert reasons["d.jsonl"].startswith("line 1: no JSON object")
    assert reasons["e.jsonl"].startswith("line 1 has no column of a usual name; it has x, y")
    with pytest.raises(InputError, match="no column 'z'"):
        read(tmp_path, field="z")  # the requested column
    (tmp_path / "empty").mkdir()
    with pytest.raises(DocumentError, match="no usable text"):
        read(tmp_path / "empty")


@pytest.mark.parametrize("data", [b"{broken", b"[1]\n", b"\xff\xfe\x00", b'{"text": "a"}\n{'])
def test_broken_lines_are_refused_with_their_number(tmp_path: Path, data: bytes) -> None:
    for end in ("jsonl", "jsonl.gz", "parquet"):
        path, lines = tmp_path / f"x.{end}", rf"x\.{end}, line \d: no JSON object"
        path.write_bytes(data)
        with pytest.raises(DocumentError, match="no parquet file" if end == "parquet" else lines):
            read(path)


def test_a_damaged_gz_file_is_refused(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "x.jsonl.gz", [{"text": str(n) * 9} for n in range(2000)])
    data = bytearray(path.read_bytes())
    data[200:260] = bytes(255 - byte for byte in data[200:260])
    path.write_bytes(data)
    with pytest.raises(DocumentError, match=r"line \d+: no JSON object"):
        read(path)


def test_prompts_are_texts_turns_or_ids(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "hi"}]
    rows: list[Any] = [{"prompt": "a", "id": "1"}, {"messages": turns}]
    rows += [{"question": "b"}, {"ids": [4, 5]}, {"category": "c", "turns": ["d", "e"]}]
    rows += [{"text": "f", "meta": {"n": 1}}]
    path = write_rows(tmp_path / "p.jsonl", rows)
    assert list(read_prompts(path)) == ["a", turns, "b", [4, 5], "d", "f"]
    with pytest.raises(InputError, match="line 2 has no column 'prompt'"):
        list(read_prompts(path, "prompt"))
    with pytest.raises(DocumentError, match="missing"):
        list(read_prompts(tmp_path / "absent.jsonl"))
    (tmp_path / "p.txt").write_text("a")
    with pytest.raises(DocumentError, match="no rows"):
        list(read_prompts(tmp_path / "p.txt"))


@pytest.mark.parametrize("wrong", [3, None, "", [], [1.5], ["a", "b"], {"a": 1}, [1, {"a": 1}]])
def test_a_row_without_a_prompt_is_refused_with_its_line(tmp_path: Path, wrong: Any) -> None:
    path = write_rows(tmp_path / "p.jsonl", [{"prompt": "a"}, {"prompt": wrong}])
    with pytest.raises((DocumentError, InputError), match="line 2"):
        list(read_prompts(path))


def test_a_folder_may_be_read_as_a_data_set(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    (folder / "data").mkdir(parents=True)
    for split, row in (("train", ROWS[0]), ("test", ROWS[2])):  # in the layout of `push_to_hub`
        write_rows(folder / "data" / f"{split}-00000-of-00001.parquet", [row])
    (folder / "README.md").write_text("---\nlicense: mit\n---\nThe data card.\n")
    assert read(f"hf:{folder}") == ["one"]
    assert read(f"hf:{folder}", split="test") == ["two"]
    with pytest.raises(InputError, match=r"Bad split: dev.*'train', 'test'"):
        read(f"hf:{folder}", split="dev")
    with pytest.raises(InputError, match="'nope' not found"):
        read(f"hf:{folder}", config="nope")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "train.json").write_text("{broken")
    with pytest.raises(DocumentError, match="cannot be read to its end"):
        read(f"hf:{tmp_path / 'b'}")


def test_a_split_or_config_without_a_data_set_is_refused(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", ROWS)
    for inputs in ({"split": "train"}, {"config": "en"}):
        with pytest.raises(InputError, match=f"--set {next(iter(inputs))}=.* leave it out"):
            read(rows, **inputs)
