"""The registered attention and mask pair, and leases that leave a model unchanged."""

import copy
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from transformers import masking_utils

import ragspec.verification.kernels as kernels
import ragspec.verification.tree_attention as attention_module
from ragspec.engine.engine import Engine
from ragspec.trees.draft_tree import DraftTree
from ragspec.verification.batch import Batch, TreeView
from ragspec.verification.causal import CausalTarget
from ragspec.verification.sequence_cache import SequenceCache
from ragspec.verification.tree_attention import NAME, lease, tree_attention, tree_mask, tree_view
from tests.support import tiny
from tests.support.architectures import build
from tests.support.model_state import state_of
from tests.support.tiny import prompt

WINDOW = 4
RULES = {
    "full": (masking_utils.causal_mask_function, None),
    "sliding": (masking_utils.sliding_window_causal_mask_function(WINDOW), WINDOW),
}
PARENTS = [-1, 0, 0, 2, -1]
ANCESTORS = [[0], [0, 1], [0, 2], [0, 2, 3], [4]]
DEPTHS = [1, 2, 2, 3, 1]


def view(length: int, rows: int = 1) -> TreeView:
    """Return the view of the root and the five nodes above in every row."""
    n = len(PARENTS) + 1
    related = torch.zeros(rows, n, n, dtype=torch.bool)
    related[:, :, 0] = True
    for node, above in enumerate(ANCESTORS):
        related[:, node + 1, [a + 1 for a in above]] = True
    positions = torch.tensor([[length + depth for depth in [0, *DEPTHS]]] * rows)
    return TreeView(length, positions, positions, related)


def attending(view: TreeView) -> AbstractContextManager[None]:
    """Return a `tree_view` of one sequence."""
    return tree_view(Batch([SequenceCache(view.length)], [view]))


def allowed_by_hand(length: int, window: int | None) -> torch.Tensor:
    allowed = torch.zeros(6, length + 6, dtype=torch.bool)
    for query in range(6):
        at = length + ([0, *DEPTHS][query])
        known = {slot: slot for slot in range(length)} | {length: length}
        if query:
            known |= {length + 1 + a: length + DEPTHS[a] for a in ANCESTORS[query - 1]}
        for slot, position in known.items():
            if window is None or position > at - window:
                allowed[query, slot] = True
    return allowed


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("length", [0, 2, 3, 5, 7, 9])
def test_the_mask_equals_one_computed_by_hand(rule: str, length: int, rows: int) -> None:
    function, local = RULES[rule]
    slots = length + 6
    with attending(view(length, rows)):
        mask = tree_mask(rows, 6, slots, mask_function=function, local_size=local)
    assert mask is not None
    assert mask.shape == (rows, 1, 6, slots)
    assert all(torch.equal(row[0] == 0, allowed_by_hand(length, local)) for row in mask)
    assert torch.isneginf(mask[mask != 0]).all()


def test_chunks_use_logical_positions() -> None:
    rule = masking_utils.chunked_causal_mask_function(8, torch.zeros(1, dtype=torch.int64))
    with attending(view(6)):
        mask = tree_mask(1, 6, 12, mask_function=rule, local_size=8)
    assert mask is not None
    visible = mask[0, 0] == 0
    assert visible[0].nonzero().flatten().tolist() == list(range(7))  # position 6, chunk 0
    assert visible[4].nonzero().flatten().tolist() == [9, 10]  # position 9 sees 8 and 9, chunk 1
    assert visible[5].nonzero().flatten().tolist() == [*range(7), 11]  # position 7 at slot 11


def test_plain_causality_needs_no_mask_unless_the_model_knows_no_other() -> None:
    positions = torch.arange(5)[None]
    plain = TreeView(0, positions, positions, None)
    model = build("gpt_neo")  # its attention code adds any mask
    with attending(plain):
        assert tree_mask(1, 5, 5, config=build("llama").config) is None
        with lease(model):
            mask = tree_mask(1, 5, 5, config=model.config)
        assert tree_mask(1, 5, 5, config=model.config) is None
        changed = tree_mask(1, 5, 5, allow_is_causal_skip=False)  # by the model, later
    for each in (mask, changed):
        assert each is not None
        assert torch.equal(each[0, 0] == 0, torch.ones(5, 5).tril().bool())


