"""Long prompts read in pieces: the same logits, states and tokens, and somebody is told."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import ragspec.verification.reading as reading
from ragspec.drafters.base import Drafter
from ragspec.engine.engine import Engine
from ragspec.engine.prefix_cache import PrefixCache
from ragspec.errors import InputError
from ragspec.sampling.settings import Sampling
from ragspec.trees.draft_tree import DraftTree
from ragspec.verification.causal import CausalTarget, TreeSession
from ragspec.verification.path_rows import PathTarget
from tests.ragspec.verification.test_causal import BORDER, assert_right, reference
from tests.ragspec.verification.test_causal import build_longrope as longrope
from tests.ragspec.verification.test_causal import prompt as long_prompt
from tests.ragspec.verification.test_hidden_states import Watcher
from tests.support import tiny
from tests.support.architectures import ARCHITECTURES, VOCAB, build

NAMES = ["llama", "gemma3_text", "gpt2", "gpt_oss", "deepseek_v3"]
TEXTS = [list(range(1, 24)), [5, 4, 3], [*range(30, 10, -1)]]
EMPTY = DraftTree.empty()


def pieced(model: Any, piece: int | None = 4) -> CausalTarget:
    target = CausalTarget(model)
    target.piece = piece
    return target


def expect_close(name: str, one: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(
        one, other, atol=1e-4 if ARCHITECTURES[name].experts else 1e-9, rtol=0
    )


@pytest.mark.parametrize(("n", "most"), [(1, 1), (7, 3), (8, 4), (1025, 1024), (5, 100)])
def test_chunks_are_equal_and_cover_everything(n: int, most: int) -> None:
    result = list(reading.chunks(n, most))
    assert [place for start, end in result for place in range(start, end)] == list(range(n))
    sizes = [end - start for start, end in result]
    assert max(sizes) <= most
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rows", [1, 3])
def test_chunks_give_the_logits_of_one_forward(name: str, rows: int) -> None:
    model, texts = build(name), TEXTS[:rows]
    trees = [DraftTree.build([5, 6, 7], [-1, -1, 1], "test")] * rows
    results: list[list[torch.Tensor]] = []
    for piece in (None, 4):
        with pieced(model, piece).open(rows, 8) as session:
            results.append([session.verify(texts, [EMPTY] * rows)])
            session.commit([()] * rows)
            results[-1].append(session.verify([[9]] * rows, trees))
            session.commit([(1, 2)] * rows)
            more = [[10, *range(20, 31)]] * rows  # behind committed slots, of rows that are ragged
            results[-1].append(session.verify(more, [EMPTY] * rows))
    for whole, part in zip(*results, strict=True):
        expect_close(name, whole, part)


@pytest.mark.parametrize("k", [0, 4])
@pytest.mark.parametrize("keeps", [True, False])
def test_prompts_in_chunks_report_what_one_forward_does(k: int, keeps: bool) -> None:
    results = []
    for piece in (None, 5):
        target = pieced(build("llama"), piece)
        target.keeps_logits &= keeps
        with target.open(3, 4) as session:
            session.keep_hidden()
            logits, top_tokens = session.read_prompts(TEXTS, k)
            results.append((logits, [top.host() for top in top_tokens], session.hidden))
    torch.testing.assert_close(*(logits for logits, _, _ in results))
    assert [top.tolist() for top in results[0][1]] == [top.tolist() for top in results[1][1]]
    for text, one, other in zip(TEXTS, results[0][2], results[1][2], strict=True):
        assert other.shape == (1, len(text), one.shape[-1])
        torch.testing.assert_close(one, other)


class Widths:
    """Notes how many positions each forward of a model has."""

    def __init__(self, model: Any) -> None:
        self.known: list[int] = []
        self._hook = model.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, module: Any, arguments: Any, inputs: Any) -> None:
        self.known.append(inputs["input_ids"].shape[1])

    def taken(self) -> list[int]:
        self._hook.remove()
        return self.known


def test_only_expected_logits_are_preserved_of_chunks() -> None:
    model = copy.deepcopy(build("llama"))
    widths, message = Widths(model), []
    with pieced(model).open(1, 32) as session:
        session.on_read = lambda done, total: message.append((done, total))
        logits = session.verify([list(range(10))], [EMPTY])
        session.commit([()])
        session.verify([[3]], [DraftTree.chain([1, 2, 4], "test")])  # short: at once
    assert logits.shape == (1, 1, VOCAB)
    assert widths.taken() == [3, 3, 4, 4]
    assert message == [(0, 10), (3, 10), (6, 10), (10, 10)]


def test_a_piece_that_sees_the_wrong_slots_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail: here every piece forgets those before it."""
    real = vars(reading)["replace"]

    def forgetful(view: Any, **changes: Any) -> Any:
        return real(
            view, **changes | {"positions": view.positions[:, : changes["positions"].shape[1]]}
        )

    monkeypatch.setattr(reading, "replace", forgetful)
    with pieced(build("llama")).open(1, 32) as session:
        logits = session.verify([TEXTS[0]], [EMPTY])
    with pytest.raises(AssertionError):
        assert_right(build("llama"), logits, [TEXTS[0]], [EMPTY])


