import copy
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from ragspec.engine.engine import Engine
from ragspec.errors import InputError, StoreError
from ragspec.retrievers.corpus.catalogue import tokenized
from ragspec.retrievers.corpus.index import CorpusIndex
from ragspec.storage.store import publish
from tests.support import tiny
from tests.support.corpora import build, reopen, rows, text_of
from tests.support.damage import full_disk

TEXTS = ["the cat sat on the mat", "the dog sat on the rug", "a draft of a text"]


def test_texts_and_token_rows_are_built_in_order_in_segments(tmp_path: Path) -> None:
    tokenizer = tiny.tokenizer()
    message: list[tuple[int, int]] = []
    documents: list[Any] = [*TEXTS, [1, 2, 3], np.array([4, 5]), ""]
    rows = tokenized(iter(documents), tokenizer, lambda d, t: message.append((d, t)))
    store = CorpusIndex.build(rows, tokenizer, tmp_path / "c", segment_tokens=30)
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    assert text_of(store) == [*ids, [1, 2, 3], [4, 5]]
    info = store.info()
    assert [r["documents"] for r in info["segments"]] == [2, 3]
    assert message == [(6, info["tokens"])]
    assert info["scopes"] == {"global": info["tokens"]}
    assert info["bytes"] == sum(p.stat().st_size for p in (tmp_path / "c").glob("gen-*/seg-*/*"))
    assert info["segments"][0]["name"] == "seg-000001"
    assert text_of(CorpusIndex.open(tmp_path / "c", tokenizer=tokenizer)) == text_of(store)


def test_wrong_documents_and_arguments_of_build_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="tokenizer, or the size of the vocabulary, is None"):
        CorpusIndex.build([[1]], None, tmp_path / "c")
    with pytest.raises(InputError, match="document 3 holds ids from 999 to 999; expected 0 to 96"):
        build(tmp_path / "c", [[], [1], [2], [999]], segment_tokens=1)
    build(tmp_path / "c", rows(2)).close()
    wrong: list[Any] = [{"flush_tokens": 0}, {"flush_tokens": "a"}, {"max_tokens": 1.5}]
    wrong += [{"verify": "often"}, {"segment_tokens": 0}, {"depth": "a"}, {"model": 3}]
    for options in [*wrong, {"path": None}, {"documents": None}]:
        with pytest.raises(InputError, match="expected"):
            build(**{"path": tmp_path / "c", "documents": [[1]], **options})
    assert text_of(reopen(tmp_path / "c")) == rows(2)
    publish(tmp_path / "other", "passages", lambda folder: None)
    with pytest.raises(StoreError, match="holds 'passages'"):
        build(tmp_path / "other", [[1]])


def test_a_damaged_corpus_may_be_built_again(tmp_path: Path) -> None:
    build(tmp_path / "c", rows(3)).close()
    (tmp_path / "c" / "CURRENT").write_text("{")
    with pytest.raises(StoreError, match="damaged"):
        reopen(tmp_path / "c")
    assert text_of(build(tmp_path / "c", rows(2))) == rows(2)


def test_a_closed_corpus_refuses_every_use(tmp_path: Path) -> None:
    store = build(tmp_path / "c", rows(1))
    store.close()
    store.close()
    record = partial(store.record, Engine(tiny.model(), drafter=None), scope="global")
    for use in (partial(store.append, [1], scope="global"), store.segments, record):
        with pytest.raises(StoreError, match="was closed"):
            use()


def test_appended_text_is_visible_at_once_and_is_on_disk_after_a_flush(tmp_path: Path) -> None:
    new = rows(5, seed=1)
    with build(tmp_path / "c.store", rows(3)) as store:
        for row in new:
            store.append(row, scope="global")
        assert text_of(store) == rows(3) + new
        assert text_of(reopen(store.path)) == rows(3)
        assert store.info()["waiting"] == sum(len(row) + 1 for row in new)
        store.flush()
        assert store.info()["waiting"] == 0
        assert text_of(store) == text_of(reopen(store.path)) == rows(3) + new
        store.flush()  # with nothing to write
        assert store.info()["generation"] == "gen-000002"


def test_flushing_keeps_few_segments_and_every_document(tmp_path: Path) -> None:
    with build(tmp_path / "c", rows(1)) as store:
        new = rows(40, seed=1)
        most = 0
        for row in new:
            store.append(row, scope="global")
            store.flush()
            most = max(most, len(store.info()["segments"]))
        assert text_of(store) == rows(1) + new
        assert most <= 1 + 4


