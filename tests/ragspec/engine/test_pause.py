"""A text that pauses and goes on is the text that never paused."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from ragspec import Engine, Generation, Sampling
from ragspec.errors import InputError
from ragspec.needs import LAST, Needs
from ragspec.retrievers.methods.context import ContextSession
from ragspec.sampling.transform import RowTransform, TextStart, Transform
from tests.support import tiny
from tests.support.calls import noted

SETTINGS = [
    Sampling(),
    Sampling(temperature=0.9, seed=4),
    Sampling(temperature=1.1, top_k=20, min_p=0.01, min_new_tokens=11, seed=2),
    Sampling(temperature=0.7, repetition_penalty=1.3, frequency_penalty=0.4, top_p=0.8, seed=9),
    Sampling(presence_penalty=0.6, no_repeat_ngram_size=3),
]


WHOLE: dict[str, Any] = {"max_new_tokens": 25, "ignore_eos": True}


def engine(drafter: Any = None, **options: Any) -> Engine:
    target = tiny.model(dtype=torch.float64)
    if drafter == "model":
        return Engine(target, tiny.tokenizer(), None, tiny.model(seed=1, dtype=torch.float64))
    return Engine(target, tiny.tokenizer(), drafter, **options)


def in_strides(
    request: Engine, prompt: list[int], sampling: Sampling, strides: random.Random, **options: Any
) -> list[Generation]:
    """Write a text in strides of random lengths, and return all of them."""
    results, written = list[Generation](), list[int]()
    while not results or results[-1].finish_reason == "paused":
        stride: Any = {"resume_from": written, "stop_after": strides.randint(1, 6)}
        results.append(request.generate(prompt, sampling, **stride, **options))
        written = results[-1].tokens
    return results


@pytest.mark.parametrize("sampling", SETTINGS)
@pytest.mark.parametrize("drafter", [None, "context", "auto", "model"])
@pytest.mark.parametrize("keeps", [False, True], ids=["read again", "cached"])
def test_strides_equal_one_call(drafter: Any, sampling: Sampling, keeps: bool) -> None:
    request = engine(drafter)
    for seed in range(3):
        prompt = tiny.prompt(12 + seed, seed=seed)
        options: dict[str, Any] = {"max_new_tokens": 30, "logprobs": 2}
        whole = request.generate(prompt, sampling, **options)
        if seed == 2:  # ended by a string that lies across strides
            options["stop"] = request.tokenizer.decode(whole.tokens[17:20]) or "e"
        whole = request.generate(prompt, sampling, **options)
        request.prefix_cache.max_bytes = keeps << 30
        parts = in_strides(request, prompt, sampling, random.Random(seed), **options)
        assert parts[-1].tokens == whole.tokens
        assert parts[-1].text == whole.text
        assert parts[-1].finish_reason == whole.finish_reason
        assert [len(part.logprobs or ()) for part in parts] == [p.report.tokens for p in parts]
        assert [item.token for part in parts for item in part.logprobs or ()] == whole.tokens
        assert all(whole.tokens[: len(part.tokens)] == part.tokens for part in parts)


def test_stop_after_counts_the_tokens_of_a_call() -> None:
    request, prompt = engine("auto"), tiny.prompt()
    first = request.generate(prompt, stop_after=4, **WHOLE)
    assert (len(first.tokens), first.finish_reason) == (4, "paused")
    second = request.generate(prompt, resume_from=first.tokens, stop_after=5, **WHOLE)
    assert (len(second.tokens), second.report.tokens) == (9, 5)
    last = request.generate(prompt, resume_from=second.tokens, stop_after=16, **WHOLE)
    assert (len(last.tokens), last.finish_reason) == (25, "length")


def test_a_resumed_text_may_have_another_prompt_and_continues_its_noise() -> None:
    request, sampling = engine(), Sampling(temperature=1.2, seed=5)
    begun = request.generate(tiny.prompt(10), sampling, stop_after=6, **WHOLE)
    other = tiny.prompt(17, seed=3)
    went_on = request.generate(other, sampling, resume_from=begun.tokens, **WHOLE)
    assert went_on.tokens[:6] == begun.tokens
    # The distribution of each token is that after the other prompt.
    tokens = list(begun.tokens)
    while len(tokens) < 25:
        tokens = request.generate(other, sampling, resume_from=tokens, stop_after=1, **WHOLE).tokens
    assert tokens == went_on.tokens
    # With the written tokens in the prompt, the noise begins at index 0 again.
    again = request.generate([*other, *begun.tokens], sampling, **WHOLE)
    assert again.tokens[:19] != went_on.tokens[6:]


def test_pieces_of_paused_streams_join_without_the_stop_string() -> None:
    request = engine("auto")
    options: dict[str, Any] = {"max_new_tokens": 30, "ignore_eos": True}
    whole = request.generate(tiny.prompt(), **options)
    options["stop"] = request.tokenizer.decode(whole.tokens[21:25])
    whole = request.generate(tiny.prompt(), **options)
    chunks, written = list[str](), list[int]()
    while True:
        stream = request.stream(tiny.prompt(), resume_from=written, stop_after=3, **options)
        chunks.extend(stream)
        written = stream.result.tokens
        if stream.result.finish_reason != "paused":
            break
    assert "".join(chunks) == whole.text
    assert written == whole.tokens


def test_listeners_receive_whole_texts_alone() -> None:
    request, finished = engine(), list[Generation]()
    request.on_finish(finished.append)
    parts = in_strides(request, tiny.prompt(), Sampling(), random.Random(1), max_new_tokens=12)
    assert len(parts) > 1
    assert [each.tokens for each in finished] == [parts[-1].tokens]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"stop_after": 0}, "stop_after is 0; expected a whole number"),
        ({"stop_after": 1.5}, "stop_after is 1.5; expected a whole number"),
        ({"resume_from": 5}, "resume_from is 5; expected a list of token ids"),
        ({"resume_from": [1, 999]}, "resume_from has the token id 999"),
        ({"resume_from": [3, "a"]}, "resume_from has the token id 'a'"),
        (
            {"resume_from": [4] * 9, "max_new_tokens": 8},
            "resume_from has 9 tokens and max_new_tokens is 8",
        ),
        ({"resume_from": [7, 4], "stop_token_ids": [7]}, "expected a text that ends there"),
        ({"resume_from": [4], "prompts": [[1, 2], [3]]}, "resume_from= with several texts"),
    ],
)
def test_invalid_pauses_and_resumed_tokens_are_refused(
    options: dict[str, Any], expected: str
) -> None:
    with pytest.raises(InputError, match=expected):
        engine().generate(**{"prompts": tiny.prompt(), **options})


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"stop_token_ids": [7]}, "stop"),
        ({"max_new_tokens": 3}, "length"),
        ({"stopping_criteria": [lambda ids, scores: ids[0, -2:].tolist() == [6, 7]]}, "stop"),
    ],
)
def test_resuming_a_finished_text_returns_it_unchanged(
    options: dict[str, Any], reason: str
) -> None:
    result = engine("context").generate(tiny.prompt(), resume_from=[5, 6, 7], **options)
    assert result.tokens == [5, 6, 7] and result.finish_reason == reason
    assert result.report.forward_passes == 0 and result.report.tokens == 0


def test_resuming_a_text_that_ends_with_a_stop_string_cuts_it() -> None:
    request = engine()
    text = request.tokenizer.decode([5, 6, 7])
    last = request.tokenizer.decode([7])
    result = request.generate(tiny.prompt(), resume_from=[5, 6, 7], stop=last)
    assert result.text == text[: text.index(last)] and result.finish_reason == "stop"


SAMPLINGS = [Sampling(), Sampling(temperature=0.9, top_p=0.9, repetition_penalty=1.2, seed=4)]


class Tilt(Transform, RowTransform):
    """Adds a product with the hidden state to the logits of each node."""

    name = "tilted"
    needs = Needs(hidden_states=(LAST,))

    def __init__(self, strength: float = 1.0) -> None:
        sample = torch.Generator().manual_seed(1)
        self.weights = strength * torch.randn(64, tiny.VOCAB, generator=sample).double()
        self.queries: list[int] = []
        self.states = torch.zeros(0, 64)

    def open(self, start: TextStart) -> Tilt:
        return self

    def forward(self, states: torch.Tensor | None, tree: Any, tokens: Any) -> None:
        assert states is not None and len(states) == len(tree) + 1
        self.states = states

    def logits(self, node: int, logits: torch.Tensor, index: int) -> torch.Tensor:
        self.queries.append(index)
        return logits + 0.1 * self.states[node + 1] @ self.weights


def by_hand(tilt: Tilt, prompt: list[int], new: int) -> list[int]:
    """Return the greedy text of the tilted distribution by whole forwards of transformers."""
    tokens = list(prompt)
    for _ in range(new):
        with torch.no_grad():
            result = tiny.model(dtype=torch.float64)(
                torch.tensor([tokens]), output_hidden_states=(LAST,)
            )
        logits = result.logits[0, -1] + 0.1 * result.hidden_states[-1][0, -1] @ tilt.weights
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


def test_the_text_is_that_of_the_changed_distribution() -> None:
    prompt = tiny.prompt()
    result = engine().generate(prompt, transform=Tilt(), **WHOLE)
    assert result.tokens == by_hand(Tilt(), prompt, 25)
    assert result.tokens != engine().generate(prompt, **WHOLE).tokens
    assert result.label == "exact-for(tilted)"


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("drafter", ["context", "auto", "recycling", "model", "prediction"])
def test_drafts_change_no_token_under_a_transform(drafter: str, sampling: Sampling) -> None:
    options: dict[str, Any] = {"max_new_tokens": 40, "ignore_eos": True, "logprobs": 1}
    plain = engine().generate(tiny.prompt(), sampling, transform=Tilt(), **options)
    if drafter == "prediction":
        options["prediction"] = plain.tokens
    request, tilt = engine("context" if drafter == "prediction" else drafter), Tilt()
    result = request.generate(tiny.prompt(), sampling, transform=tilt, **options)
    assert result.tokens == plain.tokens
    drafted, expected = ([round(t.logprob, 9) for t in r.logprobs] for r in (result, plain))
    assert drafted == expected
    assert tilt.queries == sorted(tilt.queries)
    if drafter == "prediction":
        assert result.report.accepted > 20


def test_drafters_get_no_view_under_a_transform(monkeypatch: pytest.MonkeyPatch) -> None:
    views: list[Any] = []
    observe = noted(ContextSession.observe, views, lambda session, step: step.view)
    monkeypatch.setattr(ContextSession, "observe", observe)
    engine("context").generate(tiny.prompt(), transform=Tilt(), **WHOLE)
    assert views and set(views) == {None}
    views.clear()
    engine("context").generate(tiny.prompt(), **WHOLE)
    assert None not in views  # without one they are lent


def test_each_text_and_sample_opens_its_transform() -> None:
    class Fresh(Tilt):
        def open(self, start: TextStart) -> Tilt:
            return Tilt()

    prompts = [tiny.prompt(9), tiny.prompt(17, seed=2)]
    sampling = Sampling(temperature=0.8, n=2, seed=3)
    together = engine("context").generate(prompts, sampling, transform=Fresh(), max_new_tokens=15)
    for prompt, texts in zip(prompts, together, strict=True):
        alone = engine().generate(prompt, sampling, transform=Fresh(), max_new_tokens=15)
        assert [text.tokens for text in texts] == [text.tokens for text in alone]


def test_a_rule_that_is_not_exact_keeps_its_label() -> None:
    sampling, request = Sampling(temperature=1.0, seed=1), engine("context", rule="typical")
    result = request.generate(tiny.prompt(), sampling, transform=Tilt(), max_new_tokens=9)
    assert result.label == "approximate"
