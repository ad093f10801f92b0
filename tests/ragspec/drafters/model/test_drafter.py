"""Drafts of a model: the text equals that of plain decoding, and the cache follows it."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from ragspec import Engine
from ragspec.budget.base import BudgetPolicy
from ragspec.budget.goodput import AutoBudget
from ragspec.drafters.base import DraftContext, Drafter, DraftRequest
from ragspec.drafters.model.cache import DraftCache
from ragspec.drafters.model.coupled import CoupledGrowth
from ragspec.drafters.model.drafter import MIN_EXPECTED_GAIN, ModelDrafter, required_gain
from ragspec.drafters.model.tree_shape import TreeShape
from ragspec.errors import InputError, UnsupportedModelError
from ragspec.models.quantized import quantized
from ragspec.rules.base import Step
from ragspec.sampling.settings import Sampling
from ragspec.trees.draft_tree import DraftKind, DraftTree
from ragspec.verification.onnx.target import OnnxTarget
from tests.support import loops, tiny
from tests.support.calls import noted

NEW = 24
SAMPLINGS = {
    "greedy": Sampling(),
    "sampled": Sampling(temperature=0.8),
    "filtered": Sampling(temperature=0.8, top_k=20, top_p=0.9, repetition_penalty=1.3),
}


def model(seed: int = 0, **overrides: Any) -> Any:
    return tiny.model(seed=seed, dtype=torch.float64, **overrides)


def alike(weight: float = 0.04) -> Any:
    """Return the tiny target with slightly changed weights."""
    instance, other = copy.deepcopy(model()), model(1).state_dict()  # models are shared by tests
    mixed = {k: (1 - weight) * v + weight * other[k] for k, v in instance.state_dict().items()}
    instance.load_state_dict(mixed)
    return instance


def write(
    drafter: Drafter | None, sampling: Sampling, new: int = NEW, budget: BudgetPolicy | int = 6
) -> tuple[list[int], list[Step]]:
    """Return the generated tokens and the steps."""
    engine, sampling = Engine(model(), drafter=drafter, budget=budget), replace(sampling, seed=0)
    result = engine.generate(tiny.prompt(), sampling, max_new_tokens=new, ignore_eos=True)
    return result.tokens, result.steps


def accepted(steps: list[Step]) -> float:
    return sum(len(step.path) for step in steps[1:]) / len(steps[1:])


@pytest.mark.parametrize("settings", SAMPLINGS)
@pytest.mark.parametrize("width", [1, 3])
def test_the_text_is_that_of_plain_decoding(settings: str, width: int) -> None:
    sampling = SAMPLINGS[settings]
    plain, _ = write(None, sampling)
    for draft in (model(1), alike()):
        drafted, steps = write(ModelDrafter(draft, width=width, min_expected_gain=0.0), sampling)
        assert drafted == plain
        assert all(step.tree.kind is DraftKind.COUPLED for step in steps[1:] if len(step.tree))
        assert max(len(step.tree) for step in steps) == 6


@pytest.mark.parametrize("settings", SAMPLINGS)
def test_every_chain_of_the_target_itself_is_accepted(settings: str) -> None:
    drafter = ModelDrafter(model(), width=1, min_expected_gain=0.0)
    _, steps = write(drafter, SAMPLINGS[settings], new=29)
    assert [len(step.path) for step in steps] == [0, 6, 6, 6, 6]


@pytest.mark.parametrize("settings", ["greedy", "sampled"])
def test_a_model_near_the_target_is_accepted_more_often(settings: str) -> None:
    _, steps = write(ModelDrafter(alike(), width=3), SAMPLINGS[settings], new=60)
    assert accepted(steps) > 1.0
    _, other = write(ModelDrafter(model(1), width=3), SAMPLINGS[settings], new=60)
    assert accepted(other) < 0.6 * accepted(steps)


@pytest.mark.parametrize("settings", SAMPLINGS)
def test_a_reused_cache_drafts_as_a_new_one(settings: str) -> None:
    drafter, prompt = ModelDrafter(alike(), width=3, min_expected_gain=0.0), tiny.prompt()
    plain, _ = write(None, SAMPLINGS[settings])
    request = loops.draft_request(prompt, SAMPLINGS[settings])
    selected, at = drafter.open(request), 1
    while at < NEW - 1:
        context = DraftContext([*prompt, *plain[:at]], len(prompt), NEW - at)
        tree = selected.propose(context, 8)
        fresh = drafter.open(request)
        new, old = fresh._growth, selected._growth
        assert isinstance(new, CoupledGrowth) and isinstance(old, CoupledGrowth)
        new.error = old.error
        new_tree = fresh.propose(context, 8)
        assert new_tree.tokens.tolist() == tree.tokens.tolist()
        assert new_tree.parents.tolist() == tree.parents.tolist()
        assert new_tree.accept_prob == pytest.approx(tree.accept_prob)
        emitted = tuple(plain[at : at + 1 + at % 3])
        selected.observe(Step(DraftTree.empty(), (), emitted))
        at += len(emitted)


def test_accepted_tokens_are_not_read_again() -> None:
    read: list[int] = []
    drafter = ModelDrafter(model(), width=1, min_expected_gain=0.0)
    counted = noted(drafter.model.forward, read, lambda tokens, *_: tokens.shape[1])
    drafter.model.forward = counted  # type: ignore
    _, steps = write(drafter, Sampling(), new=29)
    # The prompt is read when the session opens. A chain of 6 takes 6 forwards; the root and the
    # last node, never read, are all that is new.
    assert read == [24, 1, 1, 1, 1, 1, 1, *[2, 1, 1, 1, 1, 1] * 3]
    assert len(steps) == 5


def test_targets_of_chains_read_each_branch_below_its_ancestors() -> None:
    pytest.importorskip("onnxruntime")
    target, prompt = OnnxTarget(quantized(copy.deepcopy(tiny.model()))), tiny.prompt()
    assert target.chains and target.same_bits
    assert getattr(ModelDrafter(target, width=(2, 3)).settings.shape, "width", 0) == 2
    cache, fresh = (DraftCache(target, tiny.VOCAB, len(prompt) + 8) for _ in range(2))
    cache.read(prompt)
    rows = [cache.extend([7, 9], [-1, -1]), cache.extend([11, 12, 13, 14], [0, 1, 3, 0])]
    paths = [[7], [9], [7, 11], [9, 12], [9, 12, 13], [7, 14]]
    for path, row in zip(paths, torch.cat(rows), strict=True):
        fresh.read(prompt)
        assert torch.equal(row, fresh.extend(path, range(-1, len(path) - 1))[-1])
        fresh.commit(())
    assert cache.drafted == len(paths)
    cache.commit([7, 14, 5])  # the last path read
    assert len(cache) == len(prompt) + 2
    cache.read(text := [*prompt, 7, 14, 5])
    cache.extend([7], [-1])
    cache.extend([9], [-1])
    cache.commit([7, 5])  # which is read over
    assert len(cache) == len(text)
    assert torch.equal(*(each.read([*text, 7, 5]) for each in (cache, fresh)))


def test_drafting_ends_at_the_draft_models_context_length() -> None:
    short = tiny.model(seed=0, dtype=torch.float64, max_position_embeddings=40)
    plain, _ = write(None, Sampling(), new=40)
    drafted, steps = write(ModelDrafter(short, width=1, min_expected_gain=0.0), Sampling(), new=40)
    assert drafted == plain
    drafted_at = [len(step.tree) for step in steps]
    assert drafted_at[1] == 6 and drafted_at[-1] == 0 and 0 < sum(drafted_at) < 20


def test_draft_depth_is_bounded_by_the_remaining_tokens() -> None:
    prompt = tiny.prompt()
    drafter = ModelDrafter(alike(), width=1, min_expected_gain=0.0)
    session = drafter.open(DraftRequest(tuple(prompt), tiny.VOCAB))
    sizes = [len(session.propose(DraftContext(prompt, 24, left), 6)) for left in (9, 4, 2, 1)]
    assert sizes == [6, 3, 1, 0]


def test_a_token_unknown_to_the_draft_model_ends_drafting() -> None:
    small = model(vocab_size=80)
    prompt = [token % 80 for token in tiny.prompt()]
    session = ModelDrafter(small).open(DraftRequest(tuple(prompt), tiny.VOCAB))
    assert len(session.propose(DraftContext(prompt, 24, 20), 6))
    assert not len(session.propose(DraftContext([*prompt, 90], 24, 20), 6))


def test_tokens_beyond_the_target_are_never_proposed() -> None:
    prompt = [token % 50 for token in tiny.prompt()]
    drafter = ModelDrafter(model(), min_expected_gain=0.0)
    for sampling in SAMPLINGS.values():
        session = drafter.open(loops.draft_request(prompt, sampling, vocab=50))
        tree = session.propose(DraftContext(prompt, 24, 20), 40)
        assert len(tree) == 40 and tree.tokens.max() < 50


def test_required_gain_is_the_time_of_a_forward_in_tokens() -> None:
    assert required_gain(0.25, [], 100.0) == 0.25
    assert required_gain(None, [], 0.2) == MIN_EXPECTED_GAIN, "the time is unknown"
    times = [1.0] * 4
    assert required_gain(None, times, 0.0) == MIN_EXPECTED_GAIN, "the rate is unknown"
    assert required_gain(None, times, 0.2) == pytest.approx(0.2)
    assert required_gain(None, times, 0.001) == 0.02 and required_gain(None, times, 5.0) == 1.0
    slow = [*times, 1000.0]
    assert required_gain(None, slow, 0.2) == pytest.approx(0.2), "one slow forward counts little"


def test_a_higher_rate_makes_smaller_drafts() -> None:
    prompt = tiny.prompt()
    sizes = []
    for rate in (1e-9, 1e9):
        adviser = AutoBudget().open()
        adviser.rate = rate
        context = DraftContext(list(prompt), len(prompt), 50, adviser)
        session = ModelDrafter(alike()).open(DraftRequest(tuple(prompt), tiny.VOCAB))
        sizes.append([session.cache.forwards for _ in range(6) if session.propose(context, 8)][-1])
    assert sizes[1] < sizes[0]


@pytest.mark.parametrize("mode", ["coupled", "sampled", "sampled-without-replacement"])
def test_distributions_are_those_of_the_last_proposal(mode: str) -> None:
    prompt = tiny.prompt()
    drafter = ModelDrafter(alike(), width=2, mode=mode, min_expected_gain=0.0)
    session = drafter.open(loops.draft_request(prompt, SAMPLINGS["sampled"]))
    assert session.distributions() == []
    tree = session.propose(DraftContext(prompt, 24, 20), 6)
    distributions = session.distributions()
    nodes = [node for node, _, _ in distributions]
    assert set(tree.parents.tolist()) <= set(nodes) and len(nodes) == len(set(nodes))
    for _, tokens, chances in distributions:
        assert len(tokens) == len(chances) and chances == sorted(chances, reverse=True)
        assert 0.5 < sum(chances) <= 1.0 + 1e-9
    assert not len(session.propose(DraftContext(prompt, 24, 1), 6))
    assert session.distributions() == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "no draft model"),
        ({"mode": "greedy"}, "'coupled', 'sampled'"),
        *(({"width": width}, f"width is {width!r}; expected") for width in (0, 2.5, "4")),
        ({"min_expected_gain": "0.3"}, "min_expected_gain is '0.3'; expected a number"),
        ({"static": "fast", "width": (3, 4, 2)}, "expected"),
        ({"static": "graph", "width": (3, 4, 2)}, "expected"),  # on a CPU
        ({"mode": "sampled", "width": TreeShape((-1,), (0,))}, "expected a whole number"),
        *(({"width": width}, "expected") for width in ((), (0,), (2, 9))),
        *(({"depth": depth}, f"depth is {depth!r}; expected") for depth in (0, 2.5, "4")),
    ],
)
def test_wrong_settings_are_reported(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ModelDrafter(model() if arguments else None, **arguments)


def test_a_model_with_a_state_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="cannot draft: it has layers of kind"):
        ModelDrafter(tiny.model("qwen3_next"))