def test_masks_over_other_keys_than_the_cache_are_plain() -> None:
    skips: dict[str, Any] = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    with attending(view(7)):
        mask = tree_mask(1, 6, 4, mask_function=masking_utils.bidirectional_mask_function, **skips)
    assert mask is not None
    assert mask.shape == (1, 1, 6, 4)
    assert (mask == 0).all()


@pytest.mark.parametrize("large", [1, 1 << 17])
def test_a_single_query_may_see_fewer_slots(large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_module, "LARGE_MASK", large)
    position = torch.tensor([[5]])
    related = torch.tensor([[[True, False, True]]])  # a second forward below one of two nodes
    slots = torch.tensor([[4, 4, 5]])
    with attending(TreeView(4, position, slots, related)):
        mask = tree_mask(1, 1, 7)
    assert mask is not None
    assert (mask[0, 0, 0] == 0).tolist() == [True, True, True, True, True, False, True]


def naive(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend head by head, query by query: [B, n, heads, width]."""
    rows, heads, n, width = query.shape
    share = heads // key.shape[1]
    out = torch.zeros(rows, n, heads, width, dtype=query.dtype)
    for b in range(rows):
        for h in range(heads):
            for i in range(n):
                scores = key[b, h // share] @ query[b, h, i] / width**0.5
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                scores = scores + mask[b, h % mask.shape[1], i]
                if sinks is not None:
                    scores = torch.cat([scores, sinks[h : h + 1]])
                weights = scores.softmax(-1)[: key.shape[2]]
                out[b, i, h] = weights @ value[b, h // share]
    return out


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize(("causal", "masks"), [(False, 1), (False, 4), (True, 1)])
def test_attention_is_that_of_single_queries(
    groups: int, softcap: float | None, with_sinks: bool, causal: bool, masks: int
) -> None:
    random = torch.Generator().manual_seed(groups)
    rows, heads, n, width = 2, 4, 5, 8
    slots = n if causal else 9

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64)

    query, key, value = draw(rows, heads, n, width), *draw(2, rows, groups, slots, width)
    mask = torch.zeros(rows, masks, n, slots, dtype=torch.float64)
    if causal:
        visible = torch.ones(n, slots).tril().bool().expand_as(mask)
    else:
        visible = torch.rand(mask.shape, generator=random) < 0.5
        visible[..., 0] = True
    mask = mask.masked_fill(~visible, float("-inf"))
    sinks = draw(heads) if with_sinks else None
    passed = None if causal else mask
    got, _ = tree_attention(nn.Module(), query, key, value, passed, softcap=softcap, s_aux=sinks)
    assert torch.allclose(got, naive(query, key, value, mask, softcap, sinks), atol=1e-12)


# --- committed slots apart from the new ones ------------------------------------------------------


def later(start: int, n: int, length: int, rows: int = 1) -> TreeView:
    """Return the view of a chain's queries from `start` on, behind the committed slots."""
    slots = length + torch.arange(start + n).expand(rows, -1)
    return TreeView(length, slots[:, start:], slots, None)


def whole_mask(visible: TreeView, slots: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the mask [B, 1, n, S] of full attention that is left out."""
    rows, n = visible.positions.shape
    with attending(visible):
        mask = tree_mask(rows, n, slots, dtype=dtype, allow_is_causal_skip=False)
    assert mask is not None and type(mask) is torch.Tensor
    return mask


def below(first: int) -> TreeView:
    """Return the view of the last nodes alone, the others read by a forward before."""
    whole = view(9, 2)
    assert whole.related is not None
    return replace(whole, positions=whole.positions[:, first:], related=whole.related[:, first:])


VIEWS = {
    "tree": lambda: view(9, 2),
    "the end of a tree": lambda: below(3),
    "the end of a chain": lambda: later(3, 4, 0, 2),
    "a chain behind others": lambda: later(0, 5, 6, 2),
    "its end": lambda: later(2, 3, 6, 2),
}


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("kind", VIEWS)
@pytest.mark.parametrize("direction", ["joined", "softcap", "sinks", "no kernel", "width"])
def test_parts_add_up_to_what_a_mask_gives(
    direction: str, kind: str, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the kernel the target builds the mask that it would leave out."""
    monkeypatch.setattr(attention_module, "LARGE_MASK", 1)
    if direction == "no kernel":
        monkeypatch.setattr(kernels, "_KERNEL", "_no_such_kernel")
    known = VIEWS[kind]()
    random = torch.Generator().manual_seed(groups)
    n, slots = known.positions.shape[1], known.length + known.slot_positions.shape[1]
    query, key, value = (
        torch.randn(2, heads, at, 8, generator=random).double()
        for heads, at in ((4, n), (groups, slots), (groups, slots))
    )
    value = value[..., :6] if direction == "width" else value
    softcap = 1.5 if direction == "softcap" else None
    sinks = torch.randn(4, generator=random).double() if direction == "sinks" else None
    by_weights = Mock(wraps=kernels.by_weights)
    monkeypatch.setattr(attention_module, "by_weights", by_weights)
    with attending(known):
        assert tree_mask(2, n, slots) is None
        got, _ = tree_attention(nn.Module(), query, key, value, None, softcap=softcap, s_aux=sinks)
    assert by_weights.called is (direction in ("joined", "softcap", "sinks"))
    mask = whole_mask(known, slots, torch.float64)
    assert int((mask == 0).sum()) < mask.numel()
    expected, _ = tree_attention(nn.Module(), query, key, value, mask, softcap=softcap, s_aux=sinks)
    torch.testing.assert_close(got, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_are_rounded_as_near_as_one(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(3)
    known = later(0, 40, 600)
    query = 3 * torch.randn(1, 6, 40, 16, generator=random).to(dtype)
    key, value = torch.randn(2, 1, 2, 640, 16, generator=random).to(dtype)
    with attending(known):
        got, _ = tree_attention(nn.Module(), query, key, value, None)
    mask = whole_mask(known, 640, torch.float64)
    exact, _ = tree_attention(nn.Module(), query.double(), key.double(), value.double(), mask)
    whole, _ = tree_attention(nn.Module(), query, key, value, mask.to(dtype))
    assert got.dtype is dtype
    errors = [float((result.double() - exact).abs().mean()) for result in (got, whole)]
    assert errors[0] < 1.5 * errors[1]


def test_small_and_single_forwards_keep_their_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    with attending(view(9)):
        assert tree_mask(1, 6, 15) is not None
        monkeypatch.setattr(attention_module, "LARGE_MASK", 1)
        assert tree_mask(1, 6, 15) is None
        assert tree_mask(1, 6, 15, allow_is_causal_skip=False) is not None
        rule, local = RULES["sliding"]
        assert tree_mask(1, 6, 15, mask_function=rule, local_size=local) is not None
    with attending(view(0)):
        assert tree_mask(1, 6, 6) is not None


# --- leases leave the model unchanged -------------------------------------------------------------


def local(model: Any, seed: int = 0) -> list[int]:
    """Return what transformers' own generate gives."""
    return tiny.greedy(model, prompt(12, seed=seed), 16)


def test_models_may_share_a_configuration() -> None:
    one: Any = copy.deepcopy(build("llama"))
    other: Any = type(one)(one.config).eval()
    assert other.config is one.config
    with lease(one):
        with lease(other):
            pass
        assert one.config._attn_implementation == NAME
        still = lease(other)
        still.__enter__()
    assert other.config._attn_implementation == NAME, "restored while the other lease lasts"
    still.__exit__(None, None, None)
    assert one.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt_oss", "falcon", "bloom", "gptj"])
def test_generate_is_right_during_a_lease_and_the_model_unchanged_after_it(name: str) -> None:
    model = copy.deepcopy(build(name))
    before, state, weights = local(model), state_of(model), copy.deepcopy(model.state_dict())
    with lease(model), CausalTarget(model).open(1, 32) as session:
        session.verify([prompt(12, seed=2)], [DraftTree.chain([1, 2], "test")])
        assert model.config._attn_implementation == NAME
        assert local(model) == before
        session.commit([(0,)])
    assert state_of(model) == state
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    assert local(model) == before


def test_threads_share_one_model() -> None:
    """Two engines in threads of their own and transformers' generate in a third, all at once."""
    model = copy.deepcopy(build("gemma3_text"))
    engines = [Engine(model, drafter="context", budget=n) for n in (4, 9)]

    def write(number: int) -> list[int]:
        if number == 2:
            return local(model, 5)
        text = prompt(12, seed=3 + number)
        return list(engines[number].generate(text, max_new_tokens=24).tokens)

    expected = [write(number) for number in range(3)]
    with ThreadPoolExecutor(3) as threads:
        results = threads.map(lambda number: [write(number) for _ in range(6)], range(3))
    assert list(results) == [[tokens] * 6 for tokens in expected]
    assert model.config._attn_implementation == "sdpa"
