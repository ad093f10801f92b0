"""A processor that remembers: every text of a call has one of its own, speculation or not."""

from __future__ import annotations

import functools
import threading
from typing import Any

import pytest
import torch

from ragspec.engine.engine import Engine
from ragspec.engine.output import Generation
from ragspec.errors import InputError
from ragspec.sampling.settings import Sampling
from tests.support import tiny
from tests.support.mixing import MixingDrafter

PROMPTS = [[5, 6, 7, 8, 9, 5], [40, 41, 3], [9] * 8]
NEW = 14


class Counting:
    """Favours a token that depends on how often it was called, and on what it saw first."""

    def __init__(self) -> None:
        self.calls = 0
        self.first: list[int] = []

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.first = self.first or ids[0].tolist()
        out = scores.clone()
        out[:, (sum(self.first) + 7 * self.calls) % 90] += 6.0
        return out

    def act(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return self(ids, scores)


class Pair:
    """Two processors that work on one memory."""

    def __init__(self, memory: Counting, other: bool) -> None:
        self.memory, self.other = memory, other

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores if self.other and self.memory.calls % 3 else self.memory(ids, scores)


def of_one_memory() -> list[Any]:
    memory = Counting()
    return [Pair(memory, False), Pair(memory, True)]


def call(count: Any, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = count(ids, scores)
    return result


INPUTS: dict[str, Any] = {
    "object": lambda: [Counting()],
    "method": lambda: [Counting().act],
    "partial": lambda: [functools.partial(call, Counting())],
    "two": of_one_memory,
    "twice": lambda: [Counting()] * 2,
}


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.model("llama", dtype=torch.float64)


def texts(engine: Engine, prompts: Any, sampling: Sampling, inputs: Any) -> list[list[int]]:
    results = engine.generate(
        prompts, sampling, max_new_tokens=NEW, ignore_eos=True, logits_processor=inputs
    )
    flat: list[Generation] = [
        each for one in results for each in (one if isinstance(one, list) else [one])
    ]
    return [each.tokens for each in flat]


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("kind", INPUTS)
def test_texts_of_a_batch_are_those_of_each_prompt_alone(kind: str, n: int, model: Any) -> None:
    make = INPUTS[kind]
    seeds = [3, 4, 5]
    sampling = Sampling(temperature=0.8, seed=seeds, n=n)
    plain = Engine(model, drafter=None)
    alone = [
        texts(plain, [prompt], Sampling(temperature=0.8, seed=[seed], n=n), make())
        for prompt, seed in zip(PROMPTS, seeds, strict=True)
    ]
    whole = [tokens for result in alone for tokens in result]
    truth = {tuple(p): result[0] for p, result in zip(PROMPTS, alone, strict=True)}
    for size in (1, 2, 16):
        drafted = Engine(model, drafter=MixingDrafter(truth, right=0.8), budget=8, batch_size=size)
        assert texts(drafted, PROMPTS, sampling, make()) == whole
        batch = Engine(model, drafter=None, batch_size=size)
        assert texts(batch, PROMPTS, sampling, make()) == whole
    without = texts(plain, PROMPTS, sampling, [])
    assert all(one != other for one, other in zip(whole, without, strict=True))


def test_several_texts_leave_the_object_alone_and_a_single_one_has_it_itself(model: Any) -> None:
    inputs = Counting()
    engine = Engine(model, drafter=None)
    texts(engine, PROMPTS, Sampling(), [inputs])
    texts(engine, PROMPTS[:1], Sampling(temperature=1.0, n=2), [inputs])
    assert (inputs.calls, inputs.first) == (0, [])
    texts(engine, PROMPTS[:1], Sampling(), [inputs])
    assert (inputs.calls, inputs.first) == (NEW, PROMPTS[0])


class Holding(Counting):
    """Holds what is heavy, or cannot be copied at all."""

    def __init__(self, **held: Any) -> None:
        super().__init__()
        self.held: list[Any] = []
        vars(self).update(held)

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.held.append(vars(self).get("model"))
        return super().__call__(ids, scores)


def test_copies_share_models_and_the_tokenizer(model: Any) -> None:
    known: list[tuple[int, int, int]] = []

    class Looking(Holding):
        def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            known.append((id(self.model), id(self.tokenizer), id(self.other)))  # type: ignore[attr-defined]
            return super().__call__(ids, scores)

    tokenizer, other = tiny.tokenizer(), torch.nn.Linear(2, 2)
    inputs = Looking(model=model, tokenizer=tokenizer, other=other)
    texts(Engine(model, tokenizer, drafter=None), PROMPTS, Sampling(), [inputs])
    assert set(known) == {(id(model), id(tokenizer), id(other))}
    assert inputs.calls == 0


def test_what_cannot_be_copied_is_refused_for_several_texts(model: Any) -> None:
    engine = Engine(model, drafter=None)
    inputs = Holding(lock=threading.Lock())
    with pytest.raises(InputError, match=r"Holding cannot be copied .*one text at a time"):
        texts(engine, PROMPTS, Sampling(), [inputs])
    assert len(texts(engine, PROMPTS[:1], Sampling(), [inputs])[0]) == NEW


class Rows:
    """Makes what belongs to a text by its number."""

    def __init__(self) -> None:
        self.queries: list[int] = []

    def of_row(self, row: int) -> Any:
        self.queries.append(row)

        def favour(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return scores.index_fill(1, torch.tensor([10 + row]), 1e9)

        return favour


def test_an_object_may_make_the_processor_of_each_text(model: Any) -> None:
    inputs = Rows()
    engine = Engine(model, drafter=None, batch_size=2)
    result = texts(engine, PROMPTS, Sampling(temperature=1.0, n=2), [inputs])
    assert inputs.queries == list(range(6))
    assert result == [[10 + row] * NEW for row in range(6)]


def test_an_object_may_make_the_criterion_of_each_text(model: Any) -> None:
    class Lengths:
        def of_row(self, row: int) -> Any:
            return lambda ids, scores: ids.shape[1] >= len(PROMPTS[row]) + 2 + row

    results = Engine(model, drafter=None, batch_size=2).generate(
        PROMPTS, max_new_tokens=NEW, ignore_eos=True, stopping_criteria=[Lengths()]
    )
    assert [len(result.tokens) for result in results] == [2, 3, 4]
