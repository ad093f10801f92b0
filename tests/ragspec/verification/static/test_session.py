"""A step of fixed shape against a plain session: same logits, slots and lengths."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ragspec.needs import LAST
from ragspec.rules.target_view import RowView
from ragspec.rules.walk import Walk
from ragspec.sampling.batch_distribution import BatchDistribution
from ragspec.sampling.distribution import TokenDistribution
from ragspec.sampling.noise import NoiseStream
from ragspec.sampling.settings import Sampling
from ragspec.trees.draft_tree import DraftTree
from ragspec.verification.causal import CausalTarget
from ragspec.verification.open import open_static
from ragspec.verification.static.layout import MOST_QUERIES
from ragspec.verification.tree_session import TreeSession
from tests.support import architectures
from tests.support.sessions import EMPTY, follow, prefill, static_session

ARCHITECTURES = ("llama", "qwen3", "gemma3_text", "llama4_text", "starter")
STEPS = 24
TREES = {1: 100, 3: 120, 16: 384}  # of a model, by rows: 2,416 of the four small models
FEWER = {1: 16, 3: 24, 16: 64}  # of the starter model, which is larger
CLOSE = {torch.float64: 1e-12, torch.float32: 1e-4}


def model(name: str) -> Any:
    if name == "starter":
        from ragspec.models.load import load_model

        return load_model("starter", "cpu", "float64")[0]
    return architectures.build(name)


def targets(name: str = "llama") -> tuple[CausalTarget, CausalTarget]:
    plain = CausalTarget(model(name))
    static = open_static(plain, "eager")
    assert static.runner is not None, static.static
    return plain, static


def a_tree(rng: np.random.Generator, most: int = 20) -> DraftTree:
    n = int(rng.integers(0, most))
    if not n:
        return EMPTY
    parents = [int(rng.integers(-1, node)) for node in range(n)]
    return DraftTree.build(rng.choice(90, n, replace=False).tolist(), parents, "test")


def a_path(rng: np.random.Generator, tree: DraftTree) -> tuple[int, ...]:
    path: list[int] = []
    while below := [n for n, p in enumerate(tree.parents.tolist()) if p == ([-1, *path][-1])]:
        if rng.random() < 0.3:
            break
        path.append(int(rng.choice(below)))
    return tuple(path)


def start(rng: np.random.Generator, rows: int, *sessions: TreeSession) -> list[list[int]]:
    prompts = [rng.integers(0, 90, rng.integers(2, 30)).tolist() for _ in range(rows)]
    for session in sessions:
        prefill(session, *prompts)
    return prompts


def check_logits(one: TreeSession, other: Any, roots: Any, trees: Any, *followed: Any) -> None:
    """Verify trees in both sessions, and check that their logits are the same."""
    other.launch(roots, trees, *followed)
    both = zip(one.verify(roots, trees), other.settle(), trees, strict=True)
    for expected, result, tree in both:
        expected, result = expected[: len(tree) + 1], result[: len(tree) + 1]
        assert float((expected - result).abs().max()) < CLOSE[expected.dtype]
        assert torch.equal(expected.argmax(-1), result.argmax(-1))


def check_slots(one: TreeSession, other: TreeSession) -> None:
    """Check that the committed keys and values of every layer and row are the same."""

    def slots(session: TreeSession) -> list[torch.Tensor]:
        caches = [row.cache.layers(row.cache.length) for row in session.active_rows]
        return [part for layers in caches for pair in layers.values() for part in pair]

    assert lengths(one) == lengths(other)
    for expected, result in zip(slots(one), slots(other), strict=True):
        assert float((expected - result).abs().max()) < CLOSE[expected.dtype]


def lengths(session: TreeSession) -> list[int]:
    return [row.cache.length for row in session.active_rows]


@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_random_trees_get_the_same_logits_and_slots(name: str, rows: int) -> None:
    plain, static = targets(name)
    rng = np.random.default_rng(rows)
    with plain.open(rows, 64) as one, static.open(rows, 64) as other, torch.no_grad():
        start(rng, rows, one, other)
        for _ in range((FEWER if name == "starter" else TREES)[rows] // rows):
            roots = [[int(token)] for token in rng.integers(0, 90, rows)]
            trees = [a_tree(rng) for _ in range(rows)]
            check_logits(one, other, roots, trees)
            paths = [a_path(rng, tree) for tree in trees]
            one.commit(paths)
            other.commit(paths)
        check_slots(one, other)


def distribution(seed: int, **settings: Any) -> TokenDistribution:
    return TokenDistribution(Sampling(**settings), NoiseStream(seed), prompt_length=2)


@pytest.mark.parametrize(
    ("name", "rows", "steps", "settings"),
    [
        ("llama", 3, STEPS, {}),
        ("llama", 3, STEPS, {"temperature": 1.0, "top_k": 3}),
        ("llama", 1, STEPS, {"temperature": 0.9}),
        ("qwen3", 1, STEPS, {"temperature": 0.9, "repetition_penalty": 1.3}),
        ("gemma3_text", 16, 6, {}),
        ("starter", 3, 4, {}),
    ],
    ids=str,
)
def test_device_and_host_agree(name: str, rows: int, steps: int, settings: dict[str, Any]) -> None:
    """Trees hold the target's own tokens, so that paths are long and slots move."""
    plain, static = targets(name)
    rng = np.random.default_rng(5)
    walk, selected = Walk(), 0
    distributions = [distribution(seed, **settings) for seed in range(rows)]
    with plain.open(rows, 64) as one, static.open(rows, 64) as other, torch.no_grad():
        texts = start(rng, rows, one, other)
        roots = rng.integers(0, 90, rows).tolist()
        for _ in range(steps):
            for text, root in zip(texts, roots, strict=True):
                text.append(root)
            current = local_tokens(one, roots, distributions, texts)
            trees = [with_local(rng, tokens) for tokens in current]
            pending = [[root] for root in roots]
            logits = one.verify(pending, trees)
            follow(other, pending, trees, distributions, texts)
            assert other.chosen is not None
            paths = []
            for row, tree in enumerate(trees):
                view = RowView(logits[row], tree, distributions[row], NO_STOP, texts[row])
                verdict = walk.judge(tree, view)
                if chosen := other.chosen[row]:
                    assert chosen == [view.token(node) for node in range(-1, len(tree))]
                paths.append(verdict.path)
                texts[row] += [int(tree.tokens[node]) for node in verdict.path]
                assert verdict.token is not None
                roots[row] = verdict.token
            selected += sum(map(len, paths))
            one.commit(paths)
            other.commit(paths)
            check_slots(one, other)
        assert selected > steps * rows


