"""Chains over the model's own cache give the logits of plain texts."""

import copy
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragspec.errors import UnsupportedModelError
from ragspec.models.quantized import quantized
from ragspec.models.supported import counts_slots
from ragspec.trees.draft_tree import DraftTree
from ragspec.verification.causal import CausalTarget, read_states
from ragspec.verification.open import open_target
from ragspec.verification.path_rows import LAG, PathTarget
from ragspec.verification.probe import probe
from tests.ragspec.verification.test_causal import assert_right, check_steps
from tests.support import architectures_sweep as sweep
from tests.support.architectures import ARCHITECTURES, build, make
from tests.support.sessions import EMPTY, prefill, shapes_fed

RECURRENT, SLOTTED, WINDOWED = "qwen3_5_text", "bloom", "mistral"
close = partial(assert_right, atol=1e-3)  # for models that compute states in float32


@given(st.data())
@settings(max_examples=20)
def test_ragged_batches_of_chains_step_after_step(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([RECURRENT, SLOTTED, WINDOWED]))
    model, rows = build(name), data.draw(st.integers(1, 2))
    atol = 1e-3 if name == RECURRENT else 1e-9
    with PathTarget(model).open(rows, 0) as session:
        check_steps(data, model, session, rows, steps=4, nodes=5, more=2, atol=atol)


@pytest.mark.parametrize(("name", "replayed"), [(RECURRENT, 2), (SLOTTED, 0)])  # it is cropped
def test_accepted_tokens_are_replayed_in_front_of_the_next_forward(
    name: str, replayed: int
) -> None:
    model = copy.deepcopy(build(name))
    text, known = [1, 2, 3, 4, 5], shapes_fed(model)
    with PathTarget(model).open(1, 0) as session:
        prefill(session, text)
        session.verify([[6]], [DraftTree.chain([7, 8, 9], "test")])
        session.commit([(0,)])  # two of three rejected: the states come back
        tree = DraftTree.chain([11], "test")
        logits = session.verify([[10]], [tree])
        session.commit([(0,)])  # all accepted: the states stay
        last = session.verify([[12]], [EMPTY])
    assert known == [(1, 5), (1, 4), (1, 2 + replayed), (1, 1)]
    close(build(name), logits, [[*text, 6, 7, 10]], [tree])
    close(build(name), last, [[*text, 6, 7, 10, 11, 12]], [EMPTY])


def test_a_long_replay_gets_a_separate_forward() -> None:
    model = copy.deepcopy(build(RECURRENT))
    text, known = [1, 2, 3], shapes_fed(model)
    with PathTarget(model).open(1, 0) as session:
        prefill(session, text)
        for token in range(4, 4 + LAG + 4):
            tree = DraftTree.chain([90], "test")
            logits = session.verify([[token]], [tree])
            session.commit([()])  # never accepted, so nothing of it is kept
            text = [*text, token]
    assert max(n for _, n in known[1:]) <= LAG + 3
    close(build(RECURRENT), logits, [text], [tree])


@pytest.mark.parametrize("name", [RECURRENT, SLOTTED, WINDOWED])
def test_rows_are_dropped_and_copied(name: str) -> None:
    model = build(name)
    texts = [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10]]
    with PathTarget(model).open(4, 0) as session:
        for text in texts:
            session.join(text)
        session.select_rows([0, 1, 2])
        session.verify(texts, [DraftTree.chain([50], "test")] * 3)
        session.commit([(), (0,), ()])
        session.select_rows([2, 0, session.fork(2), 1])
        trees = [DraftTree.chain([20, 21], "test"), EMPTY, EMPTY, EMPTY]
        logits = session.verify([[11], [12], [13], [14]], trees)
    followed = [[8, 9, 10, 11], [1, 2, 3, 4, 5, 12], [8, 9, 10, 13], [6, 7, 50, 14]]
    close(model, logits, followed, trees)


