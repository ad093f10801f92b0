"""One forward verifies a tree per row: its logits are those of each path as a plain text."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel

import ragspec.verification.causal as target_module
from ragspec.engine.engine import Engine
from ragspec.errors import ModelError
from ragspec.trees.draft_tree import DraftTree
from ragspec.verification.causal import CausalTarget
from ragspec.verification.path_rows import PathTarget
from tests.support.architectures import VOCAB, build

NAMES = ["llama", "gemma3_text", "gpt2", "falcon"]


def reference(model: Any, text: Sequence[int]) -> torch.Tensor:
    """Return the logits after a text, by the model alone: [V]."""
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=torch.tensor([list(text)]), use_cache=False).logits
    return logits[0, -1]


def path_to(tree: DraftTree, node: int) -> list[int]:
    path: list[int] = []
    while node >= 0:
        path.insert(0, node)
        node = int(tree.parents[node])
    return path


def assert_right(
    model: Any, logits: torch.Tensor, texts: list[list[int]], trees: list[DraftTree]
) -> None:
    """Assert that logits [B, N + 1, V] are those of the texts and every path below them."""
    for row, (text, tree) in enumerate(zip(texts, trees, strict=True)):
        for node in range(-1, len(tree)):
            tokens = [int(tree.tokens[i]) for i in path_to(tree, node)]
            expected = reference(model, [*text, *tokens])
            assert torch.allclose(logits[row, node + 1], expected, atol=1e-9), (row, node)


def random_tree(data: st.DataObject, most: int = 7) -> DraftTree:
    n = data.draw(st.integers(0, most))
    parents = [data.draw(st.integers(-1, i - 1)) for i in range(n)]
    tokens = data.draw(st.permutations(range(20)))[:n]
    return DraftTree.build(tokens, parents, "test")


def random_text(data: st.DataObject, least: int, most: int) -> list[int]:
    return data.draw(st.lists(st.integers(0, VOCAB - 2), min_size=least, max_size=most))


@given(st.data())
@settings(max_examples=25)
def test_ragged_batches_of_trees_step_after_step(data: st.DataObject) -> None:
    model = build(data.draw(st.sampled_from(NAMES)))
    rows = data.draw(st.integers(1, 3))
    texts = [random_text(data, 1, 14) for _ in range(rows)]
    pending = [list(text) for text in texts]
    with CausalTarget(model).open(rows, capacity=4) as session:
        for _ in range(3):
            trees = [random_tree(data) for _ in texts]
            logits = session.verify(pending, trees)
            assert_right(model, logits, texts, trees)
            paths = [path_to(tree, data.draw(st.integers(-1, len(tree) - 1))) for tree in trees]
            session.commit(paths)
            for text, tree, path in zip(texts, trees, paths, strict=True):
                text.extend(int(tree.tokens[node]) for node in path)
            pending = [random_text(data, 1, 3) for _ in texts]
            for text, more in zip(texts, pending, strict=True):
                text.extend(more)


def test_rows_leave_and_are_copied() -> None:
    model, empty = build("llama"), DraftTree.empty()
    texts = [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10]]
    with CausalTarget(model).open(3, 32) as session:
        rows = [session.join(text, str(number))[0] for number, text in enumerate(texts)]
        assert session.line_up(rows) == rows == [0, 1, 2]
        session.verify(texts, [empty] * 3)
        session.commit([(), (), ()])
        session.leave(1)
        assert session.fork(2) == 1
        text_of = {0: texts[0], 1: texts[2], 2: texts[2]}
        tree_of = {
            0: DraftTree.chain([20, 21], "test"),
            1: empty,
            2: DraftTree.build([30, 31], [-1, -1], "t"),
        }
        for rows in ([2, 0, 1], [0, 2], [1], [2, 1]):
            active_rows = session.line_up(rows)
            trees = [tree_of[row] for row in active_rows]
            logits = session.verify([[11 + row] for row in active_rows], trees)
            followed = [[*text_of[row], 11 + row] for row in active_rows]
            assert sorted(active_rows) == sorted(rows)
            assert_right(model, logits, followed, trees)
            session.abandon()


def test_only_expected_logits_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = copy.deepcopy(build("llama"))
    known: list[int] = []
    head = model.lm_head.forward

    def counted(hidden: torch.Tensor) -> torch.Tensor:
        known.append(hidden.shape[1])
        logits: torch.Tensor = head(hidden)
        return logits

    monkeypatch.setattr(model.lm_head, "forward", counted)
    with CausalTarget(model).open(1, 32) as session:
        session.verify([list(range(20))], [DraftTree.empty()])
        session.commit([()])
        session.verify([[3]], [DraftTree.chain([1, 2], "test")])
    assert known == [1, 3]


@pytest.mark.parametrize("most", [1, 3 * VOCAB * 5, 1 << 24])
@pytest.mark.parametrize("keeps", [True, False])
def test_prompts_report_the_best_tokens_of_their_ends(
    keeps: bool, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target_module, "MOST_LOGITS", most)
    model, k = build("llama"), 4
    target = CausalTarget(model)
    target.keeps_logits &= keeps
    texts = [[1, 2, 3], [7], list(range(2, 11)), [5, 6, 7, 8, 9, 10, 11]]
    for rows in (texts, texts[2:3], [texts[2], texts[2][::-1]]):
        with target.open(len(rows), 4) as session:
            logits, top_tokens = session.read_prompts(rows, k)
            session.commit([()] * len(rows))
            trees = [DraftTree.chain([20, 21], "test")] * len(rows)
            assert_right(model, logits, rows, [DraftTree.empty()] * len(rows))
            assert_right(
                model, session.verify([[3]] * len(rows), trees), [[*row, 3] for row in rows], trees
            )
        longest = max(map(len, rows))
        message = min(longest, most // (len(rows) * VOCAB))
        for row, top in zip(rows, top_tokens, strict=True):
            first = max(0, longest - message)
            assert len(top) == max(0, len(row) - first)
            for place, best in enumerate(top.host().tolist(), start=first):
                expected = reference(model, row[: place + 1])
                assert best == expected.topk(k).indices.tolist()


def test_a_forward_can_be_timed_at_any_length() -> None:
    target = CausalTarget(build("llama"))
    assert target.time_forward(1, 16) > 0
    assert target.time_forward(8, 64) > 0


def test_sizes_are_read_off_the_model() -> None:
    target = CausalTarget(build("gptj"))
    assert (target.vocab_size, target.max_length) == (VOCAB, 256)
    assert target.dtype == torch.float64


# --- mutants: each must be seen by the comparison above -------------------------------------------


@pytest.mark.parametrize("kind", [CausalTarget, lambda model: PathTarget(model)])
def test_training_mode_is_refused_once_a_model_was_opened_for_evaluation(kind: Any) -> None:
    model = copy.deepcopy(build("llama"))
    target = kind(model)
    engine = Engine(target, drafter="context", budget=4)
    text = [1, 2, 3, 1, 2, 3, 1, 2]
    expected = engine.generate(text, max_new_tokens=8).tokens
    model.train()
    with pytest.raises(ModelError, match=r"training mode.*model\.eval\(\)"):
        engine.generate(text, max_new_tokens=8)
    assert all(module.training for module in model.modules())
    model.eval()
    assert engine.generate(text, max_new_tokens=8).tokens == expected
    opened_in_training = kind(model.train())
    for mode in (True, False):  # it has no dropout; evaluation is always right
        model.train(mode)
        out = Engine(opened_in_training, drafter=None).generate(text, max_new_tokens=8)
        assert out.tokens == expected


def chains_only(*arguments: Any) -> np.ndarray[Any, Any]:
    """Let every node see all nodes before it, as a plain causal mask would."""
    _, trees, n = arguments
    return np.repeat(np.tri(n, dtype=np.bool_)[None], len(trees), axis=0)


def by_slot(count: int, visible: np.ndarray[Any, Any] | None) -> np.ndarray[Any, Any]:
    """Number the nodes by their slots instead of by their depths."""
    return np.arange(1, count + 1)


@pytest.mark.parametrize(
    ("part", "mutant"), [("_related", chains_only), ("_places", by_slot)], ids=["mask", "position"]
)
def test_a_mutant_is_visible(part: str, mutant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, text = build("llama"), [1, 2, 3, 4]
    tree = DraftTree.build([5, 6, 7], [-1, -1, 1], "test")
    with CausalTarget(model).open(1, 32) as session:
        session.verify([text], [DraftTree.empty()])
        session.commit([()])
        monkeypatch.setattr(target_module, part, mutant)
        logits = session.verify([[8]], [tree])
    with pytest.raises(AssertionError):
        assert_right(model, logits, [[*text, 8]], [tree])


def test_forwards_are_timed_within_the_context() -> None:
    """Learned positions end where the context does."""
    config = GPT2Config(vocab_size=50, n_positions=64, n_embd=16, n_layer=1, n_head=2)
    target = CausalTarget(GPT2LMHeadModel(config).eval())
    assert target.max_length == 64
    assert target.time_forward(64, 1) > 0
