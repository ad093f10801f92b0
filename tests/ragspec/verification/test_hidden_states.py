"""Hidden states and views reach the drafters that need them and are right."""

from __future__ import annotations

import copy
import threading
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from ragspec import Engine, Sampling
from ragspec.drafters.base import DraftContext, Drafter, DraftRequest, DraftSession, Prefill
from ragspec.needs import LAST, Needs
from ragspec.rules.base import Step
from ragspec.sampling.distribution import TokenDistribution
from ragspec.sampling.noise import NoiseStream
from ragspec.trees.draft_tree import DraftTree, Ints
from ragspec.verification.causal import CausalTarget
from ragspec.verification.open import open_static, open_target
from ragspec.verification.reading import Taps
from tests.support import distributions, tiny
from tests.support.calls import noted
from tests.support.fixed import BrokenDrafter, FixedDrafter
from tests.support.identities import target as model
from tests.support.sessions import EMPTY, prefill

PROMPTS = [tiny.prompt(12, seed=1), tiny.prompt(5, seed=2), tiny.prompt(20, seed=3)]
SAMPLING = Sampling(temperature=0.8, top_k=20, repetition_penalty=1.4, seed=[4, 5, 6])
STATES, BEST = Needs(hidden_states=(LAST,)), Needs(top_tokens=3, prompt_top_tokens=True)


class Watcher(Drafter):
    """Drafts a small tree and copies the states that it receives."""

    name = "watcher"

    def __init__(self, needs: Needs = STATES) -> None:
        self.needs = needs
        self.sessions: list[Watching] = []

    def open(self, request: DraftRequest) -> Watching:
        assert request.distribution is not None
        self.sessions.append(Watching(self.needs))
        return self.sessions[-1]


class Watching(DraftSession):
    """steps: with their roots and best tokens. prompts: with their states or best tokens."""

    def __init__(self, needs: Needs) -> None:
        self.needs = needs
        self.root: list[int] = []
        self.prompts: list[tuple[Ints, Any]] = []
        self.known: list[tuple[list[int], Step, torch.Tensor, list[int], torch.Tensor]] = []
        self.steps: list[tuple[list[int], Step, Ints | None]] = []

    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        self.root = list(context.tokens)
        return DraftTree.build([5, 6, 7][:budget], [-1, 0, -1][:budget], "watcher")

    def observe_prefill(self, prefill: Prefill) -> None:
        assert (prefill.hidden is not None) is bool(self.needs.hidden_states)
        assert (prefill.best is not None) is self.needs.prompt_top_tokens
        if prefill.best is not None:
            self.prompts.append((prefill.tokens, prefill.best.host()))
        elif prefill.hidden is not None:
            self.prompts.append((prefill.tokens, prefill.hidden.of((LAST,)).clone()))

    def observe(self, step: Step) -> None:
        self.steps.append((self.root, step, step.top))
        if step.view is None or step.hidden is None:
            return
        nodes = range(-1, len(step.tree))
        chosen = [step.view.token(node) for node in nodes]
        chances = torch.stack([step.view.probabilities(node) for node in nodes])
        self.known.append((self.root, step, step.hidden.of((LAST,)).clone(), chosen, chances))


@torch.no_grad()
def states(text: list[int]) -> Any:
    """Return what the output head reads at every token of the text: [T, H]."""
    out = model()(input_ids=torch.tensor([text]), output_hidden_states=True, use_cache=False)
    return out.hidden_states[-1][0]


def texts(root: list[int], tree: DraftTree) -> list[list[int]]:
    return [[*root, *below] for below in distributions.texts(tree).values()]


def watch(drafter: Any, batch: int = 1, **options: Any) -> Any:
    engine = Engine(model(), drafter=drafter, budget=3)
    sampling = replace(SAMPLING, seed=[4, 5, 6][:batch])
    return engine.generate(PROMPTS[:batch], sampling, max_new_tokens=6, ignore_eos=True, **options)


@pytest.mark.parametrize("batch", [1, 3])
def test_hidden_states_are_those_that_the_output_head_reads(batch: int) -> None:
    watcher = Watcher()
    with pytest.warns(RuntimeWarning):
        results = watch([BrokenDrafter(), watcher], batch)
    for session, prompt in zip(watcher.sessions, PROMPTS, strict=False):
        ((tokens, hidden),) = session.prompts
        assert tokens.tolist() == prompt
        assert hidden.shape == (1, len(prompt), 64)
        torch.testing.assert_close(hidden[0], states(prompt))
        assert session.known
        for root, step, hidden, _, _ in session.known:
            assert hidden.shape == (1, len(step.tree) + 1, 64)
            expected = torch.stack([states(text)[-1] for text in texts(root, step.tree)])
            torch.testing.assert_close(hidden[0], expected)
    selected = [step for result in results for step in result.steps]
    assert all(step.hidden is None and step.view is None for step in selected)


