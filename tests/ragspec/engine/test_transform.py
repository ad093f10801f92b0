"""A transform of the target's law: decoded exactly, whatever drafts there are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ragspec.engine.engine import Engine
from ragspec.errors import InputError
from ragspec.retrievers import ContextDrafter
from ragspec.sampling.settings import Sampling
from ragspec.sampling.transform import TextStart
from tests.support import tiny

SAMPLINGS = [Sampling(), Sampling(temperature=0.9, top_p=0.9, repetition_penalty=1.2, seed=4)]


class Tilt:
    """Adds a product with the hidden state: a law that hangs on the states of every place."""

    name = "tilted"
    reads_hidden = True

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


def engine(drafter: Any = None, **options: Any) -> Engine:
    return Engine(tiny.model(dtype=torch.float64), tiny.tokenizer(), drafter, **options)


def by_hand(tilt: Tilt, prompt: list[int], new: int) -> list[int]:
    """Return the greedy text of the tilted law by whole forwards of transformers."""
    tokens = list(prompt)
    for _ in range(new):
        with torch.no_grad():
            result = tiny.model(dtype=torch.float64)(
                torch.tensor([tokens]), output_hidden_states=True
            )
        logits = result.logits[0, -1] + 0.1 * result.hidden_states[-1][0, -1] @ tilt.weights
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


def test_the_text_is_that_of_the_changed_distribution() -> None:
    prompt = tiny.prompt()
    options: dict[str, Any] = {"max_new_tokens": 25, "ignore_eos": True}
    result = engine().generate(prompt, transform=Tilt(), **options)
    assert result.tokens == by_hand(Tilt(), prompt, 25)
    assert result.tokens != engine().generate(prompt, **options).tokens
    assert result.label == "exact-for(tilted)"


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("drafter", ["context", "auto", "recycling", "model", "prediction"])
def test_drafts_do_not_move_it(drafter: str, sampling: Sampling) -> None:
    options: dict[str, Any] = {"max_new_tokens": 40, "ignore_eos": True, "logprobs": 1}
    plain = engine().generate(tiny.prompt(), sampling, transform=Tilt(), **options)
    if drafter == "model":
        request = Engine(
            tiny.model(dtype=torch.float64), tiny.tokenizer(), None,
            tiny.model(seed=1, dtype=torch.float64),
        )  # fmt: skip
    else:
        request = engine("context" if drafter == "prediction" else drafter)
    if drafter == "prediction":
        options["prediction"] = plain.tokens
    tilt = Tilt()
    result = request.generate(tiny.prompt(), sampling, transform=tilt, **options)
    assert result.tokens == plain.tokens
    assert [round(t.logprob, 9) for t in result.logprobs or ()] == [
        round(t.logprob, 9) for t in plain.logprobs or ()
    ]
    assert tilt.queries == sorted(tilt.queries)
    if drafter == "prediction":
        assert result.report.accepted > 20


def test_no_drafter_asks_about_places_that_no_rule_visited() -> None:
    views: list[Any] = []

    class Curious(ContextDrafter):
        def open(self, request: Any) -> Any:
            session = super().open(request)
            observe = session.observe

            def watched(step: Any) -> None:
                views.append(step.view)
                observe(step)

            session.observe = watched  # type: ignore[method-assign]
            return session

    engine(Curious()).generate(tiny.prompt(), transform=Tilt(), max_new_tokens=9, ignore_eos=True)
    assert views and set(views) == {None}
    views.clear()
    engine(Curious()).generate(tiny.prompt(), max_new_tokens=9, ignore_eos=True)
    assert None not in views  # without one they are lent


def test_several_texts_and_samples_have_one_each() -> None:
    class Fresh(Tilt):
        def open(self, start: TextStart) -> Tilt:
            return Tilt()

    prompts = [tiny.prompt(9), tiny.prompt(17, seed=2)]
    sampling = Sampling(temperature=0.8, n=2, seed=3)
    together = engine("context").generate(prompts, sampling, transform=Fresh(), max_new_tokens=15)
    for prompt, texts in zip(prompts, together, strict=True):
        alone = engine().generate(prompt, sampling, transform=Fresh(), max_new_tokens=15)
        assert [text.tokens for text in texts] == [text.tokens for text in alone]


def test_what_is_no_transform_is_refused() -> None:
    inputs: list[Any] = [3, Tilt, "knn"]
    for wrong in inputs:
        with pytest.raises(InputError, match="expected an object with name, reads_hidden"):
            engine().generate(tiny.prompt(), transform=wrong)


def test_a_rule_that_is_not_exact_keeps_its_label() -> None:
    result = engine("context", rule="typical").generate(
        tiny.prompt(), Sampling(temperature=1.0, seed=1), transform=Tilt(), max_new_tokens=9
    )
    assert result.label == "approximate"
