"""Token Recycling over a table on a device: the drafts of the host's, with one copy for each."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ragspec.drafters.base import DraftContext, DraftRequest, Prefill
from ragspec.engine.engine import Engine
from ragspec.errors import InputError
from ragspec.retrievers.methods.token_recycling import NeighbourDrafter, NeighbourSession
from ragspec.retrievers.neighbours.device_table import DeviceNeighbourTable
from ragspec.retrievers.neighbours.table import NeighbourTable
from ragspec.rules.base import Step
from ragspec.sampling.top_tokens import TopTokens
from ragspec.trees.draft_tree import DraftTree
from ragspec.trees.operations import check, merge
from tests.retrievers.neighbours.test_device_table import CPU, VOCAB, Crossings, K, place, teach
from tests.support import tiny
from tests.support.identities import BATCHES, PROMPTS, SAMPLINGS, check_identity, target

# --- sessions -----------------------------------------------------------------------------------


def both(instance: Callable[..., NeighbourDrafter]) -> tuple[NeighbourDrafter, NeighbourDrafter]:
    return instance(NeighbourTable(VOCAB, K, orders=1)), instance(
        DeviceNeighbourTable(VOCAB, K, device=CPU)
    )


class Texts:
    """Some texts of one drafter, told the same as those of another one."""

    def __init__(self, drafter: NeighbourDrafter, count: int) -> None:
        request = DraftRequest((1, 2), VOCAB)
        self.sessions: list[NeighbourSession] = [drafter.open(request) for _ in range(count)]

    def drafts(self, texts: list[list[int]], budget: int) -> list[tuple[Any, ...]]:
        results = []
        for session, text in zip(self.sessions, texts, strict=True):
            context = DraftContext(text, 2, 9)
            expected_acceptance = session.expected_acceptance(context)
            tree = session.propose(context, budget)
            results.append(
                (
                    tree.tokens.tolist(),
                    tree.parents.tolist(),
                    tree.accept_prob.tolist(),
                    expected_acceptance,
                )
            )
        return results


@given(
    st.randoms(use_true_random=False),
    st.sampled_from(["global", "request"]),
    st.sampled_from([None, (3, 4, 2), (2, 1, 1, 1)]),
)
def test_sessions_draft_what_those_of_the_host_draft(
    random: Any, scope: Any, template: tuple[int, ...] | None
) -> None:
    host, there = both(lambda table: NeighbourDrafter(table, scope=scope, template=template))
    texts = [[1, 2], [3, 4]]
    pair = Texts(host, 2), Texts(there, 2)
    prompt = np.array([random.randrange(VOCAB) for _ in range(8)])
    top = torch.tensor([random.sample(range(VOCAB), K + 1) for _ in prompt])
    for sessions in pair:
        sessions.sessions[0].observe(Prefill(prompt, TopTokens.of(top)))
        sessions.sessions[1].observe(Prefill(prompt[::-1].copy(), TopTokens.of(top)))
    budget = 5 if template is None else 30  # by reach: as deep and wide as the shape surely is
    for _ in range(6):
        request = budget if random.random() < 0.8 else 0
        results = [sessions.drafts(texts, request) for sessions in pair]
        assert results[0] == results[1]
        for at, text in enumerate(texts):
            step = step_after(results[0][at], random)
            for sessions in pair:
                sessions.sessions[at].observe(step)
            text.extend(step.tokens)


def step_after(draft: tuple[Any, ...], random: Any) -> Step:
    """Return a step whose tree holds the draft and nodes of others, as that of a fusion does."""
    current = DraftTree.build(draft[0], draft[1], "recycling")
    others = DraftTree.build([random.randrange(VOCAB) for _ in range(3)], [-1, 0, 1], "others")
    tree = merge([current, others]) if random.random() < 0.7 else DraftTree.empty()
    path: list[int] = []
    for node, parent in enumerate(tree.parents.tolist()):
        if parent == (path[-1] if path else -1) and random.random() < 0.5:
            path.append(node)
    top = torch.tensor([random.sample(range(VOCAB), K + 1) for _ in range(len(tree) + 1)])
    tokens = (*(int(tree.tokens[node]) for node in path), random.randrange(VOCAB))
    return Step(tree, tuple(path), tokens, best=TopTokens.of(top))


def test_trees_grown_by_accept_prob_keep_to_what_is_known() -> None:
    host, there = both(lambda table: NeighbourDrafter(table, scope="global"))
    generator = np.random.default_rng(0)
    lesson = [(t, generator.permutation(VOCAB)[:K].tolist()) for t in range(VOCAB)]
    teach(host.table, there.table, lesson)  # type: ignore[arg-type]
    for budget in (1, 8, 40, 200):
        tree = there.open(DraftRequest((1,), VOCAB)).propose(DraftContext([1, 2], 1, 30), budget)
        check(tree, VOCAB)
        assert min(budget, 20) <= len(tree) <= budget
        for node, parent in enumerate(tree.parents.tolist()):
            row = host.table.find(place(2 if parent < 0 else int(tree.tokens[parent])))  # type: ignore[union-attr]
            assert row is not None and tree.tokens[node] in row.tokens


def test_a_step_waits_for_the_device_once() -> None:
    drafter = NeighbourDrafter.paper(DeviceNeighbourTable(VOCAB, 8, device=CPU))
    session = drafter.open(DraftRequest((1, 2), VOCAB))
    generator = torch.Generator().manual_seed(0)

    def top_tokens(count: int) -> TopTokens:
        return TopTokens.of(torch.rand(count, VOCAB, generator=generator).topk(8).indices)

    calls = []
    for length in (3, 300):
        message = top_tokens(length)
        with Crossings() as crossings:
            session.observe(Prefill(np.arange(length) % VOCAB, message))
        assert crossings.waits == 0
        calls.append(crossings.calls)
    assert calls[0] == calls[1], "a prompt is learned in as many calls, however long it is"
    text, sizes = [1, 2], []
    for _ in range(6):
        with Crossings() as crossings:
            session.expected_acceptance(DraftContext(text, 2, 50))
            tree = session.propose(DraftContext(text, 2, 50), 80)
        assert crossings.waits == 1
        step = Step(tree, (0,), (int(tree.tokens[0]), 3), best=top_tokens(len(tree) + 1))
        with Crossings() as crossings:
            session.observe(step)
        assert crossings.waits == 0
        text.extend(step.tokens)
        sizes.append(len(tree))
    assert sizes == [80] * 6


# --- in an engine -------------------------------------------------------------------------------


def test_tables_go_to_the_target_unless_somebody_has_them(tmp_path: Path) -> None:
    NeighbourTable(VOCAB, orders=1).save(tmp_path / "short")
    NeighbourTable(VOCAB, K).save(tmp_path / "longer")
    there = DraftRequest((1,), VOCAB, device=torch.device("meta"))

    def used(drafter: NeighbourDrafter, request: DraftRequest) -> Any:
        drafter.open(request)
        return drafter.table

    for short in (NeighbourDrafter.paper(), NeighbourDrafter.paper(tmp_path / "short")):
        table = used(short, there)
        assert isinstance(table, DeviceNeighbourTable)
        assert table.device == table.rows.device == torch.device("meta")
        assert used(short, there) is table
    for request in (DraftRequest((1,), VOCAB), DraftRequest((1,), VOCAB, device=CPU)):
        assert isinstance(used(NeighbourDrafter.paper(), request), NeighbourTable)
    for longer in (NeighbourDrafter(scope="global"), NeighbourDrafter(tmp_path / "longer")):
        assert isinstance(used(longer, there), NeighbourTable)
    current = NeighbourTable(VOCAB, orders=1)
    assert used(NeighbourDrafter.paper(current), there) is current
    assert used(NeighbourDrafter(orders=1), there) is None  # every text has a table of its own
    with pytest.raises(InputError, match="12 tokens"):
        NeighbourDrafter.paper(tmp_path / "short").open(DraftRequest((1,), VOCAB + 1))


def on_the_cpu() -> NeighbourDrafter:
    return NeighbourDrafter.paper(DeviceNeighbourTable(tiny.VOCAB, 8, device=CPU))


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("settings", SAMPLINGS)
def test_the_text_stays_as_it_is(settings: str, batch: int) -> None:
    check_identity(on_the_cpu(), settings, batch, copies=False)


@pytest.mark.parametrize("settings", SAMPLINGS)
def test_an_engine_drafts_the_same_from_both_forms(settings: str) -> None:
    written = []
    for drafter in (NeighbourDrafter.paper(), on_the_cpu()):
        engine = Engine(target(), drafter=drafter, budget=40)
        results = [
            result
            for _ in range(2)  # the second time from what the first one taught
            for result in engine.generate(
                PROMPTS, SAMPLINGS[settings], max_new_tokens=16, ignore_eos=True
            )
        ]
        assert not any(result.report.faults for result in results)
        written.append([[reported(step) for step in result.steps] for result in results])
    assert written[0] == written[1]
    assert max(len(tokens) for steps in written[0] for tokens, *_ in steps) == 40
    assert any(path for steps in written[0] for *_, path, _ in steps)


def reported(step: Step) -> tuple[Any, ...]:
    tree = step.tree
    accept_prob = tree.accept_prob.tolist()
    return tree.tokens.tolist(), tree.parents.tolist(), accept_prob, step.path, step.tokens


@contextmanager
def copies_counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Count how often the best tokens are read on the host, and where they are."""
    counts, host, there = Counter[str](), TopTokens.host, TopTokens.there

    def counted(form: str, read: Callable[[TopTokens], Any]) -> Callable[[TopTokens], Any]:
        def job(top_tokens: TopTokens) -> Any:
            counts[form] += 1
            return read(top_tokens)

        return job

    with monkeypatch.context() as patch:
        patch.setattr(TopTokens, "host", counted("host", host))
        patch.setattr(TopTokens, "there", counted("there", there))
        yield counts