@pytest.mark.parametrize("batch", [1, 3])
def test_a_view_answers_for_every_node_as_plain_decoding_would(batch: int) -> None:
    """Also with penalties, although tokens were committed since the verdict."""
    watcher = Watcher()
    watch(watcher, batch)
    plain = Engine(model(), drafter=None)
    for number, session in enumerate(watcher.sessions):
        prompt = PROMPTS[number]
        for root, step, _, chosen, chances in session.known:
            torch.testing.assert_close(chances.sum(-1), torch.ones(len(chances)).double())
            assert all(chances[i, token] > 0 for i, token in enumerate(chosen))
            for text, token in zip(texts(root, step.tree), chosen, strict=True):
                assert token == token_after(plain, prompt, text, seed=4 + number)


def token_after(plain: Engine, prompt: list[int], text: list[int], seed: int) -> int:
    """Return the target's choice after the text, by its distribution and the noise of its index."""
    distribution = TokenDistribution(SAMPLING, NoiseStream(seed), len(prompt))
    with torch.no_grad():
        logits = plain.model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1:]
    scores = distribution.process(logits, text, [[]])
    return int(distribution.select(scores, [len(text) - len(prompt)]))


@pytest.mark.parametrize("needs", [STATES, BEST])
def test_all_samples_of_a_prompt_receive_its_states(needs: Needs) -> None:
    watcher = Watcher(needs)
    engine = Engine(model(), drafter=watcher, budget=3)
    engine.generate(PROMPTS[:2], Sampling(temperature=1.0, n=2, seed=1), max_new_tokens=3)
    received = [session.prompts[0] for session in watcher.sessions]
    assert [tokens.tolist() for tokens, _ in received] == [p for p in PROMPTS[:2] for _ in range(2)]
    assert (received[0][1] == received[1][1]).all()


def test_custom_processors_run_once_per_token() -> None:
    watcher, calls = Watcher(), list[int]()
    remember = noted(lambda ids, scores: scores, calls, lambda ids, scores: ids.shape[1])
    result = watch(watcher, logits_processor=[remember])[0]
    assert all(step.view is None for _, step, _ in watcher.sessions[0].steps)
    assert len(calls) == len(result.tokens)


