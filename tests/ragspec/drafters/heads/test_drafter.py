"""Drafts of a head change no token, with guidance too, and training raises acceptance."""

from typing import Any

import numpy as np
import pytest
import torch

from ragspec import Engine, Sampling
from ragspec.drafters.base import DraftContext, DraftRequest, Prefill
from ragspec.drafters.heads.drafter import HeadDrafter, HeadSession
from ragspec.drafters.heads.head import DraftHead
from ragspec.errors import InputError, RuleError, UnsupportedModelError
from ragspec.rules.base import Step
from ragspec.trees.draft_tree import DraftKind, DraftTree
from ragspec.verification.causal import CausalTarget
from tests.support import heads, image_models, tiny
from tests.support.identities import BATCHES, PROMPTS, SAMPLINGS, check_identity
from tests.support.identities import target as text_model
from tests.support.loops import draft_request
from tests.support.pretend import Pretend, pretend
from tests.support.pretend_steps import check_drafting

FORMS: dict[str, dict[str, Any]] = {
    "coupled": {},
    "chain": {"width": 1},
    "static": {"width": (3, 4, 2)},
    "deterministic": {"mode": "deterministic"},
    "deterministic static": {"mode": "deterministic", "width": (3, 4, 2)},
    "sampled": {"mode": "sampled", "width": 2},
}
SAMPLED = Sampling(temperature=1.0, seed=7)


def drafter(target: CausalTarget, **options: Any) -> HeadDrafter:
    return HeadDrafter(heads.fresh(target), target, min_expected_gain=0.0, **options)


def accepted(target: CausalTarget, instance: Any, sampling: Sampling, **options: Any) -> float:
    """Return the tokens that one forward yields, over a few texts."""
    engine = Engine(target, drafter=instance, budget=12, **options)
    prompts = [tiny.prompt(8, vocab_size=heads.VOCAB, seed=300 + seed) for seed in range(4)]
    results = engine.generate(prompts, sampling, max_new_tokens=40, ignore_eos=True)
    assert not any(result.report.faults for result in results)
    return sum(len(r.tokens) for r in results) / sum(len(r.steps) for r in results)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("settings", SAMPLINGS)
@pytest.mark.parametrize("form", FORMS)
def test_heads_change_no_token(form: str, settings: str, batch: int) -> None:
    check_identity(
        drafter(CausalTarget(text_model()), **FORMS[form]), settings, batch, copies=False
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("head", "every"), [("eagle1", 1), ("eagle3", 1), ("eagle1", 2)])
def test_steps_of_fixed_shape_draft_as_usual_forwards_do(head: str, every: int, form: str) -> None:
    target = CausalTarget(text_model())
    tokens = range(0, target.vocab_size, every) if every > 1 else None
    fresh = heads.fresh(target, 1, form=head, tokens=tokens)

    def drafted(static: str) -> list[Any]:
        instance = HeadDrafter(fresh, target, static=static, min_expected_gain=0.0, **FORMS[form])
        engine = Engine(target, drafter=instance, budget=9)
        results = engine.generate(PROMPTS, SAMPLED, max_new_tokens=20, ignore_eos=True)
        assert instance._opened[static].static == static
        return [[step.tree.tokens.tolist() for step in result.steps] for result in results]

    assert drafted("eager") == drafted("off")


