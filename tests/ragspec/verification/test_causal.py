"""One forward verifies a tree per row: its logits are those of each path as a plain text."""

import copy
import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel

import ragspec.verification.tree_session as session_module
from ragspec import Engine
from ragspec.errors import InputError, ModelError, PromptTooLongError
from ragspec.trees.draft_tree import DraftTree
from ragspec.verification.base import TargetSession
from ragspec.verification.causal import CausalTarget
from ragspec.verification.open import open_target
from ragspec.verification.path_rows import PathSession, PathTarget
from ragspec.verification.reading import table_border
from ragspec.verification.tree_session import TreeSession
from tests.support import tiny
from tests.support.architectures import VOCAB, build, make
from tests.support.architectures_sweep import TOWERS
from tests.support.noisy import NoisyTrees
from tests.support.sessions import EMPTY, prefill
from tests.support.tiny import prompt

NAMES = ["llama", "gemma3_text", "gpt2", "falcon"]


def path_to(tree: DraftTree, node: int) -> list[int]:
    path: list[int] = []
    while node >= 0:
        path.insert(0, node)
        node = int(tree.parents[node])
    return path


def assert_right(
    model: Any,
    logits: Sequence[torch.Tensor],
    texts: list[list[int]],
    trees: list[DraftTree],
    atol: float = 1e-9,
) -> None:
    """Assert that logits [N + 1, V] are those of the texts and every path below them."""
    for row, (text, tree) in enumerate(zip(texts, trees, strict=True)):
        for node in range(-1, len(tree)):
            tokens = [int(tree.tokens[i]) for i in path_to(tree, node)]
            expected = tiny.logits(model, [*text, *tokens])[-1]
            assert torch.allclose(logits[row][node + 1], expected, atol=atol), (row, node)


def random_tree(data: st.DataObject, most: int) -> DraftTree:
    n = data.draw(st.integers(0, most))
    parents = [data.draw(st.integers(-1, i - 1)) for i in range(n)]
    return DraftTree.build(data.draw(st.permutations(range(20)))[:n], parents, "test")


def random_text(data: st.DataObject, least: int, most: int) -> list[int]:
    return data.draw(st.lists(st.integers(0, VOCAB - 2), min_size=least, max_size=most))


@given(st.data())
@settings(max_examples=25)
def test_ragged_batches_of_trees_step_after_step(data: st.DataObject) -> None:
    model = build(data.draw(st.sampled_from(NAMES)))
    rows = data.draw(st.integers(1, 3))
    with CausalTarget(model).open(rows, capacity=4) as session:
        check_steps(data, model, session, rows, steps=3, nodes=7, more=3)


def check_steps(
    data: st.DataObject,
    model: Any,
    session: TargetSession,
    rows: int,
    *,
    steps: int,
    nodes: int,
    more: int,
    atol: float = 1e-9,
) -> None:
    """Check a few steps over texts that grow by a path of each tree and up to `more` tokens."""
    texts = [random_text(data, 1, 14) for _ in range(rows)]
    pending = [list(text) for text in texts]
    for _ in range(steps):
        trees = [session.trim_draft(random_tree(data, nodes)) for _ in texts]
        assert_right(model, session.verify(pending, trees), texts, trees, atol)
        paths = [path_to(tree, data.draw(st.integers(-1, len(tree) - 1))) for tree in trees]
        session.commit(paths)
        pending = [random_text(data, 1, more) for _ in texts]
        for text, tree, path, new in zip(texts, trees, paths, pending, strict=True):
            text.extend(int(tree.tokens[node]) for node in path)
            text.extend(new)


def test_rows_leave_and_are_copied() -> None:
    model = build("llama")
    texts = [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10]]
    with CausalTarget(model).open() as session:
        rows = [session.join(text, str(number))[0] for number, text in enumerate(texts)]
        assert session.select_rows(rows) == rows == [0, 1, 2]
        prefill(session, *texts)
        session.leave(1)
        assert session.fork(2) == 1
        text_of = {0: texts[0], 1: texts[2], 2: texts[2]}
        chain = DraftTree.chain([20, 21], "test")
        tree_of = {0: chain, 1: EMPTY, 2: DraftTree.build([30, 31], [-1, -1], "t")}
        for rows in ([2, 0, 1], [0, 2], [1], [2, 1]):
            assert session.select_rows(rows) == rows
            trees = [tree_of[row] for row in rows]
            logits = session.verify([[11 + row] for row in rows], trees)
            assert_right(model, logits, [[*text_of[row], 11 + row] for row in rows], trees)
            session.discard_uncommitted()


