import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragspec.errors import InputError
from ragspec.reports.generation import Generation, report_of
from ragspec.reports.trace import read_trace, step_texts, write_trace
from ragspec.rules.base import Step
from ragspec.sampling.decoding import decoder_of
from ragspec.trees.draft_tree import DraftKind, DraftTree


def letters(tokens: list[int]) -> str:
    return bytes(tokens).decode("utf-8", errors="replace")


def generation_of(
    steps: list[Step], decode: Callable[[list[int]], str], end: int | None = None, **facts: Any
) -> Generation:
    """Return the generation of some steps; a stop string cuts its text at `end`."""
    tokens = [token for step in steps for token in step.tokens]
    report = report_of(steps, tokens, 0.05, "stop", **facts)
    return Generation(decode(tokens)[:end], tokens, "stop", "exact", report, [1, 2, 3], steps=steps)


def run(*more: Step) -> Generation:
    tree = DraftTree.chain(list(b"\xa9lo"), "context", origin=[(1, 7), (1, 8), (1, 9)])
    guess = DraftTree.chain([101], "model", accept_prob=[0.25])
    times = {"draft": 1.0, "verify": 5.0}
    steps = [
        Step(DraftTree.empty(), (), tuple(b"H"), {"verify": 4.0}),
        Step(guess, (0,), tuple("eé".encode()[:2]), times),
        Step(tree, (0, 1), (0xA9, *b"lo"), times),
        *more,
    ]
    return generation_of(steps, letters, seed=5, prompt_tokens=3, budget="fixed")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return the path of a trace that was written."""
    write_trace(tmp_path / "trace.jsonl", run(), letters)
    return tmp_path / "trace.jsonl"


def test_read_trace_returns_what_write_trace_wrote(path: Path) -> None:
    instance = run()
    extra = {"question": "why?", "format": "no header field can be replaced"}
    write_trace(path, instance, letters, model="tiny", documents=["a.md", "b.md"], extra=extra)
    trace = read_trace(path)
    assert trace.documents == ("a.md", "b.md")
    assert (trace.model, trace.report.label, trace.report.seed) == ("tiny", "exact", 5)
    assert trace.report.prompt_tokens == 3
    assert trace.extra == {"question": "why?"}
    assert trace.report == instance.report
    assert trace.texts == (("H",), ("e", ""), ("é", "l", "o"))
    assert trace.vocabulary == {101: "e", 0xA9: "\ufffd", ord("l"): "l", ord("o"): "o"}
    for got, built_step in zip(trace.steps, instance.steps, strict=True):
        assert (got.path, got.tokens) == (built_step.path, built_step.tokens)
        assert got.milliseconds == built_step.milliseconds
        assert got.tree.sources == built_step.tree.sources
        for name in ("tokens", "parents", "source", "origin", "accept_prob"):
            np.testing.assert_array_equal(getattr(got.tree, name), getattr(built_step.tree, name))


def test_lines_carry_the_documented_fields(path: Path) -> None:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    names = "t index sources tokens parents source accept_prob origin path emitted texts ms"
    assert set(lines[1]) == set(lines[2]) == set(names.split())
    assert [line["t"] for line in lines[1:-1]] == [0.0, 4.0, 10.0]
    assert list(lines[-1]) == ["report"]


def test_a_drafted_token_is_written_once(path: Path) -> None:
    more = Step(DraftTree.chain(list(b"lol!"), "context"), (), (33,), {"verify": 5.0})
    write_trace(path, run(more), letters)
    header = json.loads(path.read_text().splitlines()[0])
    assert header["vocabulary"] == {"101": "e", "169": "\ufffd", "108": "l", "111": "o", "33": "!"}


def test_a_piece_keeps_the_space_that_a_tokenizer_drops_at_the_beginning() -> None:
    words = {1: " the", 2: "y", 3: "", 4: " a"}

    def drops(tokens: list[int]) -> str:
        return "".join(words[token] for token in tokens).removeprefix(" ")

    assert list(map(decoder_of(drops).piece, words)) == [" the", "y", "", " a"]
    assert decoder_of(lambda tokens: "".join(map(str, tokens))).piece(7) == "7"
    assert decoder_of(lambda tokens: "seven" if len(tokens) == 1 else "twice").piece(7) == "seven"
    assert decoder_of(lambda tokens: "\ufffd").piece_bytes(7) is None


def test_a_file_cut_anywhere_is_refused(path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    inside = lines[3].index("é".encode()) + 1  # between the two bytes of the character
    for cut in (0, inside - 1, inside, inside + 1):
        path.write_bytes(b"".join(lines[:3]) + lines[3][:cut])
        with pytest.raises(InputError, match=r"damaged|line 4|cannot be read"):
            read_trace(path)


def test_names_that_are_no_utf_8_are_written_and_read(path: Path) -> None:
    name = b"caf\xe9.txt".decode("utf-8", "surrogateescape")  # as the file system gives it
    write_trace(path, run(), letters, model=name, documents=[name], extra={"question": name})
    trace = read_trace(path)
    assert (trace.model, trace.documents) == ("caf?.txt", ("caf?.txt",))
    assert trace.extra == {"question": "caf?.txt"}


def test_a_tree_with_equal_siblings_is_read(path: Path) -> None:
    twins = DraftTree.build([108, 108], [-1, -1], "model", kind=DraftKind.SAMPLED)
    write_trace(path, run(Step(twins, (1,), (108, 33))), letters)
    assert read_trace(path).steps[3].path == (1,)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no trace"),
        ('{"format": "other"}\n', "no trace"),
        ('{"format": "ragspec-trace", "version": 99}\n', "no trace"),
        ("not json\n{}\n", "line 1"),
        ("[]\n", "not a JSON object"),
        ('{"format": "ragspec-trace", "version": 1}\n', "damaged"),
        ("\xff\xfe\x00", "text file"),
    ],
)
def test_files_that_are_no_traces_are_refused(path: Path, content: str, message: str) -> None:
    path.write_text(content, "latin-1")
    with pytest.raises(InputError, match=message):
        read_trace(path)


DAMAGE: dict[str, tuple[Any, ...]] = {
    "path": ([9], [0, 0], [1], [0, -1]),
    "origin": ([[1]],),
    "ms": ([],),
    "source": ([], [0, 0, 7]),
    "tokens": (None, [1, 2, 1 << 70]),
    "texts": (["e"], ["e", "l", "l", "o"]),
    "parents": ([-1, 0], [0, 1, 2], [-1, 0, 9]),
    "accept_prob": ([1.0], [1.0, float("nan"), 1.0]),
}
VOCABULARIES: tuple[Any, ...] = ([], {"x": "y"})
CHANGES = [(3, {name: value}) for name, each in DAMAGE.items() for value in each]
CHANGES += [(0, {"vocabulary": value}) for value in VOCABULARIES]


@pytest.mark.parametrize(("line", "change"), CHANGES)
def test_a_damaged_line_is_refused(path: Path, line: int, change: dict[str, object]) -> None:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[line] |= change
    path.write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(InputError, match="damaged"):
        read_trace(path)


def test_files_that_cannot_be_opened_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="absent"):
        read_trace(tmp_path / "absent.jsonl")
    with pytest.raises(InputError, match="nowhere"):
        write_trace(tmp_path / "nowhere" / "trace.jsonl", run(), letters)


def texts_of(tokens: list[int], end: int | None = None) -> list[str]:
    """Return the texts of tokens, each emitted by another step."""
    steps = [Step(DraftTree.empty(), (), (token,)) for token in tokens]
    return [text for (text,) in step_texts(generation_of(steps, letters, end), letters)]


@given(st.text(max_size=12), st.integers(0, 12))
def test_token_texts_join_to_the_text_up_to_its_stop(text: str, end: int) -> None:
    tokens = list(text.encode("utf-8", errors="ignore"))
    texts = texts_of(tokens, end)
    assert len(texts) == len(tokens)
    assert "".join(texts) == letters(tokens)[:end]


def test_token_texts_end_with_an_unfinished_character() -> None:
    tokens = list("é".encode())[:1]
    assert texts_of([104, *tokens]) == ["h", "\ufffd"]
