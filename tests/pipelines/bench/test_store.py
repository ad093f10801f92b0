from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from ragspec.errors import InputError, StoreError
from ragspec.pipelines.bench import store as bench_store
from ragspec.pipelines.bench.store import (
    LENGTH,
    measure_open,
    parse_tokens,
    publish_segment,
    read_text,
    write_text,
)
from ragspec.retrievers.corpus.index import CorpusIndex
from ragspec.retrievers.indexes.segment import Segment, build_segment

KEYS = {
    "build_seconds",
    "build_bytes_per_token",
    "disk_bytes_per_token",
    "open_seconds",
    "open_resident_bytes",
    "lookup_p50_us",
    "lookup_p99_us",
    "numpy_lookup_p50_us",
    "numpy_lookup_p99_us",
}


@pytest.mark.parametrize(
    ("text", "count"), [("10M", 10_000_000), ("1.5m", 1_500_000), ("20k", 20_000), ("2000", 2000)]
)
def test_sizes_are_read_with_units(text: str, count: int) -> None:
    assert parse_tokens(text) == count


@pytest.mark.parametrize("text", ["", "M", "ten", "-5M", "3", "100G", "inf", "nan"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="--tokens"):
        parse_tokens(text)


def test_the_text_is_the_same_for_the_same_seed_and_quotes_itself(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    write_text(a, 1010, 50, seed=3)
    write_text(b, 1010, 50, seed=3)
    assert a.read_bytes() == b.read_bytes()
    documents = list(read_text(a, 1010))
    assert {len(document) for document in documents} == {LENGTH}
    assert max(int(document.max()) for document in documents) < 50
    earlier = np.concatenate(documents[:1000]).astype(np.uint8).tobytes()
    late = documents[1000].astype(np.uint8).tobytes()
    assert any(late[at : at + 20] in earlier for at in range(0, LENGTH - 20))


def test_a_run_gives_all_figures(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(bench_store.store)
    out = tmp_path / "store.json"
    arguments = ["--tokens", "20k", "--queries", "20", "--rounds", "2", "--vocab-size", "100"]
    done = CliRunner().invoke(app, [*arguments, "--scratch", str(tmp_path), "--json", str(out)])
    assert done.exit_code == 0, done.output
    figures = json.loads(out.read_text(encoding="utf-8"))
    assert set(figures) >= KEYS
    assert figures["tokens"] == 20_000
    assert 0 < figures["nodes"] <= 64
    # 2 bytes a token and 4 a position; beside these the small tables of so small a text.
    assert 6 < figures["disk_bytes_per_token"] < 6.2
    assert all(figures[key] >= 0 for key in KEYS)
    assert "lookup_p99_us" in done.output
    assert [path.name for path in tmp_path.iterdir()] == ["store.json"]


def test_what_is_opened_is_a_published_corpus_with_its_checks(tmp_path: Path) -> None:
    (tmp_path / "segment").mkdir()
    build_segment(tmp_path / "segment", [[1, 2, 3], [4]], 9)
    folder = publish_segment(tmp_path / "corpus", tmp_path / "segment")
    assert len(Segment.open(folder, accelerator="numpy")) == 4
    assert CorpusIndex.open(tmp_path / "corpus", verify="full").info().documents == 2
    assert measure_open(tmp_path / "corpus")["tokens"] == 4
    tokens = folder / "tokens.bin"
    tokens.write_bytes(bytes(len(tokens.read_bytes())))
    assert measure_open(tmp_path / "corpus")["tokens"] == 4  # sizes are compared, not hashes
    (folder / "starts.bin").unlink()
    with pytest.raises(StoreError):
        measure_open(tmp_path / "corpus")