def test_only_expected_logits_are_computed() -> None:
    model, known = copy.deepcopy(build("llama")), list[int]()
    model.lm_head.register_forward_pre_hook(lambda _, inputs: known.append(inputs[0].shape[1]))
    with CausalTarget(model).open(1, 32) as session:
        prefill(session, list(range(20)))
        session.verify([[3]], [DraftTree.chain([1, 2], "test")])
    assert known == [1, 3]


@pytest.mark.parametrize("most", [1, 3 * VOCAB * 5, 1 << 24])
@pytest.mark.parametrize("keeps", [True, False])
def test_prompts_report_the_best_tokens_of_their_ends(
    keeps: bool, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "MOST_LOGITS", most)
    model, k = build("llama"), 4
    target = CausalTarget(model)
    target.keeps_logits &= keeps
    texts = [[1, 2, 3], [7], list(range(2, 11)), [5, 6, 7, 8, 9, 10, 11]]
    for rows in (texts, texts[2:3], [texts[2], texts[2][::-1]]):
        with target.open(len(rows), 4) as session:
            logits, top_tokens = session.read_prompts(rows, k)
            session.commit([()] * len(rows))
            trees = [DraftTree.chain([20, 21], "test")] * len(rows)
            assert_right(model, logits, rows, [EMPTY] * len(rows))
            logits = session.verify([[3]] * len(rows), trees)
            assert_right(model, logits, [[*row, 3] for row in rows], trees)
        for row, top in zip(rows, top_tokens, strict=True):
            first = max(0, len(row) - most // (len(rows) * VOCAB))
            assert len(top) == len(row) - first
            for place, best in enumerate(top.host().tolist(), start=first):
                assert best == tiny.logits(model, row[: place + 1])[-1].topk(k).indices.tolist()


@pytest.mark.parametrize("kind", [CausalTarget, lambda model: PathTarget(model)])
def test_training_mode_is_refused_once_a_model_was_opened_for_evaluation(kind: Any) -> None:
    model = copy.deepcopy(build("llama"))
    engine = Engine(kind(model), drafter="context", budget=4)
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


# --- mutants, for the tests of the probe ---------------------------------------------------------


def chains_only(start: int, tree: DraftTree) -> np.ndarray[Any, Any]:
    """Let every node see all nodes before it, as a plain causal mask would."""
    return np.tri(start + len(tree), dtype=np.bool_)


def by_slot(*inputs: Any) -> tuple[torch.Tensor, Any]:
    """Number the nodes by their slots instead of by their depths."""
    tokens, views = TRUE_LAYOUT(*inputs)
    at = torch.arange(tokens.shape[1])[None]
    return tokens, [replace(view, positions=view.length + at) for view in views]


TRUE_LAYOUT = session_module._layout


def test_forwards_are_timed_within_the_context() -> None:
    """Learned positions end where the context does."""
    config = GPT2Config(vocab_size=50, n_positions=64, n_embd=16, n_layer=1, n_head=2)
    target = CausalTarget(GPT2LMHeadModel(config).eval())
    assert target.max_length == 64
    assert target.time_forward(64, 1) > 0


@pytest.mark.parametrize("session", [TreeSession, PathSession])
def test_sessions_have_every_part_under_its_name(session: type) -> None:
    selection = {n: f for n, f in vars(TargetSession).items() if inspect.isfunction(f)}
    names = {n for n in selection if not n.startswith("_") or n in ("__enter__", "__exit__")}
    parts = "trim_draft verify commit join fork leave select_rows discard_uncommitted shrink"
    assert names >= {*parts.split(), "__enter__", "__exit__"}
    for name in names:
        requests = list(inspect.signature(selection[name]).parameters)
        assert list(inspect.signature(getattr(session, name)).parameters) == requests


BORDER = 64
NEW = 60
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": BORDER,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 4.0, 8.0, 16.0],
}
MSCALE = {"short_mscale": 1.0, "long_mscale": 1.5}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "lm_head_bias": False}
MODELS: dict[str, dict[str, Any]] = {
    "phi3": {"original_max_position_embeddings": BORDER, "sliding_window": None},
    "phimoe": EXPERTS | {"rope_parameters": LONGROPE | MSCALE, "attention_bias": False},
    "phi4_multimodal": TOWERS | {"original_max_position_embeddings": BORDER},
    "llama": {},
    "qwen2": {},
    "mistral": {"sliding_window": 16},  # chains cannot be cropped, so tokens are replayed
}


