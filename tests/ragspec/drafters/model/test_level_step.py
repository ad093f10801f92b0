"""Trees drafted in one call equal those drafted level by level, whatever was committed."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from ragspec import Engine, Sampling, load_model
from ragspec.drafters.base import DraftContext, DraftRequest
from ragspec.drafters.model.drafter import ModelDrafter, ModelSession
from ragspec.drafters.model.forward_step import ForwardStep
from ragspec.drafters.model.tree_shape import TreeShape
from ragspec.rules.base import Step
from ragspec.trees.draft_tree import ROOT, DraftTree
from ragspec.verification.causal import CausalTarget
from ragspec.verification.open import open_static, open_target
from tests.support import architectures, tiny
from tests.support.loops import draft_request
from tests.support.pretend import Pretend, pretend
from tests.support.pretend_steps import check_drafting

SHAPE = TreeShape.by_rank((3, 4, 3, 1))
STEPS = 50
NAMES = ("llama", "qwen3", "gemma3_text", "starter-draft")  # the third has layers of two windows


def model_of(name: str) -> Any:
    if name == "starter-draft":
        return load_model(name, dtype=torch.float64)[0]
    return architectures.build(name)


def session_of(
    model: Any, static: str, shape: TreeShape | None = SHAPE, **options: Any
) -> ModelSession:
    drafter = ModelDrafter(model, mode="deterministic", width=shape, static=static, **options)
    return drafter.open(DraftRequest((1, 2, 3, 4, 5), int(model.config.vocab_size)))


def emitted(tree: DraftTree, rng: np.random.Generator, size: int) -> list[int]:
    """Return tokens that a target may emit: a part of a path of the tree, then another token."""
    results: list[int] = []
    node = ROOT
    for _ in range(int(rng.integers(0, 6))):
        below = np.flatnonzero(tree.parents == node)
        if not len(below):
            break
        node = int(rng.choice(below))
        results.append(int(tree.tokens[node]))
    return [*results, int(rng.integers(0, size))]


def drafted_alike(
    one: ModelSession, other: ModelSession, context: DraftContext, budget: int = 11
) -> DraftTree:
    """Return the draft of one session; check that the other proposes the same."""
    expected, result = one.propose(context, budget), other.propose(context, budget)
    assert result.tokens.tolist() == expected.tokens.tolist()
    assert result.parents.tolist() == expected.parents.tolist()
    np.testing.assert_allclose(result.accept_prob, expected.accept_prob, rtol=1e-9)
    return expected


def walked(
    one: ModelSession, other: ModelSession, size: int, steps: int = STEPS, *, cut: bool = True
) -> int:
    """Let two sessions draft below one growing text; return how many nodes both drafted alike.

    cut: whether budget and depth are sometimes less than those of the shape.
    """
    rng, tokens, nodes = np.random.default_rng(3), [1, 2, 3, 4, 5], 0
    for number in range(steps):
        if number % 9 == 8:
            tokens += rng.integers(0, size, 3).tolist()  # the target decoded without drafts
        budget = 5 if cut and number % 7 == 6 else 11
        context = DraftContext(list(tokens), 5, 2 + number % 6 if cut and number % 5 == 4 else 40)
        expected = drafted_alike(one, other, context, budget)
        for (node, best, chances), (place, least, claims) in zip(
            one.distributions(), other.distributions(), strict=True
        ):
            assert (node, best[:8]) == (place, least[:8])
            np.testing.assert_allclose(chances, claims, rtol=1e-8, atol=1e-12)
        new = emitted(expected, rng, size)
        for session in (one, other):
            session.observe(Step(tree=expected, path=(), tokens=tuple(new)))
        tokens += new
        nodes += len(expected)
    return nodes


@pytest.mark.parametrize("name", NAMES)
def test_a_tree_drafted_in_one_call_equals_one_drafted_by_levels(name: str) -> None:
    model = model_of(name)
    one, other = session_of(model, "off"), session_of(model, "eager")
    assert (one.cache.model.static, other.cache.model.static) == ("off", "eager")
    size = min(int(model.config.vocab_size), 90)
    steps = 20 if name == "gemma3_text" else STEPS
    assert walked(one, other, size, steps) > 6 * steps


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
@pytest.mark.parametrize(
    "options",
    [
        *({"width": 1}, {"width": 4}, {"width": SHAPE}),
        *({"mode": mode, "width": (3, 2)} for mode in ("sampled", "sampled-without-replacement")),
    ],
    ids=str,
)
def test_forwards_of_fixed_shape_draft_as_usual_ones(name: str, options: dict[str, Any]) -> None:
    model = model_of(name)
    size = int(model.config.vocab_size)
    sampling = Sampling(temperature=0.8, top_k=20)
    request = draft_request((1, 2, 3, 4, 5), sampling, 2, size)
    one, other = (
        ModelDrafter(model, static=static, min_expected_gain=0.0, **options).open(request)
        for static in ("off", "eager")
    )
    assert walked(one, other, min(size, 90), 20) > 40
    assert one.cache.forwards == other.cache.forwards
    assert other.cache._arena is not None
    assert {type(step) for step in other.cache._arena.steps.values()} == {ForwardStep}


def test_a_forward_of_fixed_shape_waits_once_and_launches_little_else() -> None:
    model, request = architectures.build("llama"), DraftRequest((1, 2, 3, 4, 5), 90)
    with Pretend() as device:
        drafter = ModelDrafter(pretend(model), width=1, static="eager", min_expected_gain=0.0)
        check_drafting(device, drafter.open(request), beside=6)


@pytest.mark.parametrize("shape", [TreeShape.by_rank((2, 2)), None])
def test_a_shape_is_compiled_into_one_graph_and_never_broken(
    shape: TreeShape | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager = partial(open_static, backend="eager")
    monkeypatch.setattr("ragspec.drafters.model.drafter.open_static", eager)
    torch._dynamo.reset()
    counters.clear()
    model = architectures.build("llama")
    one, other = session_of(model, "off", shape), session_of(model, "compile", shape)
    walked(one, other, 90, 25, cut=False)
    assert other.cache._arena is not None
    instance = other.cache._arena.steps
    assert counters["graph_break"] == {}
    assert counters["stats"]["unique_graphs"] == len(instance) <= 6
    assert other.cache.model.static == "compile"


def test_a_tree_drafted_in_one_call_waits_once() -> None:
    with Pretend() as device:
        session = session_of(pretend(architectures.build("llama")), "eager")
        check_drafting(device, session, beside=12, nodes=11, steps=1)


@pytest.mark.parametrize("shape", [SHAPE, None])
def test_drafts_after_many_undrafted_tokens_equal_usual_ones(shape: TreeShape | None) -> None:
    model = architectures.build("llama")
    one, other = session_of(model, "off", shape), session_of(model, "eager", shape)
    rng = np.random.default_rng(0)
    tokens = [1, 2, 3, 4, 5]
    for ahead in (1, 63, 64, 90):  # the last is more than a step takes
        tokens += rng.integers(0, 90, ahead).tolist()
        drafted_alike(one, other, DraftContext(list(tokens), 5, 20))
    assert other.cache.model.static == "eager"


def test_drafts_at_the_end_of_the_context_equal_usual_ones() -> None:
    model = tiny.model(dtype=torch.float64, max_position_embeddings=20)
    one, other = session_of(model, "off"), session_of(model, "eager")
    assert other.cache.model.static == "eager"
    tokens = [1, 2, 3, 4, 5]
    for _ in range(18):
        tokens.append(len(tokens) + 1)
        drafted_alike(one, other, DraftContext(list(tokens), 5, 40))


PROMPT = [5, 6, 7, 8, 9, 5, 6, 7]
LEVELS = (3, 4, 2)


class LocalVariant(CausalTarget):
    """A target of another class, whose forwards are unknown."""


def model(seed: int = 0) -> Any:
    return tiny.model("llama", seed=seed, dtype=torch.float64)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("static", ["off", "eager"])
def test_the_text_is_that_of_plain_decoding(static: str, seed: int) -> None:
    plain = Engine(model(), drafter=None).generate(PROMPT, max_new_tokens=30)
    drafter = ModelDrafter(model(seed), width=LEVELS, static="eager")
    engine = Engine(open_target(model(), static), drafter=drafter, budget=9)
    for _ in range(2):  # the second time over the buffers of the first
        result = engine.generate(PROMPT, max_new_tokens=30)
        assert result.tokens == plain.tokens
        assert any(len(step.tree) == 9 for step in result.steps)
        assert seed or result.report.accepted >= 18


def test_static_names_the_reason_for_usual_forwards() -> None:
    request = DraftRequest(tuple(PROMPT), tiny.VOCAB)
    noisy = draft_request(PROMPT, Sampling(temperature=1.0))
    drafter = ModelDrafter(model(), width=LEVELS, static="eager")
    sessions = [drafter.open(request), drafter.open(noisy)]
    assert [each.cache.model.static for each in sessions] == ["eager", "eager"]
    following = DraftRequest(tuple(PROMPT), tiny.VOCAB, static="graph")
    sessions = [ModelDrafter(model(), width=LEVELS).open(each) for each in (request, following)]
    assert [each.cache.model.static for each in sessions] == ["off", "off"]  # on a CPU
    wide = ModelDrafter(model(), width=(70,), static="eager").open(request)
    assert len(wide.propose(DraftContext([*PROMPT, 1], 8, 9), 80)) == 64
    session = ModelDrafter(LocalVariant(model()), width=LEVELS, static="eager").open(request)
    assert session.cache.model.static == "off: LocalVariant makes its forwards in a way of its own"
    assert len(session.propose(DraftContext([*PROMPT, 1], 8, 9), 9)) == 9
