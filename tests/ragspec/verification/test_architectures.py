"""Every architecture: the probe, logits of trees, and tokens that never depend on drafts."""

import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

import ragspec.verification.kernels as kernels
import ragspec.verification.tree_attention as attention_module
import ragspec.verification.tree_session as session_module
from ragspec import Engine, Sampling
from ragspec.trees.draft_tree import DraftTree
from ragspec.verification.batch import TreeView
from ragspec.verification.causal import CausalTarget
from ragspec.verification.prefix_cache import PrefixCache
from ragspec.verification.probe import probe, probe_target
from tests.ragspec.verification.test_kernels import Largest
from tests.support import tiny
from tests.support.architectures import ARCHITECTURES, HEAD, WINDOW, build, make
from tests.support.calls import noted
from tests.support.noisy import NoisyTrees
from tests.support.sessions import EMPTY, prefill
from tests.support.tiny import prompt

NEW = 20
BUDGET = 9
CLOSELY = ("llama", "gemma3_text", "qwen3_5_text")  # full attention, windows, a recurrent hybrid
SETTINGS = {
    "greedy": Sampling(),
    "sampled": Sampling(temperature=0.8, seed=5),
    "penalties": Sampling(
        temperature=0.8, seed=5, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.3
    ),
}


def prompts(rows: int) -> list[list[int]]:
    return [prompt(n, seed=n) for n in (13, 19, 6, 10)[:rows]]


def compare(model: Any, name: str, rows: int) -> tuple[list[list[int]], float]:
    """Assert that drafts change nothing; return the tokens and accepted nodes per step."""
    texts, sampling = prompts(rows), SETTINGS[name]
    plain = Engine(model, drafter=None).generate(texts, sampling, max_new_tokens=NEW)
    truths = {tuple(text): out.tokens for text, out in zip(texts, plain, strict=True)}
    engine = Engine(model, drafter=NoisyTrees(truths), budget=BUDGET)
    drafted = engine.generate(texts, sampling, max_new_tokens=NEW)
    assert [out.tokens for out in drafted] == [out.tokens for out in plain]
    assert {out.label for out in drafted} == {"exact"}
    assert not any(out.report.faults for out in drafted)
    steps = sum(out.report.steps for out in drafted)
    accepted = sum(out.report.accepted for out in drafted)
    assert 0 < accepted < sum(out.report.drafted for out in drafted)
    return [out.tokens for out in plain], accepted / steps


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_probe_returns_the_known_mode(name: str) -> None:
    expected = ARCHITECTURES[name].mode
    verdict = probe(CausalTarget(build(name)))
    assert verdict.mode == expected, verdict.reason
    assert verdict.error < 5e-5, "the verified mode is this close"
    if expected != "tree":
        assert re.search("tree attention goes wrong|scaled by slot", verdict.reason)


@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_sequences_that_share_slots_get_the_logits_of_each_alone(
    name: str, kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if ARCHITECTURES[name].mode != "tree":
        pytest.skip("its session shares nothing")
    if kernel:
        monkeypatch.setattr(attention_module, "LARGE_MASK", 1)
    else:
        monkeypatch.setattr(kernels, "_KERNEL", "_no_such_kernel")
    verifier = probe_target(CausalTarget(build(name)))
    begun = prompts(2)[1]
    texts = [[*begun, 3], [*begun, 5, 6, 7], [*begun[:11], 8], [*begun, 5, 6, 7, 1], prompts(1)[0]]
    trees = [
        DraftTree.empty(),
        DraftTree.chain([1, 2, 3], "test"),
        DraftTree.build([5, 6, 7, 8], [-1, -1, 1, 0], "test"),
        DraftTree.build([9, 5, 4], [-1, 0, 0], "test"),
        DraftTree.build([8, 5], [-1, -1], "test"),
    ]
    with verifier.open(prefix_cache=PrefixCache()) as session:
        rows = []
        for text in texts:
            row, cached = session.join(text)
            session.select_rows([row])
            prefill(session, text[cached:])
            rows.append(row)
        rows, texts = [*rows, session.fork(rows[1])], [*texts, list(texts[1])]
        trees.append(trees[2])
        while rows:
            session.select_rows(rows)
            logits = session.verify([[2]] * len(rows), trees)
            for text, tree, got in zip(texts, trees, logits, strict=True):
                with verifier.open(1, 64) as alone:
                    expected = alone.verify([[*text, 2]], [tree])[0]
                torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
            session.commit([(0,) if len(tree) else () for tree in trees])
            for text, tree in zip(texts, trees, strict=True):
                text += [2, *tree.tokens[:1].tolist()]
            session.leave(rows.pop(0))
            texts, trees = texts[1:], trees[1:]


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss", "deepseek_v3", "bloom"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_probe_is_right_in_half_precision(name: str, dtype: torch.dtype) -> None:
    verdict = probe(CausalTarget(build(name, dtype)))
    assert verdict.mode == ARCHITECTURES[name].mode, verdict


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_tokens_do_not_depend_on_drafts(name: str) -> None:
    model = build(name)
    greedy, _ = compare(model, "greedy", 1)
    compare(model, "sampled", 1)
    assert tiny.greedy(model, prompts(1)[0], NEW) == greedy[0], "other than transformers' own"


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("architecture", CLOSELY)
def test_tokens_of_a_batch_do_not_depend_on_drafts(architecture: str, name: str) -> None:
    (together, several), (alone, single) = (
        compare(build(architecture), name, rows) for rows in (4, 1)
    )
    assert min(several, single) > 0.5, "too few nodes were accepted for a meaningful test"
    assert together[0] == alone[0], "a row depends on its neighbours"


SOME = {"use_sliding_window": True, "max_window_layers": 1}  # the first layer sees everything
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {}),
    "qwen3 with windows": ("qwen3", HEAD | WINDOW | SOME),
    "mistral": ("mistral", {}),
    "gemma3": ("gemma3_text", {}),
    "gemma2": ("gemma2", {}),  # scores with a cap
    "gpt_oss": ("gpt_oss", {}),  # sinks
    "llama4": ("llama4_text", {}),  # chunks
}
# These compute norms and rotations (llama4) or softmax (gemma2) in float32 in any dtype.
FLOAT32 = {"gemma2", "llama4"}
WINDOWED = set(MODELS) - {"llama", "qwen3"}
# Tokens of each row's first text, then of the one behind it.
LENGTHS = {
    "shorter": ([5], [2]),
    "window - 1": ([7], [1]),
    "window": ([8], [7]),
    "window + 1": ([9], [8]),
    "blocks": ([12], [24]),
    "longer": ([31], [33]),
    "level": ([12, 12], [17, 17]),
    "ragged": ([30, 5, 12], [9, 25, 20]),
    "far apart": ([40, 3], [4, 40]),
}


