"""Trees drafted in one call are those drafted level by level, whatever is committed meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from ragspec.drafters.base import DraftContext, DraftRequest
from ragspec.drafters.model.drafter import LevelSession, ModelDrafter, ModelSession
from ragspec.drafters.model.level_step import LevelCache
from ragspec.drafters.model.static_tree import TreeShape
from ragspec.rules.base import Step
from ragspec.trees.draft_tree import ROOT, DraftTree
from tests.support import architectures, tiny

SHAPE = TreeShape.by_rank((3, 4, 3, 1))
STEPS = 50


def starter() -> Any:
    from ragspec.models.load import load_model

    return load_model("starter-draft", dtype=torch.float64)[0]


MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: architectures.build("llama"),
    "qwen3": lambda: architectures.build("qwen3"),
    "gemma3_text": lambda: architectures.build("gemma3_text"),  # layers of two windows
    "starter-draft": starter,
}


def session_of(model: Any, static: str, shape: TreeShape = SHAPE, **options: Any) -> ModelSession:
    drafter = ModelDrafter(model, mode="deterministic", tree=shape, static=static, **options)
    vocab_size = int(model.config.vocab_size)
    return drafter.open(DraftRequest((1, 2, 3, 4, 5), vocab_size))


def emitted(tree: DraftTree, rng: np.random.Generator, size: int) -> list[int]:
    """Return what a target might emit: some of a path of the tree, then a token of its own."""
    results: list[int] = []
    node = ROOT
    for _ in range(int(rng.integers(0, 6))):
        below = np.flatnonzero(tree.parents == node)
        if not len(below):
            break
        node = int(rng.choice(below))
        results.append(int(tree.tokens[node]))
    return [*results, int(rng.integers(0, size))]


def step_of(tree: DraftTree, tokens: list[int]) -> Step:
    return Step(tree=tree, path=(), tokens=tuple(tokens))


def walked(
    one: ModelSession, other: ModelSession, size: int, steps: int = STEPS, *, cut: bool = True
) -> int:
    """Let two sessions draft below one growing text; return how many nodes both drafted alike.

    cut: whether budget and depth are at times less than the shape asks for.
    """
    rng, tokens, nodes = np.random.default_rng(3), [1, 2, 3, 4, 5], 0
    for number in range(steps):
        if number % 9 == 8:
            tokens += rng.integers(0, size, 3).tolist()  # the target wrote without them
        budget = 5 if cut and number % 7 == 6 else 11
        remaining = 2 + number % 6 if cut and number % 5 == 4 else 40
        context = DraftContext(list(tokens), 5, remaining)
        expected, result = one.propose(context, budget), other.propose(context, budget)
        assert result.tokens.tolist() == expected.tokens.tolist()
        assert result.parents.tolist() == expected.parents.tolist()
        np.testing.assert_allclose(result.accept_prob, expected.accept_prob, rtol=1e-9)
        for (node, best, chances), (place, least, claims) in zip(
            one.distributions(), other.distributions(), strict=True
        ):
            assert (node, best[:8]) == (place, least[:8])
            np.testing.assert_allclose(chances, claims, rtol=1e-8, atol=1e-12)
        new = emitted(expected, rng, size)
        for session in (one, other):
            session.observe(step_of(expected, new))
        tokens += new
        nodes += len(result)
    return nodes


@pytest.mark.parametrize("name", MODELS)
def test_one_call_drafts_what_is_drafted_level_by_level(name: str) -> None:
    model = MODELS[name]()
    one, other = session_of(model, "off"), session_of(model, "eager")
    assert isinstance(other, LevelSession), other.static
    assert (one.static, other.static) == ("off", "eager")
    size = min(int(model.config.vocab_size), 90)
    steps = 20 if name == "gemma3_text" else STEPS
    assert walked(one, other, size, steps) > 6 * steps


def test_a_shape_is_compiled_into_one_graph_and_never_broken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import ragspec.drafters.model.drafter as module
    from ragspec.verification.static.open import open_static

    monkeypatch.setattr(
        module, "open_static", lambda target, mode: open_static(target, mode, backend="eager")
    )
    torch._dynamo.reset()
    counters.clear()
    shape = TreeShape.by_rank((2, 2))
    model = architectures.build("llama")
    one, other = session_of(model, "off", shape), session_of(model, "compile", shape)
    assert isinstance(other, LevelSession), other.static
    walked(one, other, 90, 25, cut=False)
    instance = other.cache._arena.steps
    assert counters["graph_break"] == {}
    assert counters["stats"]["unique_graphs"] == len(instance) <= 6


def test_one_packet_visits_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    session = session_of(architectures.build("llama"), "eager")
    context = DraftContext([1, 2, 3, 4, 5, 6], 5, 40)
    session.propose(context, 11)
    visits: list[str] = []
    for name in ("tolist", "item", "numpy", "cpu", "__bool__", "__int__", "__float__", "nonzero"):
        real = getattr(torch.Tensor, name)

        def counted(self: Any, *args: Any, _real: Any = real, _name: str = name) -> Any:
            visits.append(_name)
            return _real(self, *args)

        monkeypatch.setattr(torch.Tensor, name, counted)
    tree = session.propose(context, 11)
    monkeypatch.undo()
    assert len(tree) == 11
    assert visits == ["cpu", "tolist"]  # the packet, and what was made of it on the host


def test_a_text_that_ran_ahead_is_caught_up_with() -> None:
    model = architectures.build("llama")
    one, other = session_of(model, "off"), session_of(model, "eager")
    rng = np.random.default_rng(0)
    tokens = [1, 2, 3, 4, 5]
    for ahead in (1, 63, 90):  # the last is more than a step takes
        tokens += rng.integers(0, 90, ahead).tolist()
        context = DraftContext(list(tokens), 5, 20)
        expected, result = one.propose(context, 11), other.propose(context, 11)
        assert result.tokens.tolist() == expected.tokens.tolist()
    assert isinstance(other.cache, LevelCache)


def test_the_end_of_the_context_is_drafted_as_before() -> None:
    model = tiny.model(dtype=torch.float64, max_position_embeddings=20)
    one, other = session_of(model, "off"), session_of(model, "eager")
    assert isinstance(other, LevelSession), other.static
    tokens = [1, 2, 3, 4, 5]
    for _ in range(18):
        tokens.append(len(tokens) + 1)
        context = DraftContext(list(tokens), 5, 40)
        expected, result = one.propose(context, 11), other.propose(context, 11)
        assert result.tokens.tolist() == expected.tokens.tolist()
        assert result.parents.tolist() == expected.parents.tolist()
