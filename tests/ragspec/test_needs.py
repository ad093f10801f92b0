"""The match of needs with capabilities, by enumeration and through the engine."""

from collections.abc import Callable
from dataclasses import fields
from itertools import product
from typing import Any

import pytest

from ragspec.adapters.host_text import HostOptions, host_drafter
from ragspec.drafters.base import Drafter
from ragspec.drafters.fuse import Fuse
from ragspec.engine.engine import Engine
from ragspec.errors import InputError, RuleError, UnsupportedModelError
from ragspec.needs import LAST, Capabilities, Needs, match
from ragspec.registry import names
from ragspec.retrievers import ContextDrafter, Rapid, Rasd
from ragspec.trees.draft_tree import DraftKind
from ragspec.verification.causal import CausalTarget
from ragspec.verification.path_rows import PathTarget
from ragspec.visual.latents.rules import make_latent_rule
from tests.ragspec.engine.test_pause import Tilt
from tests.retrievers import test_fingerprints
from tests.support import tiny
from tests.support.fixed import FixedDrafter

RULES = [name for name, where in names("rule").items() if "visual" not in where]
ERRORS = (UnsupportedModelError, UnsupportedModelError, RuleError, RuleError)
SAID = ("best tokens", "hidden states", "continuous latents", "tables of probabilities")


@pytest.mark.parametrize("offered", list(product([False, True], repeat=4)))
@pytest.mark.parametrize("needed", list(product([False, True], repeat=4)))
def test_each_need_is_met_or_named(needed: tuple[bool, ...], offered: tuple[bool, ...]) -> None:
    best, hidden, latents, chances = needed
    needs = Needs(3 * best, False, (LAST,) * hidden, True, True, latents, chances)
    best, hidden, latents, chances = offered
    capabilities = Capabilities(best, hidden, latents, chances, "a small model")
    lacking = [i for i in range(4) if needed[i] and not offered[i]]
    if not lacking:
        match("drafter 'a'", needs, capabilities)
        return
    first = lacking[0]
    said = rf"drafter 'a' needs .*{SAID[first]}; got a small model. Use "
    with pytest.raises(ERRORS[first], match=said):
        match("drafter 'a'", needs, capabilities)


def test_a_union_has_the_largest_of_each_field() -> None:
    parts = [Needs(2, False, (9, LAST)), Needs(5, True, (4,)), Needs(draft_prompt=True, texts=True)]
    assert Needs.union(parts) == Needs(5, True, (LAST, 4, 9), True, True)
    assert Needs.union([]) == Needs()
    assert Needs.union([Needs(latents=True)]) == Needs(latents=True)


HOLDERS: dict[str, Callable[[Drafter], Drafter]] = {
    **{name: holder for name, holder in test_fingerprints.HOLDERS.items() if name != "list"},
    "alone": lambda drafter: drafter,
    "fuse of fuses": lambda drafter: Fuse([Fuse([Fuse([drafter], "a")], "b"), FixedDrafter([1])]),
    "rasd's drafter": lambda drafter: Rasd(drafter, [ContextDrafter()]),
    "rapid": lambda drafter: Rapid(drafter),
}
FIELDS = [field.name for field in fields(Needs)]


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("holder", HOLDERS)
def test_a_drafter_has_the_needs_of_those_that_it_contains(holder: str, name: str) -> None:
    values: dict[str, Any] = {name: (LAST,) if name == "hidden_states" else 1}
    drafter = FixedDrafter([5], "states", needs=Needs(**values))
    if holder == "rapid" and name in ("hidden_states", "latents"):
        with pytest.raises((InputError, RuleError)):
            HOLDERS[holder](drafter)
        return
    held = HOLDERS[holder](drafter).needs
    dropped = holder == "rapid" and name == "prompt_top_tokens"  # of the prompt that it replaces
    assert Needs.union([held, drafter.needs]) == held or dropped


@pytest.mark.parametrize("holder", sorted(HOLDERS.keys() - {"rapid"}))
def test_an_engine_refuses_what_its_model_cannot_offer(holder: str) -> None:
    model = tiny.model("llama")
    states = FixedDrafter([5], "states", needs=Needs(hidden_states=(LAST,)))
    drafter = HOLDERS[holder](states)
    Engine(CausalTarget(model), drafter=drafter, budget=4)
    with pytest.raises(UnsupportedModelError, match=r"'(states|other)' needs .*hidden states; got"):
        Engine(PathTarget(model), drafter=drafter, budget=4)
    engine = Engine(PathTarget(model), drafter=HOLDERS[holder](FixedDrafter([5])), budget=4)
    assert engine.generate([3, 4, 5], max_new_tokens=4, ignore_eos=True).tokens


def test_a_transform_is_refused_when_a_text_begins() -> None:
    engine = Engine(PathTarget(tiny.model("llama")), drafter=None)
    with pytest.raises(UnsupportedModelError, match=r"transform 'tilted' needs .*hidden states"):
        engine.generate([3, 4, 5], max_new_tokens=4, transform=Tilt())


@pytest.mark.parametrize("rule", ["near", "aligned", "horizon", "path"])
@pytest.mark.parametrize("drafter", [None, "context"])
def test_a_rule_over_latents_is_refused_for_tokens(rule: str, drafter: str | None) -> None:
    with pytest.raises(RuleError, match=f"rule '{rule}' needs .*latents; got a model of tokens"):
        Engine(tiny.model("llama"), drafter=drafter, rule=make_latent_rule(rule))


@pytest.mark.parametrize("kind", DraftKind)
@pytest.mark.parametrize("rule", RULES)
def test_a_rule_judges_the_kinds_that_it_accepts(rule: str, kind: DraftKind) -> None:
    options: dict[str, Any] = {"drafter": FixedDrafter([5], kind=kind), "budget": 4, "rule": rule}
    accepts = Engine(tiny.model("llama"), drafter=None, rule=rule).rule.accepts
    if kind in accepts:
        Engine(tiny.model("llama"), **options)
        return
    with pytest.raises(RuleError, match=f"rule '{rule}' cannot judge '{kind.value}' .*'walk'"):
        Engine(tiny.model("llama"), **options)


@pytest.mark.parametrize("name", ["auto", "context", "select", "rasd", "hierarchy", "suffix"])
def test_a_host_takes_drafters_of_text(name: str) -> None:
    assert host_drafter(HostOptions(drafter=name)).needs.top_tokens == 0


def test_a_host_offers_tokens_alone() -> None:
    with pytest.raises(InputError, match=r"'recycling' needs .*best tokens; got another engine"):
        host_drafter(HostOptions(drafter=("context", "recycling")))
