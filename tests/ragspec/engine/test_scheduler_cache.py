"""Prompts reuse cached tokens of their tenant, and a broken cache changes texts."""

from typing import Any

import pytest

from ragspec import Engine
from ragspec.drafters.base import DraftContext, Drafter, DraftRequest, DraftSession
from ragspec.engine.prefill import PrefillJob
from ragspec.trees.draft_tree import DraftTree
from ragspec.verification.causal import CausalTarget
from ragspec.verification.sequence_cache import SequenceCache
from ragspec.verification.tree_session import TreeSession
from tests.support import tiny
from tests.support.scheduling import REQUESTS, submit


def read_of(pool: Engine, prompt: list[int], **more: Any) -> int:
    return pool.submit(prompt, max_new_tokens=6, **more).result().report.cached_tokens


def test_a_prompt_reuses_the_longest_cached_prefix_of_its_tenant(plain: Engine) -> None:
    common, others = tiny.prompt(40, seed=7), [tiny.prompt(9, seed=seed) for seed in (8, 9, 10)]
    prompts = [[*common, *other] for other in others]
    with plain.with_limits(4, chunk=16) as pool:
        assert [read_of(pool, prompt, tenant="one") for prompt in prompts[:2]] == [0, 40]
        assert read_of(pool, prompts[2], tenant="two") == 0
        assert read_of(pool, prompts[2], tenant="one") == 40
        assert read_of(pool, prompts[2], tenant="one") == 48, (
            "the last token is read for its logits"
        )
        handles = [pool.submit(p, max_new_tokens=6, tenant="one") for p in prompts]
        texts = [handle.result().tokens for handle in handles]
    assert texts == [plain.generate(p, max_new_tokens=6).tokens for p in prompts]


TRUE_PREFIX, TRUE_SELECT = SequenceCache.prefix, TreeSession.select_rows
TRUE_PREFILL_JOIN = PrefillJob.join


def stale(self: SequenceCache, length: int, room: int) -> SequenceCache:
    """Leave the keys of another text."""
    other = TRUE_PREFIX(self, length, room)
    for keys, values in other.layers(length).values():
        keys.zero_(), values.zero_()
    return other


def unread(self: PrefillJob, session: Any) -> int:
    result = TRUE_PREFILL_JOIN(self, session)
    del self.left[: min(2, len(self.left) - 1)]
    return result


@pytest.mark.parametrize(
    "mutant",
    [
        (SequenceCache, "prefix", stale),
        (PrefillJob, "join", unread),
        (TreeSession, "select_rows", lambda self, rows: TRUE_SELECT(self, rows)[::-1]),
    ],
)
def test_a_broken_cache_changes_texts(
    mutant: Any, plain: Engine, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(*mutant)
        with plain.with_limits(3, chunk=16) as pool:
            handles = submit(pool, REQUESTS)
            results = [handle.future.exception() or handle.result().tokens for handle in handles]
    assert results != expected


class Copying(DraftSession):
    """Proposes the last tokens of its text, and checks that the text grew from `known`."""

    def __init__(self) -> None:
        self.known: list[int] = []

    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        new = context.tokens[len(self.known) :]
        assert self.known == context.tokens[: len(self.known)], "another text's"
        self.known += new
        return DraftTree.chain(context.tokens[-3:], "sampled")


class Sharing(Drafter):
    """A drafter with a session for each text, or one for all texts."""

    name = "sampled"

    def __init__(self, shared: bool) -> None:
        self.session = Copying() if shared else None

    def open(self, request: DraftRequest) -> DraftSession:
        return self.session or Copying()


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.filterwarnings("ignore:drafter 'sampled'")
def test_state_that_texts_share_is_a_fault_of_the_drafter(
    shared: bool, target: CausalTarget, expected: list[list[int]]
) -> None:
    with Engine(target, tiny.tokenizer(), drafter=Sharing(shared), budget=4) as pool:
        results = [handle.result() for handle in submit(pool, REQUESTS)]
    assert [each.tokens for each in results] == expected, "a fault of a drafter changes no text"
    assert any(each.report.faults for each in results) == shared
