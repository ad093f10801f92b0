"""Texts drafted in one call a tree are those of plain decoding; who drafts so, and who does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ragspec.drafters.base import DraftContext, DraftRequest
from ragspec.drafters.fuse import Fuse
from ragspec.drafters.model.drafter import LevelSession, ModelDrafter
from ragspec.engine.engine import Engine
from ragspec.errors import InputError
from ragspec.retrievers.methods.context import ContextDrafter
from ragspec.sampling.distribution import TokenDistribution
from ragspec.sampling.noise import NoiseStream
from ragspec.sampling.settings import Sampling
from ragspec.trees.draft_tree import DraftTree
from ragspec.verification.causal import CausalTarget
from ragspec.verification.static.open import open_static
from ragspec.verification.static.session import StaticSession
from tests.support import tiny

PROMPT = [5, 6, 7, 8, 9, 5, 6, 7]
LEVELS = (3, 4, 2)


class LocalVariant(CausalTarget):
    """A target of another class, whose forwards nobody knows."""


def model(seed: int = 0) -> Any:
    return tiny.model("llama", seed=seed, dtype=torch.float64)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("static", ["off", "eager"])
def test_the_text_is_that_of_plain_decoding(static: str, seed: int) -> None:
    plain = Engine(model(), drafter=None).generate(PROMPT, max_new_tokens=30)
    drafter = ModelDrafter(model(seed), tree=LEVELS, static="eager")
    engine = Engine(model(), drafter=drafter, budget=9, static=static)
    for _ in range(2):  # the second time over the buffers of the first
        result = engine.generate(PROMPT, max_new_tokens=30)
        assert result.tokens == plain.tokens
        assert any(len(step.tree) == 9 for step in result.steps)
        assert seed or result.report.accepted >= 18


def test_a_source_and_a_model_in_one_tree_change_no_token() -> None:
    plain = Engine(model(), drafter=None).generate(PROMPT, max_new_tokens=30)
    both = Fuse([ContextDrafter(), ModelDrafter(model(), tree=LEVELS, static="eager")])
    result = Engine(model(), drafter=both, budget=12, static="eager").generate(
        PROMPT, max_new_tokens=30
    )
    assert result.tokens == plain.tokens and result.report.accepted >= 15


def test_equal_siblings_of_two_sources_do_not_harm_the_walk() -> None:
    static = open_static(CausalTarget(model()), "eager")
    current = Engine(model(), drafter=None).generate(PROMPT, max_new_tokens=4).tokens
    root, a, b, c = current
    # One source has `a` and a wrong token below it, the other `a` again, and what is right.
    wrong = (b + 1) % tiny.VOCAB
    tree = DraftTree.build([a, wrong, a, b, c], [-1, 0, -1, 2, 3], "two")
    distribution = TokenDistribution(Sampling(), NoiseStream(0), len(PROMPT))
    with static.open(1, 64) as session, torch.no_grad():
        assert isinstance(session, StaticSession)
        session.verify([PROMPT], [DraftTree.empty()])
        session.commit([()])
        session.follow([distribution], [[*PROMPT, root]])
        session.verify([[root]], [tree])
        assert session._selection == [[a, b, c]]
        assert session.chosen is not None
        chosen = session.chosen[0]
        assert len(chosen) == 6
        session.commit([(2, 3, 4)])
        result = session.verify([[chosen[5]]], [DraftTree.empty()])[0, -1]
        text = torch.tensor([[*PROMPT, root, a, b, c, chosen[5]]])
        expected = model()(input_ids=text, use_cache=False).logits[0, -1]
    assert float((result - expected).abs().max()) < 1e-12


def test_what_cannot_be_drafted_so_is_drafted_as_before_with_the_reason() -> None:
    request = DraftRequest(tuple(PROMPT), tiny.VOCAB)
    noisy = DraftRequest(
        tuple(PROMPT),
        tiny.VOCAB,
        distribution=TokenDistribution(Sampling(temperature=1.0), NoiseStream(0), len(PROMPT)),
    )
    drafter = ModelDrafter(model(), tree=LEVELS, static="eager")
    assert drafter.open(request).static == "eager"
    assert drafter.open(noisy).static == "off: its choices follow noise or processors"
    blind = ModelDrafter(model(), tree=LEVELS, static="eager", mode="deterministic")
    assert isinstance(blind.open(noisy), LevelSession)
    assert ModelDrafter(model(), tree=LEVELS).open(request).static == "off"
    following = DraftRequest(tuple(PROMPT), tiny.VOCAB, static="graph")
    assert ModelDrafter(model(), tree=LEVELS).open(following).static == "off"  # on a CPU
    wide = ModelDrafter(model(), tree=(70,), static="eager").open(request)
    assert "more than 64 choices" in wide.static
    assert len(wide.propose(DraftContext([*PROMPT, 1], 8, 9), 80)) == 64
    session = ModelDrafter(LocalVariant(model()), tree=LEVELS, static="eager").open(request)
    assert session.static == "off: LocalVariant makes its forwards in a way of its own"
    assert len(session.propose(DraftContext([*PROMPT, 1], 8, 9), 9)) == 9


@pytest.mark.parametrize(
    "options",
    [
        {"static": "eager"},  # without a tree
        {"static": "fast", "tree": LEVELS},
        {"static": "graph", "tree": LEVELS},  # on a CPU
        {"tree": LEVELS, "mode": "sampled"},
        {"tree": (0,)},
    ],
)
def test_settings_that_cannot_be_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"expected|leave tree out"):
        ModelDrafter(model(), **options)