def test_the_best_tokens_never_cross(monkeypatch: pytest.MonkeyPatch) -> None:
    for drafter, form in ((on_the_cpu(), "there"), (NeighbourDrafter.paper(), "host")):
        with copies_counted(monkeypatch) as counts:
            engine = Engine(target(), drafter=drafter, budget=12)
            engine.generate(PROMPTS[0], max_new_tokens=12, ignore_eos=True)
        assert set(counts) == {form}
        assert counts[form] > 3


def test_rows_of_a_forward_share_one_copy() -> None:
    best = torch.arange(24).reshape(2, 4, 3)
    one, other = TopTokens.rows(best, [2, 4])
    assert (len(one), len(other)) == (2, 4)
    for top_tokens, row in ((one, best[0, :2]), (other, best[1])):
        assert torch.equal(top_tokens.there(), row)
        assert top_tokens.host().tolist() == row.tolist()
    assert one.forward.host is other.forward.host
    assert Step(DraftTree.empty(), (), (1,)).top is None


def test_drafters_are_reported_where_the_target_is() -> None:
    known: list[Sequence[Any]] = []

    class Curious(NeighbourDrafter):
        def open(self, request: DraftRequest) -> NeighbourSession:
            known.append((request.device, request.vocab_size))
            return super().open(request)

    engine = Engine(target(), drafter=Curious(), budget=4)
    engine.generate(PROMPTS[0], max_new_tokens=2)
    assert known == [(engine.target.device, tiny.VOCAB)]


@pytest.mark.gpu
def test_on_a_gpu_the_table_is_there_and_the_text_that_of_plain_decoding() -> None:
    device = torch.accelerator.current_accelerator()
    model = copy.deepcopy(target()).to(device)
    settings: dict[str, Any] = {"max_new_tokens": 16, "ignore_eos": True}
    for sampling in SAMPLINGS.values():
        plain = Engine(model, drafter=None).generate(PROMPTS, sampling, **settings)
        drafter = NeighbourDrafter.paper()
        for _ in range(2):
            match = Engine(model, drafter=drafter, budget=40).generate(
                PROMPTS, sampling, **settings
            )
            assert [result.tokens for result in match] == [result.tokens for result in plain]
            assert not any(result.report.faults for result in match)
        assert isinstance(drafter.table, DeviceNeighbourTable)
        assert drafter.table.rows.device.type == "cuda"
        assert len(drafter.table) > 0
