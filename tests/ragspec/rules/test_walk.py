from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragspec.engine.engine import Engine
from ragspec.errors import InputError
from ragspec.rules.base import ALL_KINDS, Rule, expect_rule
from ragspec.rules.block_verification import Block
from ragspec.rules.k_seq import KSeq
from ragspec.rules.rejection import ChainRejection, MultiStep, WithoutReplacement
from ragspec.rules.typical import Typical
from ragspec.rules.walk import Walk
from ragspec.sampling.noise import NoiseStream
from ragspec.trees.draft_tree import DraftKind, DraftTree
from tests.ragspec.trees.test_operations import trees
from tests.support import tiny
from tests.support.codes import likeliest
from tests.support.distributions import Distributions, emitted, grow
from tests.support.enumeration import Tokens

EXACT = 1e-12
RULES: list[Rule] = [Walk(), ChainRejection(), MultiStep(), WithoutReplacement()]
RULES += [KSeq(), Block(), Typical()]


def plain(distributions: Distributions, noise: NoiseStream, length: int) -> Tokens:
    """Return the text of plain decoding with this noise."""
    return distributions.generate(Walk(), noise, lambda *_: DraftTree.empty(), steps=length)


@given(tree=trees(vocab=4), seed=st.integers(0, 10**6), greedy=st.booleans())
@settings(max_examples=150)
def test_walk_writes_what_plain_decoding_writes(tree: DraftTree, seed: int, greedy: bool) -> None:
    distributions, noise = Distributions(4, 0, greedy=greedy), NoiseStream(seed)
    text = emitted(tree, distributions.judge(Walk(), tree, noise))
    assert text == plain(distributions, noise, len(text))


def test_walk_stops_where_the_text_ends() -> None:
    distributions = Distributions(3, 1, end=1)
    for seed in range(40):
        noise = NoiseStream(seed)
        text = distributions.generate(Walk(), noise, partial(grow, widths=(3, 3)), steps=3)
        assert 1 not in text[:-1]
        assert text == plain(distributions, noise, len(text))
    tree = partial(grow, widths=(2, 1), draw=likeliest, kind=DraftKind.DETERMINISTIC)
    assert distributions.deviation(Walk(), tree, length=3) <= EXACT


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_labels_and_kinds_of_every_rule(rule: Rule) -> None:
    assert isinstance(rule, Rule)
    expected = {"walk": "exact", "typical": "approximate"}.get(rule.name, "exact-for(distribution)")
    assert rule.label == expected
    judges_all = rule.name in ("walk", "typical")
    assert rule.accepts == ALL_KINDS if judges_all else len(rule.accepts) == 1


def test_expect_rule_refuses_other_objects() -> None:
    rule = Walk()
    assert expect_rule(rule) is rule
    for other in (42, None, Walk, object()):
        with pytest.raises(InputError, match="or a Rule"):
            expect_rule(other)
    wrong: Any = 42
    with pytest.raises(InputError, match="got rule=42"):
        Engine(tiny.model("llama"), drafter=None, rule=wrong)