def test_a_hundred_thousand_answers_stay_bounded(tmp_path: Path) -> None:
    answers = np.random.default_rng(0).integers(0, 90, (100_000, 3)).astype(np.int32)
    most = 0
    with build(tmp_path / "c", rows(1), flush_tokens=8192, max_tokens=40_000) as store:
        for number, answer in enumerate(answers):
            store.append(answer, scope="global")
            if number % 1000 == 0:
                most = max(most, store.info()["waiting"])
        store.flush()
        info = store.info()
        assert info["dropped"] == 0
        assert most <= 4 * 8192 + 4
        assert len(info["segments"]) < 1 + 8 + 4
        selected = text_of(store)
    appended = sum(r["tokens"] for r in info["segments"] if r["source"] == "appended")
    assert 20_000 < appended <= 40_000
    assert selected[0] == rows(1)[0]  # the limit does not count built text
    assert selected[1:] == answers[-(len(selected) - 1) :].tolist()


def test_unwritable_text_stays_in_memory_bounded_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = build(tmp_path / "c", flush_tokens=50)
    refuse = Mock(side_effect=OSError("disk full"))
    with monkeypatch.context() as patch, warnings.catch_warnings(record=True) as issued:
        warnings.simplefilter("always")
        patch.setattr("ragspec.retrievers.corpus.index.revise", refuse)
        for row in rows(100):
            store.append(row, scope="global")
        assert store.info()["waiting"] <= 4 * 50 + 13
        assert store.info()["dropped"] > 0
        with pytest.raises(OSError, match="disk full"):
            store.flush()
    assert "disk full" in str(issued[0].message)
    assert text_of(store) == rows(100)[-len(text_of(store)) :]
    store.close()
    assert text_of(reopen(tmp_path / "c")) == rows(100)[-len(text_of(reopen(tmp_path / "c"))) :]


def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = build(tmp_path / "c", rows(1))
    store.append([1, 2, 3], scope="global")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full_disk)
        for write in (store.flush, store.close):
            with pytest.raises(StoreError, match=r"No space left on device.*bytes; make room"):
                write()
    assert text_of(store) == [*rows(1), [1, 2, 3]]
    store.close()
    assert text_of(reopen(tmp_path / "c")) == [*rows(1), [1, 2, 3]]


def test_a_batch_larger_than_the_limit_keeps_its_newest(tmp_path: Path) -> None:
    with build(tmp_path / "c", max_tokens=1000) as store:
        for number in range(150):
            store.append([number % 90] * 10, scope="global")
        store.flush()
        assert text_of(store) == [[number % 90] * 10 for number in range(50, 150)]


def test_unwritten_text_of_an_unclosed_corpus_is_reported(tmp_path: Path) -> None:
    store = build(tmp_path / "c")
    store.append([1, 2, 3], scope="global")
    with pytest.warns(ResourceWarning, match="4 appended tokens are lost"):
        del store
    code = (
        "import sys; from ragspec.retrievers import CorpusIndex\n"
        "store = CorpusIndex.open(sys.argv[1])\n"
        "store.append([1, 2, 3], scope='global')"
    )
    command = [sys.executable, "-W", "always", "-c", code, str(tmp_path / "c")]
    message = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert "4 appended tokens are lost" in message
    assert "Traceback" not in message


def test_a_corpus_rebuilt_with_other_parameters_must_be_reopened(tmp_path: Path) -> None:
    store = build(tmp_path / "c", [[1, 2, 3]])
    store.append([4, 5, 6], scope="global")
    CorpusIndex.build([[7, 7]], 50, tmp_path / "c").close()
    for change in (store.flush, store.refresh):
        with pytest.raises(StoreError, match="built again meanwhile"):
            change()
    assert text_of(store) == [[1, 2, 3], [4, 5, 6]]
    assert text_of(reopen(tmp_path / "c")) == [[7, 7]]
    build(tmp_path / "c", [[7, 7]], depth=8).close()
    with pytest.raises(StoreError, match="now 97 ids sorted to 8 tokens, before 97 to 32"):
        store.refresh()
    store._buffer.clear()  # so that no lost text is reported


def test_fits_and_open_check_model_and_tokenizer(tmp_path: Path) -> None:
    text, model = tiny.tokenizer(), tiny.model()
    with CorpusIndex.build(["abc"], text, tmp_path / "c", model=model) as store:
        store.fits()
        for check in (store.fits, partial(CorpusIndex.open, store.path)):
            check(model=model, tokenizer=text)
            with pytest.raises(StoreError, match="another tokenizer"):
                check(model=model, tokenizer=tiny.bpe_tokenizer())
            with pytest.raises(StoreError, match="another model"):
                check(model=tiny.model(seed=1), tokenizer=text)
        with pytest.raises(StoreError, match="another model"):
            store.drafter().fits(tiny.model(seed=1))


def test_loads_of_one_checkpoint_in_several_dtypes_are_one_model(tmp_path: Path) -> None:
    full, half, brain = (
        Engine(copy.deepcopy(tiny.model()).to(dtype), None, drafter=None)
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
    )
    build(tmp_path / "c", model=full).close()
    with reopen(tmp_path / "c", model=half) as store:
        store.fits(half.model)
        store.record(half, scope="global")
        store.append([1, 2, 3], scope="global")
    reopen(tmp_path / "c", model=brain).close()  # recording dropped no fingerprint