def test_positions_equal_those_of_generate() -> None:
    model = sweep.build("roberta")  # by itself it counts from the number of its padding token
    text, tree = list(range(20, 31)), DraftTree.chain([6, 7], "test")
    ids = torch.tensor([[*text, 1, 6, 7]])
    with torch.no_grad():
        expected = model(input_ids=ids, position_ids=torch.arange(14)[None]).logits[0]
        by_itself = model(input_ids=ids).logits[0]
    with PathTarget(model).open(1, 0) as session:
        first = prefill(session, text)
        logits = session.verify([[1]], [tree])
    torch.testing.assert_close(first[0][0], expected[10])
    torch.testing.assert_close(logits[0], expected[11:])
    assert (by_itself - expected).abs().max() > 1.0


def test_hidden_states_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="hidden states"):
        next(read_states(PathTarget(build(RECURRENT)), [[1, 2, 3]]))


def test_drafts_are_trimmed_to_the_likeliest_path() -> None:
    parents = [-1, -1, 1, -1, 3, *[-1] * 10]
    accept_prob = [0.5, 0.4, 0.3, 0.9, 0.1, *[0.01] * 10]
    tree = DraftTree.build(range(15), parents, "test", accept_prob=accept_prob)
    session = PathTarget(build(SLOTTED)).open(1, 0)
    chain = session.trim_draft(tree)
    assert chain.tokens.tolist() == [3, 4]
    assert chain.parents.tolist() == [-1, 0]
    assert session.trim_draft(chain) is chain


@pytest.mark.parametrize(
    ("kind", "name"), [(PathTarget, RECURRENT), (PathTarget, SLOTTED), (CausalTarget, "llama")]
)
def test_a_forward_can_be_timed_at_any_length(kind: Any, name: str) -> None:
    target = kind(build(name))
    for n, length in ((1, 16), (4, 16), (1, 32), (8, 16)):
        assert target.time_forward(n, length) > 0


# --- distances, masks and scales by slot ----------------------------------------------------------


@pytest.mark.parametrize("change", [lambda model: model, torch.nn.Module.bfloat16, quantized])
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("bloom", {"hidden_size": 64}),
        ("falcon", {"alibi": True}),
        ("gpt_neo", {"attention_types": [[["global", "local"], 1]], "window_size": 24}),
    ],
)
def test_coarse_tolerances_pass_no_trees_by_slot(name: str, settings: Any, change: Any) -> None:
    verdict = probe(CausalTarget(change(make(name, torch.float32, **settings))))
    assert verdict.mode == "chain" and "off by" not in verdict.reason, verdict


@pytest.fixture(scope="module")
def tempered() -> Any:
    """Return a Llama 4 that scales the queries from slot 39 on."""
    settings = ARCHITECTURES["llama4_text"].settings
    return make("llama4_text", torch.float32, **settings, floor_scale=40, attn_scale=40.0)


def test_counts_by_slot_are_left_to_chains(tempered: Any) -> None:
    text = list(range(20, 20 + 37))
    chain = DraftTree.chain([3, 4, 5, 6], "test")
    bushy = DraftTree.build(range(3, 11), [-1, -1, -1, 0, 1, 2, 3, 4], "test")
    for target, tree, right in (
        (open_target(tempered), chain, True),
        (CausalTarget(tempered), chain, True),
        (CausalTarget(tempered), bushy, False),
    ):
        with target.open(1, 64) as session:
            prefill(session, text)
            logits = session.verify([[1]], [tree])
        with nullcontext() if right else pytest.raises(AssertionError):
            close(tempered, logits, [[*text, 1]], [tree])
    assert isinstance(open_target(tempered), PathTarget), "though the probe does not reach so far"


def test_models_without_such_a_scale_verify_trees(tempered: Any) -> None:
    assert counts_slots(build("llama4_text").config) and not counts_slots(build("llama").config)
    config = copy.deepcopy(tempered.config)
    config.attn_temperature_tuning = False
    assert not counts_slots(config)


def test_texts_end_where_doge_drops_keys() -> None:
    assert CausalTarget(make("doge", keep_window_size=24)).max_length == 24
    assert CausalTarget(make("doge")).max_length == 256
