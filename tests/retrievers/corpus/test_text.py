from __future__ import annotations

from collections.abc import Iterator

import pytest

from ragspec.errors import InputError
from ragspec.retrievers.corpus.catalogue import BATCH, chunks, tokenized
from tests.support import tiny


def test_texts_and_rows_come_in_order_and_as_a_stream() -> None:
    tokenizer, read = tiny.tokenizer(), 0
    message: list[tuple[int, int]] = []

    def stream() -> Iterator[str | list[int]]:
        nonlocal read
        for number in range(2 * BATCH + 3):
            read += 1
            yield "ab" if number % 2 else [number % 90]

    rows = tokenized(stream(), tokenizer, lambda d, t: message.append((d, t)))
    first = [next(rows).tolist() for _ in range(3)]
    assert first == [[0], tokenizer("ab")["input_ids"], [2]]
    assert read == BATCH
    assert len(list(rows)) == 2 * BATCH
    assert [d for d, _ in message] == [BATCH, 2 * BATCH, 2 * BATCH + 3]
    assert message[-1][1] == 2 * BATCH + 3 + (2 * BATCH + 3) // 2


def test_no_special_tokens_and_no_warning_for_long_texts(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    (row,) = tokenized(["a" * 600], tiny.tokenizer())  # its longest model input is 512
    assert row.tolist() == [ord("a") - 32] * 600
    assert not caplog.text and not capsys.readouterr().err


def test_chunks_end_with_whole_documents() -> None:
    rows = tokenized([[1] * 3, [2] * 3, [3] * 10, [4]], None)
    results = [[document.tolist() for document in piece] for piece in chunks(rows, 5)]
    assert results == [[[1] * 3, [2] * 3], [[3] * 10], [[4]]]


def test_what_is_no_text_is_refused() -> None:
    for wrong in (["text"], [[1.5]], [[[1]]]):
        with pytest.raises(InputError):
            list(tokenized(wrong, None))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="different lengths"):
        list(tokenized([[[1, 2], [3]]], None))  # type: ignore[list-item]
    with pytest.raises(InputError, match="one text"):
        next(tokenized("text", tiny.tokenizer()))


def test_half_a_surrogate_pair_is_no_reason_to_stop() -> None:
    tokenizer = tiny.bpe_tokenizer()
    results = [row.tolist() for row in tokenized(["fine", "broken \ud83d emoji"], tokenizer)]
    assert results == tokenizer(["fine", "broken \ufffd emoji"])["input_ids"]
