"""The sequences of one call: seeds, samples, and how they end."""

import copy
import functools
import threading
from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch

from ragspec import Engine, ModelDrafter, Sampling
from ragspec.engine.sequence import Sequence
from ragspec.errors import InputError
from tests.ragspec.engine.test_engine import flat
from tests.support import tiny
from tests.support.calls import CountingCriterion, StatefulProcessor
from tests.support.noisy import NoisyTrees

PROMPTS = [[5, 6, 7, 8, 9, 5], [40, 41, 3], [9] * 8]
NEW = 14


def opened(engine: Engine, prompts: Any, sampling: Sampling) -> list[Sequence]:
    requests, _ = engine.prepare(prompts, sampling, {"max_new_tokens": 4})
    sequences = [Sequence(request, engine.parts) for request in requests]
    for each in sequences:
        each.begin()
    return sequences


@pytest.mark.parametrize("seed", [[3, 4], None])
def test_every_prompt_has_n_sequences_of_one_seed(seed: list[int] | None, plain: Engine) -> None:
    sequences = opened(plain, PROMPTS[:2], Sampling(temperature=1.0, n=2, seed=seed))
    noises = [each.distribution.noise for each in sequences]
    one, other = seed or (noises[0].seed, noises[2].seed)
    pairs = [(noise.seed, noise.sample) for noise in noises]
    assert pairs == [(one, 0), (one, 1), (other, 0), (other, 1)] and one != other
    assert [each.context.tokens for each in sequences] == [PROMPTS[0]] * 2 + [PROMPTS[1]] * 2
    assert sequences[0].context.tokens is not sequences[1].context.tokens


@pytest.mark.parametrize("budget", ["auto", 4, 0])
def test_tree_sizes_are_counted_for_every_step(budget: str | int, plain: Engine) -> None:
    for new in (2, 9):
        whole = plain.generate(PROMPTS[0], max_new_tokens=new, ignore_eos=True)
        drafter = NoisyTrees({tuple(PROMPTS[0]): whole.tokens})
        drafting = Engine(plain.model, drafter=drafter, budget=budget)
        result = drafting.generate(PROMPTS[0], max_new_tokens=new, ignore_eos=True).report
        assert sum(result.budget_sizes.values()) == result.steps > 0
        assert result.budget_sizes == Counter(result.per_step_drafted)


def test_ignore_eos_continues_past_end_tokens(plain: Engine) -> None:
    ignored: dict[str, Any] = {"max_new_tokens": 10, "ignore_eos": True}
    whole = plain.generate([5, 6, 7], **ignored).tokens
    drafter = NoisyTrees({(5, 6, 7): whole})
    tuned = Engine(copy.deepcopy(plain.model), drafter=drafter, budget=6)
    tuned.model.generation_config.eos_token_id = whole[4]
    ended = tuned.generate([5, 6, 7], max_new_tokens=10)
    assert ended.tokens == whole[: whole.index(whole[4]) + 1]
    assert tuned.generate([5, 6, 7], **ignored).tokens == whole
    other = tuned.generate([5, 6, 7], **ignored, stop_token_ids=[whole[2]])
    assert other.tokens == whole[: whole.index(whole[2]) + 1]


EQUAL = [[5, 6, 7, 8]] * 3


def texts(seed: object) -> list[list[int]]:
    engine = Engine(tiny.model("llama"), drafter=None, max_batch_size=2)
    sampling = Sampling(temperature=1.5, seed=seed)  # type: ignore[arg-type]
    return [result.tokens for result in engine.generate(EQUAL, sampling, max_new_tokens=8)]


def test_seeds_are_one_for_all_prompts_or_one_for_each() -> None:
    several = texts(range(7, 10))
    assert several == texts([7, 8, 9])
    assert [texts(seed) for seed in range(7, 10)] == [[text] * 3 for text in several]
    for result in (several, texts(None)):
        assert len(set(map(tuple, result))) == 3


class Pair:
    """One of two processors that share a memory."""

    def __init__(self, memory: StatefulProcessor, other: bool) -> None:
        self.memory, self.other = memory, other

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores if self.other and len(self.memory.calls) % 3 else self.memory(ids, scores)


