"""CSpD's own criteria: what they keep, and how far from the target's law that is."""

from __future__ import annotations

from typing import Any

import pytest

from ragspec.sampling.noise import NoiseStream
from ragspec.trees.draft_tree import DraftKind, DraftTree
from ragspec.visual.latents.rules import Aligned, CspdPaper, CspdRepo
from ragspec.visual.latents.rules.cspd_paper import log_factor
from tests.support.latent_laws import Pair, differs, emitted, pair, plain, view_of

SAMPLES = 600


def drawn(given: Pair, indices: list[int], seed: int = 0) -> list[int]:
    """Return the numbers of drafts for these indices."""
    noise = given.target.noise(NoiseStream(seed), indices)
    return list(given.draft.add(given.q.expand(len(indices), -1), noise, indices))


def chain(numbers: list[int]) -> DraftTree:
    return DraftTree.chain(numbers, "draft", kind=DraftKind.COUPLED)


def test_the_papers_factor_is_that_of_the_earlier_deviations() -> None:
    given = pair("linear", "model", spread=1.2)
    numbers, view = drawn(given, [0]), view_of(given.target, given.p, DraftTree.empty(), 0)
    factor = log_factor(given.target.table, numbers[0], view.token(-1))
    wide, narrow = given.draft.sampler.deviations[1:], given.target.sampler.deviations[1:]
    assert factor == pytest.approx(4 * float((wide / narrow).log().sum())) and factor > 0.0


def test_with_shared_deviations_the_paper_keeps_the_law_and_what_aligned_keeps() -> None:
    given = pair("linear", "model")
    found, kept = emitted(CspdPaper(), given, SAMPLES)
    assert differs(found, plain(given.target, given.p, 4 * SAMPLES)) > 1e-4
    assert kept == emitted(Aligned(), given, SAMPLES)[1]


@pytest.mark.parametrize("spread", [1.0, 1.2])
def test_the_public_code_is_biased(spread: float) -> None:
    given = pair("linear", "model", spread=spread)
    found, kept = emitted(CspdRepo(), given, SAMPLES)
    assert differs(found, plain(given.target, given.p, 4 * SAMPLES)) < 1e-5
    if spread == 1.0:  # the temperature leaves nothing of the densities
        assert kept > 0.95 and differs(found, plain(given.draft, given.q, 4 * SAMPLES)) > 1e-4
    else:  # the factor is turned over: wider drafts are kept less often
        assert kept < 0.7


class Strict(CspdRepo):
    """Keeps none of the drafts of some indices."""

    def _kept(self, view: Any, node: int, drafted: int, own: int) -> bool:
        return view.index(node) not in (0, 2)


def test_the_public_code_replaces_a_draft_where_it_stands_and_keeps_the_rest() -> None:
    given = pair("linear", "model")
    numbers = drawn(given, [0, 1, 2, 3])
    before = given.target.table.latents[numbers].clone()
    tree = chain(numbers)
    verdict = Strict().judge(tree, view_of(given.target, given.p, tree, 0))
    assert [int(tree.tokens[node]) for node in verdict.path] == numbers[:-1]
    assert verdict.token == numbers[-1]
    same = (given.target.table.latents[numbers] == before).all(-1)
    assert same.tolist() == [False, True, False, True]


def test_the_public_code_gives_up_after_a_hundred_tries() -> None:
    given = pair("linear", "model", spread=40.0)  # the factor leaves nothing of the target's law
    numbers = drawn(given, [0])
    tree = chain(numbers)
    verdict = Strict().judge(tree, view_of(given.target, given.p, tree, 0))
    assert verdict.token == numbers[0]
    assert bool((given.target.table.latents[numbers[0]] == 0.0).all())


def test_a_draft_of_another_index_ends_the_chain() -> None:
    given = pair("linear", "model")
    numbers = drawn(given, [0, 7, 2])
    tree = chain(numbers)
    view = view_of(given.target, given.p, tree, 0)
    verdict = CspdRepo().judge(tree, view)
    assert verdict.path == (0,) and verdict.token == view.token(0)
    assert verdict.token not in numbers
    empty = DraftTree.empty(DraftKind.COUPLED)
    view = view_of(given.target, given.p, empty, 0)
    assert CspdRepo().judge(empty, view).token == view.token(-1)


def test_their_pictures_are_called_approximate() -> None:
    assert CspdPaper().label == CspdRepo().label == "approximate"