@cache
def windowed_prompts_build(name: str) -> Any:
    """Return a tiny model in float64, routed experts too: run one by one they have it."""
    kind, more = MODELS[name]
    experts = "eager" if ARCHITECTURES[kind].experts else None
    return make(kind, experts=experts, **ARCHITECTURES[kind].settings | more)


def worst(name: str, lengths: str) -> float:
    """Return how far the logits of the ends of both texts and of a tree behind them are off."""
    model = windowed_prompts_build(name)
    first, second = (
        [prompt(n, seed=10 * i + row) for row, n in enumerate(each)]
        for i, each in enumerate(LENGTHS[lengths])
    )
    rows = len(first)
    tree = DraftTree.build([5, 6, 7], [-1, -1, 1], "test")
    with CausalTarget(model).open(rows, 8) as session:
        results = [prefill(session, *first), prefill(session, *second)]
        results.append([each[3:] for each in session.verify([[9]] * rows, [tree] * rows)])
    off = 0.0
    for row, (head, tail) in enumerate(zip(first, second, strict=True)):
        expected = tiny.logits(model, [*head, *tail, 9, 6, 7])
        for part, at in zip(results, (len(head), len(head) + len(tail), 0), strict=True):
            off = max(off, float((part[row][0] - expected[at - 1]).abs().max()))
    return off


@pytest.fixture
def all_masks_are_large(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let no chain be too short for a narrow mask; return the slots that such masks left out."""
    cuts: list[int] = []
    counted = noted(attention_module._first_visible, cuts)
    monkeypatch.setattr(attention_module, "LARGE_MASK", 1)
    monkeypatch.setattr(attention_module, "_first_visible", counted)
    monkeypatch.setattr(session_module, "LONG", 1)
    return cuts


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("name", MODELS)
def test_logits_agree_at_borders(name: str, lengths: str, all_masks_are_large: list[int]) -> None:
    assert worst(name, lengths) < (1e-5 if name in FLOAT32 else 1e-12)
    crosses = name in WINDOWED and lengths in ("blocks", "longer", "level")
    assert not crosses or any(all_masks_are_large), "no slot was left out"


def test_a_rule_that_reaches_beyond_its_window_gets_a_full_mask() -> None:
    places = torch.arange(20)[None]
    view = TreeView(0, places, places, None)

    def rule(row: Any, head: Any, query: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
        return (slot <= query) & ((slot > query - 8) | (slot == 0))

    first = attention_module._first_visible
    tail = replace(view, positions=places[:, 16:])
    assert first(tail, rule, 8, 1 << 20) == 0
    assert first(tail, lambda b, h, q, s: (s <= q) & (s > q - 8), 8, 1 << 20) == 9


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "gpt_oss", "llama4"])
def test_no_mask_grows_with_the_prompt(name: str) -> None:
    """With the usual sizes; a mask of one byte an entry would exceed the bound."""
    n, before = 500, 6000  # a chunk, as prompts are read
    with CausalTarget(windowed_prompts_build(name)).open(1, n + before) as session:
        prefill(session, prompt(before))
        with Largest() as largest:
            session.verify([prompt(n, seed=1)], [EMPTY])
    assert largest.bytes < n * (n + before)