NO_STOP: Any = SimpleNamespace(peek=lambda path: False)


def local_tokens(
    session: TreeSession,
    roots: list[int],
    distributions: list[TokenDistribution],
    texts: list[list[int]],
) -> list[list[int]]:
    """Return the two tokens with which each text will go on, less one in five steps."""
    results: list[list[int]] = [[] for _ in roots]
    for depth in range(2):
        trees = [DraftTree.chain(local, "peek") for local in results]
        logits = session.verify([[root] for root in roots], trees)
        for row, current in enumerate(results):
            index = len(texts[row]) - 2 + depth
            current.append(int(distributions[row].select(logits[row][depth : depth + 1], [index])))
        session.discard_uncommitted()
    return results


def with_local(rng: np.random.Generator, current: list[int]) -> DraftTree:
    """Return a tree that holds these tokens behind wrong ones, so that they have to move."""
    wrong = [token for token in rng.choice(90, 6, replace=False).tolist() if token not in current]
    tokens, parents = [*wrong[:2], current[0], wrong[2], current[1]], [-1, 0, -1, 2, 2]
    return DraftTree.build(tokens, parents, "test")


def test_rows_move_only_when_the_step_halves() -> None:
    _, static = targets()
    rng = np.random.default_rng(0)
    places = []
    with static_session(static, most=4) as session:
        for prompt in ([1, 2], [3, 4, 5], [6, 7], [8, 9, 10, 11]):
            row, _ = session.join(prompt)
            session.select_rows([row])
            prefill(session, prompt)
        for rows in ([0, 1, 2, 3], [1, 2, 3], [1, 3], [3]):
            for row in set(session._rows) - set(rows):
                session.leave(row)
            assert sorted(session.select_rows(rows)) == rows
            session.verify([[int(rng.integers(90))] for _ in rows], [a_tree(rng) for _ in rows])
            session.commit([() for _ in rows])
            places.append([session._place(row) for row in rows])
        assert places == [[0, 1, 2, 3], [1, 2, 3], [1, 0], [0]]
        assert session._rows[3].cache.length == 8