@pytest.mark.parametrize(
    ("form", "guided", "broken", "reason"),
    [
        ("medusa", False, {}, "a head of medusa has no such steps"),
        ("eagle1", True, {}, "its target (ImageTarget) has guidance or other positions"),
        ("eagle1", False, {"TOLERANCE": -1.0}, "a step of fixed shape goes wrong here (logits"),
        ("eagle1", False, {"HeadStep._forward": None}, "goes wrong here (TypeError: "),
    ],
)
def test_a_head_without_steps_of_fixed_shape_says_why(
    form: str, guided: bool, broken: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in broken.items():
        monkeypatch.setattr(f"ragspec.drafters.heads.cache.{name}", value)
    target = heads.picture_target() if guided else CausalTarget(heads.model())
    head = heads.fresh(target, 1, form=form)
    session = HeadDrafter(head, target, static="eager").open(DraftRequest((1, 2), heads.VOCAB))
    assert session.cache.model.static[:5] == "off: " and reason in session.cache.model.static


def test_a_step_of_fixed_shape_waits_once_and_launches_little_else() -> None:
    with Pretend() as device:
        target = CausalTarget(pretend(heads.model()))
        head = heads.fresh(CausalTarget(heads.model())).to(target.device)
        instance = HeadDrafter(head, target, width=1, static="eager", min_expected_gain=0.0)
        session = instance.open(DraftRequest((1, 2, 3, 4, 5), heads.VOCAB))
        session.cache.notify(torch.zeros(1, 5, 32, dtype=target.dtype).to(target.device))
        check_drafting(device, session, beside=9)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_heads_change_no_image_token(scale: float, form: str) -> None:
    """In float64; with guidance the head runs both rows."""
    target = heads.picture_target(scale)
    sampling = Sampling(temperature=1.0, top_k=12, seed=3)
    engine = Engine(target, drafter=drafter(target, **FORMS[form]), budget=9)
    for row in range(image_models.CLASSES):
        sample = engine.generate(target.prompt(row), sampling, max_new_tokens=16, ignore_eos=True)
        assert sample.tokens == image_models.plain(target.model, row, sampling, 3, scale=scale)
        assert sum(len(step.tree) for step in sample.steps) > 20
        assert sample.label == "exact"
        assert not sample.report.faults


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_training_pays(temperature: float) -> None:
    target, head = CausalTarget(heads.model()), heads.trained()
    sampling = Sampling(temperature=temperature, seed=7)
    fresh = accepted(target, drafter(target), sampling)
    trained = accepted(target, HeadDrafter(head, target, min_expected_gain=0.0), sampling)
    assert trained > fresh + 0.2


def test_drafts_with_the_noise_are_accepted_more_often_than_blind_ones() -> None:
    target, head = CausalTarget(heads.model()), heads.trained()
    coupled, blind = (
        accepted(target, HeadDrafter(head, target, min_expected_gain=0.0, mode=mode), SAMPLED)
        for mode in ("coupled", "deterministic")
    )
    assert coupled > blind


@pytest.mark.parametrize(
    ("mode", "rule", "width"),
    [("sampled", "rejection", 1), ("sampled-without-replacement", "without-replacement", 3)],
)
def test_sampled_drafts_serve_the_classical_rules(mode: str, rule: str, width: int) -> None:
    target = CausalTarget(heads.model())
    instance = HeadDrafter(heads.trained(), target, mode=mode, width=(width, width))
    assert accepted(target, instance, SAMPLED, rule=rule) > 1.0
    with pytest.raises(RuleError):
        Engine(target, drafter=HeadDrafter(heads.trained(), target), rule=rule)


def test_blind_drafts_do_not_depend_on_the_seed() -> None:
    target = CausalTarget(heads.model())
    prompt = tiny.prompt(8, vocab_size=heads.VOCAB)
    first: dict[str, list[list[int]]] = {"deterministic": [], "coupled": []}
    for mode, result in first.items():
        for seed in (1, 2):
            request = draft_request(prompt, Sampling(temperature=1.0), seed, heads.VOCAB)
            opened = drafter(target, mode=mode).open(request)
            observe_prompt(opened, target, prompt)
            tree = opened.propose(DraftContext([*prompt, 3], len(prompt), 20), 8)
            result.append(tree.tokens.tolist())
    assert first["deterministic"][0] == first["deterministic"][1]
    assert first["coupled"][0] != first["coupled"][1]


def observe_prompt(session: HeadSession, target: CausalTarget, prompt: list[int]) -> None:
    states = heads.last(heads.states(target, prompt))
    session.observe_prefill(Prefill(np.array(prompt, dtype=np.int64), hidden=states))


def session(target: CausalTarget) -> tuple[HeadSession, list[int]]:
    prompt = tiny.prompt(8, vocab_size=heads.VOCAB)
    return drafter(target).open(DraftRequest(tuple(prompt), heads.VOCAB)), prompt


def test_a_prompt_is_read_when_it_is_reported_and_not_in_the_first_draft() -> None:
    target = CausalTarget(heads.model())
    opened, prompt = session(target)
    observe_prompt(opened, target, prompt)
    assert len(opened.cache) == len(prompt) - 1 and opened.cache.forwards == 1
    assert len(opened.propose(DraftContext([*prompt, 3], len(prompt), 20), 8)) == 8
    assert len(opened.cache) == len(prompt)


def test_without_states_it_drafts_nothing() -> None:
    opened, prompt = session(CausalTarget(heads.model()))
    assert len(opened.propose(DraftContext([*prompt, 3], len(prompt), 20), 8)) == 0
    opened.observe(Step(DraftTree.empty(DraftKind.COUPLED), (), (4,)))
    assert opened.distributions() == []


def test_the_callers_head_is_unchanged() -> None:
    head = heads.trained()
    instance = HeadDrafter(head, CausalTarget(heads.model(torch.float64)))
    assert head.fc.weight.dtype == torch.float32
    assert isinstance(instance.head, DraftHead) and instance.head.dtype == torch.float64
    assert HeadDrafter(head, CausalTarget(heads.model(torch.float32))).head is head


def test_heads_of_other_targets_are_refused() -> None:
    head = heads.trained()
    with pytest.raises(UnsupportedModelError, match="another target"):
        HeadDrafter(head, heads.model(seed=1))
    with pytest.raises(UnsupportedModelError, match="another model object"):
        Engine(heads.model(torch.float32), drafter=HeadDrafter(head, heads.model(torch.float64)))
    with pytest.raises(InputError, match="no head"):
        Engine(heads.model(), drafter="head")
    with pytest.raises(InputError, match="no target"):
        HeadDrafter(head)
    with pytest.raises(InputError, match="as a head"):
        HeadDrafter(object(), heads.model())  # type: ignore[arg-type]


def test_a_head_with_another_guidance_than_the_engine_counts_a_fault() -> None:
    engine = Engine(heads.picture_target(3.0), drafter=drafter(heads.picture_target(1.0)), budget=4)
    result = engine.generate(engine.target.prompt(0), SAMPLED, max_new_tokens=6)  # type: ignore[attr-defined]
    assert result.report.faults == {"head": 1}
    assert all(len(step.tree) == 0 for step in result.steps)


@pytest.mark.parametrize(
    "options",
    [
        *({"width": width} for width in (0, (2, 9), ())),
        {"mode": "sampled", "width": ()},
        *({"depth": 0}, {"min_expected_gain": -1.0}, {"mode": "greedy"}),
    ],
)
def test_bad_settings_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"got|is \S+; expected"):
        HeadDrafter(heads.trained(), heads.model(), **options)