def build_longrope(name: str) -> Any:
    """Return a tiny model with one table up to 64 tokens and another beyond."""
    dtype = torch.float32 if name == "phimoe" else torch.float64
    return make(name, dtype, **{"rope_parameters": LONGROPE} | MODELS[name])


def greedy(model: Any, text: list[int]) -> list[int]:
    """Return what transformers' own plain decoding writes.

    For Phi 4 the text that the model would choose if it read all of it for every token: its own
    `generate` drops its cache beyond the border and goes on from the last token alone.
    """
    if model.config.model_type != "phi4_multimodal":
        return tiny.greedy(model, text, NEW)
    written: list[int] = []
    for _ in range(NEW):
        written.append(int(tiny.logits(model, [*text, *written])[-1].argmax()))
    return written


@pytest.mark.parametrize("mode", ["tree", "chain"])
@pytest.mark.parametrize("name", MODELS)
def test_texts_that_cross_the_border_are_those_of_plain_decoding(name: str, mode: str) -> None:
    model = build_longrope(name)
    target = CausalTarget(model) if mode == "tree" else PathTarget(model)
    text = prompt(40)
    expected = greedy(copy.deepcopy(model), text)
    assert Engine(target, drafter=None).generate(text, max_new_tokens=NEW).tokens == expected
    for budget in (4, 9):
        drafter = NoisyTrees({tuple(text): expected})
        out = Engine(target, drafter=drafter, budget=budget).generate(text, max_new_tokens=NEW)
        assert out.tokens == expected
        assert out.label == "exact"
        assert not out.report.faults
        assert out.report.accepted > 10


@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_rows_of_a_batch_use_their_separate_tables(name: str, drafted: bool) -> None:
    model = build_longrope(name)
    texts = [prompt(n, seed=n) for n in (40, 90, 64, 9)]
    expected = [greedy(copy.deepcopy(model), text) for text in texts]
    truths = {tuple(text): out for text, out in zip(texts, expected, strict=True)}
    engine = Engine(open_target(model), drafter=NoisyTrees(truths) if drafted else None, budget=9)
    assert [out.tokens for out in engine.generate(texts, max_new_tokens=NEW)] == expected


def test_a_forward_on_both_sides_of_the_border_is_refused() -> None:
    target = open_target(build_longrope("llama"))
    assert not target.packs
    with target.open(2, 80) as session:
        trees = [DraftTree.chain([3, 4, 5], "test"), EMPTY]
        session.verify([[1] * 65, [1, 2]], [EMPTY] * 2)  # rows take turns
        session.discard_uncommitted()
        with pytest.raises(InputError, match="both sides of 64"):
            session.verify([[1] * 62, [1, 2]], trees)
    assert target.time_forward(2, 8) > 0


def test_models_with_one_rotary_table_have_no_border() -> None:
    assert table_border(build("llama")) is table_border(build("phi3")) is None
    assert table_border(build_longrope("llama")) == table_border(build_longrope("phi3")) == BORDER
    assert [CausalTarget(build_longrope(n)).rereads for n in ("phi3", "llama")] == [True, False]


def test_dynamic_scaling_is_used_within_its_first_table() -> None:
    """Beyond `max_position_embeddings` its table would change with every token."""
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    model = make("llama", rope_parameters=dynamic, max_position_embeddings=BORDER)
    text = prompt(40)
    expected = greedy(model, text)[: BORDER - 40]
    engine = Engine(CausalTarget(model), drafter=NoisyTrees({tuple(text): expected}), budget=9)
    assert engine.generate(text, max_new_tokens=BORDER - 40).tokens == expected
    with pytest.raises(PromptTooLongError):
        engine.generate(text, max_new_tokens=BORDER - 39)
