"""Long prompts are read in chunks: the same tokens and states, and progress is reported."""

import copy
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import ragspec.verification.reading as reading
from ragspec import Engine, Sampling
from ragspec.engine.prefill import portions
from ragspec.errors import InputError
from ragspec.verification.causal import CausalTarget
from ragspec.verification.path_rows import PathTarget
from tests.ragspec.verification.test_causal import build_longrope
from tests.ragspec.verification.test_hidden_states import Watcher
from tests.support import tiny
from tests.support.architectures import build
from tests.support.sessions import shapes_fed


def chunked(model: Any, piece: int | None = 7) -> CausalTarget:
    target = CausalTarget(model)
    target.piece = piece
    return target


@pytest.mark.parametrize("drafter", [None, "context", "recycling"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
def test_texts_are_the_same_however_prompts_are_read(name: str, drafter: str | None) -> None:
    model = tiny.model(name, dtype=torch.float64)
    whole, parts = (Engine(chunked(model, piece), tiny.tokenizer(), drafter) for piece in (None, 7))
    prompts = [tiny.prompt(n, seed=n) for n in (40, 5, 23)]
    sampling = Sampling(temperature=0.8, seed=3, n=2)
    for request in prompts:
        one, other = (e.generate(request, sampling, max_new_tokens=12) for e in (whole, parts))
        assert [a.tokens for a in one] == [b.tokens for b in other]
    together = parts.generate(prompts, sampling, max_new_tokens=12)
    assert [a.tokens for a in together[2]] == [b.tokens for b in other]
    theirs = tiny.greedy(model, prompts[0], 12)
    assert parts.generate(torch.tensor(prompts[:1]), max_new_tokens=12).tokens == theirs


def test_a_drafter_gets_the_states_of_all_chunks() -> None:
    watchers = [Watcher(), Watcher()]
    for watcher, piece in zip(watchers, (None, 4), strict=True):
        target = chunked(tiny.model("llama", dtype=torch.float64), piece)
        Engine(target, drafter=watcher, budget=3).generate(tiny.prompt(19), max_new_tokens=3)
    (((tokens, one),), ((others, other),)) = (watcher.sessions[0].prompts for watcher in watchers)
    assert tokens.tolist() == others.tolist() == tiny.prompt(19)
    torch.testing.assert_close(one, other)


def test_progress_counts_the_tokens_that_are_not_cached() -> None:
    model = copy.deepcopy(tiny.model("llama", dtype=torch.float64))
    request, fed = Engine(chunked(model), tiny.tokenizer(), None), shapes_fed(model)
    message: list[tuple[int, int]] = []

    def note(done: int, total: int) -> None:
        message.append((done, total))

    text = tiny.prompt(30)
    first = request.generate(text, max_new_tokens=8, on_read=note)
    assert message == [(0, 30), (7, 30), (14, 30), (21, 30), (28, 30), (30, 30)]
    text = [*text, *first.tokens, *tiny.prompt(9, seed=2)]
    message.clear()
    request.generate(text, max_new_tokens=8, on_read=note)
    assert message == [(0, 10), (7, 10), (10, 10)]  # with the last token of the text before
    assert fed[:5] == [(1, 7)] * 4 + [(1, 2)]
    message.clear()
    request.generate([1, 2, 3], max_new_tokens=4, on_read=note)
    assert message == [], "short prompts are read at once"
    letters = "a b c d e f g h i j k l m n o p q r s t u v w x y z"
    "".join(request.stream(letters, max_new_tokens=4, on_read=note))
    assert message[0][0] == 0 and message[-1][0] == message[-1][1] == message[0][1] > 7
    with pytest.raises(InputError, match="on_read is 3"):
        request.generate([1, 2, 3], max_new_tokens=4, on_read=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_an_error_of_on_read_ends_the_prefill_alone(error: type[BaseException]) -> None:
    request = Engine(chunked(tiny.model("llama", dtype=torch.float64)), tiny.tokenizer(), None)
    text = tiny.prompt(30)

    def stop(done: int, total: int) -> None:
        if done > 10:
            raise error

    with pytest.raises(error):
        request.generate(text, max_new_tokens=4, on_read=stop)
    again = request.generate(text, max_new_tokens=4)
    assert again.report.cached_tokens in (0, 14)
    request.prefix_cache.clear()
    assert request.generate(text, max_new_tokens=4).tokens == again.tokens


def test_prompts_that_cannot_be_divided_are_read_at_once() -> None:
    paths = PathTarget(copy.deepcopy(build("llama")))
    paths.piece, message = 4, list[int]()
    for target in (paths, CausalTarget(build_longrope("llama"))):
        fed = shapes_fed(target.model)
        Engine(target, drafter=None).generate(
            list(range(1, 20)), max_new_tokens=2, on_read=lambda *figures: message.extend(figures)
        )
        assert fed[0] == (1, 19)
    assert message == []


def test_prompts_are_read_in_smaller_chunks_beside_running_texts() -> None:
    model = copy.deepcopy(tiny.model("llama", dtype=torch.float64))
    request = Engine(model, tiny.tokenizer(), None).with_limits(16, chunk=8)
    handle = request.submit([4, 5], max_new_tokens=60, ignore_eos=True)
    next(handle)
    fed = shapes_fed(model)
    long = request.submit(tiny.prompt(40), max_new_tokens=2)
    assert len(long.result().tokens) == 2 and len(handle.result().tokens) == 60
    assert 0 < max(width for _, width in fed) <= 8


@pytest.mark.parametrize(
    ("chunk", "counts"), [(8, [5, 3]), (5, [5]), (30, [5, 6, 7]), (None, [5, 6, 7])]
)
def test_prompts_of_a_forward_share_its_chunk(chunk: int | None, counts: list[int]) -> None:
    jobs: list[Any] = [Mock(left=[1] * n) for n in (5, 6, 7)]
    for job in jobs:
        job.begins_like.return_value = False
    assert [count for _, count in portions(jobs, chunk, Mock())] == counts


def test_accelerators_read_larger_chunks() -> None:
    assert CausalTarget(build("llama")).piece == reading.PIECE
    for other in ("cuda", "mps", "xpu"):
        assert reading.piece_of(torch.device(other)) == reading.LARGE_PIECE > reading.PIECE