@pytest.mark.parametrize("nodes", [MOST_QUERIES - 1, 80])
def test_the_widest_step_and_trees_beyond_it_are_right(nodes: int) -> None:
    """A wider tree gets a plain forward."""
    plain, static = targets()
    rng = np.random.default_rng(3)
    chain = DraftTree.chain(rng.integers(0, 90, nodes).tolist(), "long")
    with plain.open(1, 200) as one, static.open(1, 200) as other, torch.no_grad():
        start(rng, 1, one, other)
        check_logits(one, other, [[1]], [chain])
        for session in (one, other):
            session.commit([(0, 1, 2)])
            session.verify([[4]], [EMPTY])
        assert lengths(one) == lengths(other)


def test_hidden_states_are_those_of_the_plain_session() -> None:
    plain, static = targets()
    rng = np.random.default_rng(4)
    with plain.open(2, 64) as one, static.open(2, 64) as other, torch.no_grad():
        for session in (one, other):
            session.keep_hidden()
        start(rng, 2, one, other)
        trees = [a_tree(rng), a_tree(rng)]
        for session in (one, other):
            session.verify([[1], [2]], trees)
        for row, tree in enumerate(trees):
            n = len(tree) + 1
            mine, theirs = (each.hidden[row].of((LAST,))[:, :n] for each in (one, other))
            assert float((mine - theirs).abs().max()) < CLOSE[mine.dtype]


@pytest.mark.parametrize("again", [0, 2, 3, 8])
@pytest.mark.parametrize("known", [0, 1, 2, 3, 6])
def test_uncertain_tokens_are_chosen_again_and_then_by_the_host(
    known: int, again: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device accepts what it can choose, also at the second try; the host moves the rest."""
    plain, static = targets()
    tree = DraftTree.build([5, 6, 7, 8, 9, 4], [-1, 0, 1, 0, -1, 3], "test")
    selection = torch.zeros(1, 8, dtype=torch.int64)

    def partly(distributions: Any, logits: Any, *rest: Any, whole: bool = False) -> Any:
        tokens = selection.where(torch.arange(8) < max(known, again if whole else 0), -1)
        return tokens, tokens.double()

    monkeypatch.setattr(BatchDistribution, "choose", partly)
    with plain.open(1, 64) as one, static.open(1, 64) as other, torch.no_grad():
        texts = start(np.random.default_rng(0), 1, one, other)
        for path in ((0,), (0, 1, 2), (0, 3), (0, 3, 5), (4,)):
            texts[0].append(1)
            selection.fill_(90)
            for above, node in zip((-1, *path), path, strict=False):
                selection[0, above + 1] = int(tree.tokens[node])
            one.verify([[1]], [tree])
            follow(other, [[1]], [tree], [distribution(0)], texts)
            looked = known <= max((-1, *path)) + 1
            assert other.chosen == partly(None, None, whole=looked)[0][:, :7].tolist()
            one.commit([path])
            other.commit([path])
            check_slots(one, other)