@pytest.mark.parametrize("length", [BORDER - 1, BORDER, BORDER + 20])
@pytest.mark.parametrize("name", ["llama", "phi3"])
def test_models_with_two_rotary_tables_read_whole(name: str, length: int) -> None:
    model, text = longrope(name), long_prompt(length)
    target = CausalTarget(model)
    assert target.piece is None
    with target.open(1, 256) as session:
        logits = session.verify([text], [EMPTY])
    assert torch.allclose(logits[0, 0], reference(model, text), atol=1e-9)


def engines(drafter: str | Drafter | None = None, name: str = "llama") -> list[Engine]:
    model = tiny.model(name, dtype=torch.float64)
    return [Engine(pieced(model, piece), tiny.tokenizer(), drafter) for piece in (None, 7)]


@pytest.mark.parametrize("drafter", [None, "context"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
def test_texts_are_the_same_however_prompts_are_read(name: str, drafter: str | None) -> None:
    whole, chunks = engines(drafter, name)
    prompts = [tiny.prompt(n, seed=n) for n in (40, 5, 23)]
    sampling = Sampling(temperature=0.8, seed=3, n=2)
    for request in (prompts[0], prompts):
        one, other = (
            engine.generate(request, sampling, max_new_tokens=12) for engine in (whole, chunks)
        )
        flat = [(one, other)] if request is prompts[0] else zip(one, other, strict=True)
        assert all([a.tokens for a in x] == [b.tokens for b in y] for x, y in flat)
    ids = torch.tensor([prompts[0]])
    theirs = chunks.model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)
    assert chunks.generate(ids, max_new_tokens=12).tokens == theirs[0, 40:].tolist()


def test_a_drafter_is_reported_the_states_of_all_chunks() -> None:
    watchers = [Watcher(), Watcher()]
    for watcher, piece in zip(watchers, (None, 4), strict=True):
        target = pieced(tiny.model("llama", dtype=torch.float64), piece)
        Engine(target, drafter=watcher, budget=3).generate(tiny.prompt(19), max_new_tokens=3)
    (((tokens, one),), ((others, other),)) = (watcher.sessions[0].prompts for watcher in watchers)
    assert tokens.tolist() == others.tolist() == tiny.prompt(19)
    torch.testing.assert_close(one, other)


def test_what_was_preserved_is_not_counted_and_the_rest_is_read_in_chunks() -> None:
    _, request = engines()
    cache, message = PrefixCache(), list[tuple[int, int]]()

    def note(done: int, total: int) -> None:
        message.append((done, total))

    text = tiny.prompt(30)
    first = request.generate(text, max_new_tokens=8, prefix_cache=cache, on_read=note)
    assert message == [(0, 30), (6, 30), (12, 30), (18, 30), (24, 30), (30, 30)]
    text = [*text, *first.tokens, *tiny.prompt(9, seed=2)]
    message.clear()
    widths = Widths(request.model)
    again = request.generate(text, max_new_tokens=8, prefix_cache=cache, on_read=note)
    assert widths.taken()[:3] == [5, 5, 1]
    assert message == [(0, 10), (5, 10), (10, 10)]  # with the last token of the text before
    assert again.tokens == request.generate(text, max_new_tokens=8).tokens
    assert message[2:] == [(10, 10)], "a call that does not ask is not told"
    request.generate([*text, *again.tokens, *tiny.prompt(9)], max_new_tokens=2, prefix_cache=cache)
    assert message[2:] == [(10, 10)], "nor is the caller before"


def test_a_stream_tells_and_short_prompts_do_not() -> None:
    _, request = engines()
    message: list[tuple[int, int]] = []

    def note(done: int, total: int) -> None:
        message.append((done, total))

    text = "a b c d e f g h i j k l m n o p q r s t u v w x y z"
    "".join(request.stream(text, max_new_tokens=4, on_read=note))
    assert message[0][0] == 0 and message[-1][0] == message[-1][1] == message[0][1] > 7
    message.clear()
    request.generate([1, 2, 3], max_new_tokens=4, on_read=note)
    assert message == []
    with pytest.raises(InputError, match="on_read is 3"):
        request.generate([1, 2, 3], max_new_tokens=4, on_read=3)  # type: ignore[arg-type]


def test_what_a_watcher_raises_ends_the_prefill_alone() -> None:
    _, request = engines()
    cache, text = PrefixCache(), tiny.prompt(30)

    def stop(done: int, total: int) -> None:
        if done > 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        request.generate(text, max_new_tokens=4, prefix_cache=cache, on_read=stop)
    expected = request.generate(text, max_new_tokens=4).tokens
    assert request.generate(text, max_new_tokens=4, prefix_cache=cache).tokens == expected


def test_models_that_keep_states_read_whole() -> None:
    target = PathTarget(copy.deepcopy(build("llama")))
    target.piece = 4
    widths, message = Widths(target.model), []
    engine = Engine(target, drafter=None)
    engine.generate(
        list(range(1, 20)), max_new_tokens=2, on_read=lambda done, total: message.append(done)
    )
    assert widths.taken()[0] == 19 and message == []


def test_a_cpu_reads_in_chunks_unless_reported_otherwise() -> None:
    target = CausalTarget(build("llama"))
    assert target.piece == reading.PIECE
    with target.open(1, 4) as session:
        assert isinstance(session, TreeSession) and session.on_read is None


def test_accelerators_read_in_chunks_too_in_larger_ones() -> None:
    assert reading.piece_of(torch.device("cpu")) == reading.PIECE
    for other in ("cuda", "mps", "xpu"):
        assert reading.piece_of(torch.device(other)) == reading.LARGE_PIECE > reading.PIECE