def call(count: Any, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = count(ids, scores)
    return result


INPUTS: dict[str, Any] = {
    "object": lambda: [StatefulProcessor()],
    "method": lambda: [StatefulProcessor().__call__],
    "partial": lambda: [functools.partial(call, StatefulProcessor())],
    "two": lambda: [Pair(memory := StatefulProcessor(), False), Pair(memory, True)],
    "twice": lambda: [StatefulProcessor()] * 2,
}


def written(engine: Engine, prompts: Any, sampling: Sampling, inputs: Any) -> list[list[int]]:
    options: Any = {"max_new_tokens": NEW, "ignore_eos": True, "logits_processor": inputs}
    return [each.tokens for each in flat(engine.generate(prompts, sampling, **options))]


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("kind", INPUTS)
def test_texts_of_a_batch_are_those_of_each_prompt_alone(kind: str, n: int, plain: Engine) -> None:
    make = INPUTS[kind]
    seeds = [3, 4, 5]
    sampling = Sampling(temperature=0.8, seed=seeds, n=n)
    alone = [
        written(plain, [prompt], Sampling(temperature=0.8, seed=[seed], n=n), make())
        for prompt, seed in zip(PROMPTS, seeds, strict=True)
    ]
    whole = [tokens for result in alone for tokens in result]
    truth = {tuple(p): result[0] for p, result in zip(PROMPTS, alone, strict=True)}
    for size, drafter in product((1, 2, 16), (NoisyTrees(truth), None)):
        batch = Engine(plain.model, drafter=drafter, budget=8, max_batch_size=size)
        assert written(batch, PROMPTS, sampling, make()) == whole
    without = written(plain, PROMPTS, sampling, [])
    assert all(one != other for one, other in zip(whole, without, strict=True))


def test_a_single_text_uses_the_processor_itself_and_several_use_copies(plain: Engine) -> None:
    inputs = StatefulProcessor()
    written(plain, PROMPTS, Sampling(), [inputs])
    written(plain, PROMPTS[:1], Sampling(temperature=1.0, n=2), [inputs])
    assert inputs.calls == []
    written(plain, PROMPTS[:1], Sampling(), [inputs])
    assert len(inputs.calls) == NEW and inputs.calls[0] == PROMPTS[:1]


@pytest.mark.parametrize("rule", ["walk", "rejection", "multi-step", "k-seq", "block", "typical"])
def test_a_processor_gets_visited_nodes_in_order_under_every_rule(rule: str, model: Any) -> None:
    width = 1 if rule in ("rejection", "block") else (2, 2)
    drafter, inputs = ModelDrafter(model, width=width, mode="sampled"), StatefulProcessor()
    engine = Engine(model, drafter=drafter, rule=rule, budget=5)
    options: Any = {"max_new_tokens": NEW, "ignore_eos": True, "logits_processor": [inputs]}
    result = engine.generate(PROMPTS[0], Sampling(temperature=1.0, seed=3), **options)
    assert inputs.calls == [[PROMPTS[0] + result.tokens[:count]] for count in range(NEW)]
    reason = f"rule '{rule}' may spoil the state of a logits_processor"
    assert (result.report.reason == reason) == (not result.report.drafted)
    del options["logits_processor"]
    assert engine.generate(PROMPTS[0], Sampling(no_repeat_ngram_size=2), **options).report.drafted


class Holding(StatefulProcessor):
    """Has attributes that are large or cannot be copied."""

    def __init__(self, **held: Any) -> None:
        super().__init__()
        vars(self).update(held)


def test_copies_share_models_and_the_tokenizer(model: Any) -> None:
    known: list[tuple[int, int, int]] = []

    class Looking(Holding):
        def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            known.append((id(self.model), id(self.tokenizer), id(self.other)))  # type: ignore[attr-defined]
            return super().__call__(ids, scores)

    tokenizer, other = tiny.tokenizer(), torch.nn.Linear(2, 2)
    inputs = Looking(model=model, tokenizer=tokenizer, other=other)
    written(Engine(model, tokenizer, drafter=None), PROMPTS, Sampling(), [inputs])
    assert set(known) == {(id(model), id(tokenizer), id(other))}
    assert inputs.calls == []


def test_a_processor_that_cannot_be_copied_is_refused_for_several_texts(plain: Engine) -> None:
    inputs = Holding(lock=threading.Lock())
    with pytest.raises(InputError, match=r"Holding cannot be copied .*one text at a time"):
        written(plain, PROMPTS, Sampling(), [inputs])
    assert len(written(plain, PROMPTS[:1], Sampling(), [inputs])[0]) == NEW


def test_criteria_count_each_text_alone_and_see_the_flags_of_others(plain: Engine) -> None:
    criterion, several = CountingCriterion(4), Sampling(temperature=1.0, n=2)
    options: Any = {"max_new_tokens": NEW, "ignore_eos": True, "stopping_criteria": [criterion]}
    texts = flat(plain.generate(PROMPTS, several, **options))
    assert [len(each.tokens) for each in texts] == [4] * 2 * len(PROMPTS)
    criterion.most = NEW
    options["on_step"] = lambda *_: setattr(criterion, "stopped", True)  # as another thread may
    texts = flat(plain.generate(PROMPTS, several, **options))
    assert max(len(each.tokens) for each in texts) <= 2 and criterion.count == 0


class Rows:
    """Makes a processor for each text by its number."""

    def __init__(self) -> None:
        self.queries: list[int] = []

    def of_row(self, row: int) -> Any:
        self.queries.append(row)
        return lambda ids, scores: scores.index_fill(1, torch.tensor([10 + row]), 1e9)


class Lengths:
    """Makes a criterion for each of two samples of each prompt."""

    def of_row(self, row: int) -> Any:
        return lambda ids, scores: ids.shape[1] >= len(PROMPTS[row // 2]) + 2 + row


def test_objects_may_make_the_processor_and_the_criterion_of_each_text(model: Any) -> None:
    engine, rows = Engine(model, drafter=None, max_batch_size=2), Rows()
    options: Any = {"max_new_tokens": NEW, "ignore_eos": True, "stopping_criteria": [Lengths()]}
    sampling = Sampling(temperature=1.0, n=2)
    results = engine.generate(PROMPTS, sampling, logits_processor=[rows], **options)
    assert rows.queries == list(range(6))
    assert [each.tokens for each in flat(results)] == [[10 + n] * (2 + n) for n in range(6)]