def test_states_are_kept_only_for_drafters_that_need_them(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse = Mock(side_effect=AssertionError("no drafter needs this"))
    monkeypatch.setattr("ragspec.verification.tree_session.TreeSession.keep_hidden", refuse)
    monkeypatch.setattr("ragspec.verification.tree_session.TreeSession.read_prompts", refuse)
    monkeypatch.setattr("ragspec.sampling.top_tokens.best_tokens", refuse)
    engine = Engine(model(), drafter=[FixedDrafter([1]), "context"], budget=4)
    engine.generate(PROMPTS[0], max_new_tokens=4, ignore_eos=True)
    assert engine.needs == Needs(texts=True)


def test_taps_leave_no_hooks_behind_after_an_error() -> None:
    head = torch.nn.Linear(2, 2)
    with pytest.raises(RuntimeError), Taps({LAST: head}):
        assert len(head._forward_pre_hooks) == 1
        raise RuntimeError("on the way")
    assert not head._forward_pre_hooks


@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize("runtime", ["torch", "onnx", "static"])
def test_inputs_of_layers_are_those_of_transformers(
    runtime: str, every: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of prompts in chunks and of trees, whichever way forwards run; layer 0 reads embeddings."""
    monkeypatch.setattr("ragspec.verification.onnx.form.LEAST_WEIGHTS", 0)
    instance = copy.deepcopy(tiny.model("llama", num_hidden_layers=4))
    target = open_target(instance, runtime="torch" if runtime == "static" else runtime)
    if runtime == "static":
        target = open_static(target, "compile", backend="eager")
        assert target.static == "compile"
    assert (target.runtime == "onnx") is (runtime == "onnx")
    prompt, taps = tiny.prompt(20), (0, 1, 2, 3, LAST) if every else (0, 2, LAST)
    tree = DraftTree.build([5, 6, 7], [-1, 0, -1], "test")
    with target.open(1, 64) as session, torch.no_grad():
        session.keep_hidden((2,))
        session.keep_hidden(taps)
        session.read_prompts([prompt[:9]], 0)
        session.commit([()])
        prefill(session, prompt[9:])
        session.verify([[9, 3]], [tree])
        result = session.hidden[0]
    texts = [[*prompt, 9, 3, *path] for path in ([], [5], [5, 6], [7])]
    for place, text in enumerate(texts):
        ids = torch.tensor([text])
        out = instance(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
        expected = torch.cat([out[tap][0, -1] for tap in taps])
        torch.testing.assert_close(result.of(taps)[0, place], expected, atol=1e-4, rtol=1e-3)
    assert not instance.model.layers[2]._forward_pre_hooks


def test_other_threads_do_not_disturb_a_tap() -> None:
    head = torch.nn.Linear(3, 2)
    inputs = Taps({LAST: head})
    with inputs:
        head(torch.ones(1, 1, 3))
        other = threading.Thread(target=lambda: head(torch.zeros(1, 1, 3)))
        other.start()
        other.join()
    assert inputs.taken()[LAST].tolist() == [[[1.0, 1.0, 1.0]]]
    head(torch.ones(1, 1, 3))
    assert not inputs.taken()
    with inputs:
        head(torch.ones(1, 1, 3))
    with inputs:
        pass
    assert not inputs.taken()  # not those of the block before
    inputs.__enter__()
    head.register_forward_pre_hook(lambda *_: inputs.__exit__(), prepend=True)
    head(torch.ones(1, 1, 3))  # as if the other thread left its block meanwhile


def test_models_that_give_all_logits_report_of_the_right_places() -> None:
    target = CausalTarget(model())
    target.keeps_logits = False
    with target.open(2, 64) as session:
        session.keep_hidden()
        trees = [DraftTree.build([5, 6, 7], [-1, 0, -1], "t"), DraftTree.chain([8], "t")]
        session.verify(PROMPTS[:2], trees)
        for row, (prompt, tree) in enumerate(zip(PROMPTS, trees, strict=False)):
            expected = torch.stack([states(text)[-1] for text in texts(prompt, tree)])
            hidden = session.hidden[row].of((LAST,))[0, : len(tree) + 1]
            torch.testing.assert_close(hidden, expected)


def test_the_head_computes_the_same_logits_from_kept_states() -> None:
    target = CausalTarget(model())
    with target.open(1, 64) as session:
        session.keep_hidden()
        logits = session.verify([PROMPTS[0]], [EMPTY])
        again = target.head_logits(session.hidden[0].of((LAST,)), torch.tensor([[11]]))
    torch.testing.assert_close(again[0, -1:], logits[0])
    tokens = torch.tensor([PROMPTS[0]])
    assert torch.equal(target.embed(tokens), model().model.embed_tokens(tokens))


@pytest.mark.parametrize("keeps_logits", [True, False])
def test_states_of_a_whole_text_need_no_logits_of_it(keeps_logits: bool) -> None:
    target, text, widths = CausalTarget(model()), PROMPTS[2], list[int]()
    target.keeps_logits = keeps_logits
    count = target.output_head.register_forward_hook(
        lambda module, inputs, output: widths.append(output.shape[1])
    )
    with target.open(1, 64) as session:
        session.keep_hidden()
        parts = []
        for part in (text[:12], text[12:]):
            session.read_prompts([part], 0)
            parts.append(session.hidden[0].of((LAST,)))
            session.commit([()])
    count.remove()
    torch.testing.assert_close(torch.cat(parts, 1)[0], states(text))
    if keeps_logits:
        assert set(widths) == {1}
    assert not target.output_head._forward_pre_hooks


def test_a_prompt_whose_layers_are_read_has_logits_of_its_last_token_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target, prompt = CausalTarget(tiny.model()), tiny.prompt(9)
    forward = Mock(wraps=target.forward)
    monkeypatch.setattr(target, "forward", forward)
    with target.open(1, 16) as session:
        session.keep_hidden((1,))
        logits, _ = session.read_prompts([prompt], 0)
    assert [call.args[2] for call in forward.mock_calls] == [1]
    assert len(logits[0]) == 1 and len(session.hidden[0]) == len(prompt)
