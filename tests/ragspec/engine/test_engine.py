import copy
import pickle
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from ragspec import Engine, Generation, Sampling
from ragspec.errors import InputError, ModelError, RuleError, SamplingError, UnsupportedModelError
from ragspec.trees.draft_tree import DraftTree
from ragspec.verification.causal import CausalTarget
from ragspec.verification.open import open_target
from ragspec.verification.probe import probe
from tests.support import tiny
from tests.support.calls import StatefulProcessor
from tests.support.fixed import FixedDrafter, FixedSession
from tests.support.noisy import NoisyTrees

PROMPTS = [[5, 6, 7, 8, 9, 5, 6, 7], [40, 41, 3], [9] * 12, [1, 2, 3, 4, 5]]
NEW = 30


def flat(results: Any) -> list[Generation]:
    return [text for each in results for text in (each if isinstance(each, list) else [each])]


def speculative(model: Any, results: Any, static: str) -> Engine:
    """Return an engine that drafts from the first sample of each prompt."""
    texts = [text for text in flat(results) if not text.sample]
    drafter = NoisyTrees({tuple(text.prompt_tokens): text.tokens for text in texts})
    return Engine(open_target(model, static), tiny.tokenizer(), drafter=drafter, budget=12)


SETTINGS = {
    "greedy": Sampling(),
    "sampled": Sampling(temperature=0.8, seed=3),
    "top-k": Sampling(temperature=1.2, top_k=9, seed=3),
    "top-p": Sampling(temperature=0.9, top_p=0.7, seed=[1, 2, 3, 4]),
    "min-p": Sampling(temperature=1.0, min_p=0.2, seed=3),
    "penalties": Sampling(
        temperature=0.7, repetition_penalty=1.4, frequency_penalty=0.5, presence_penalty=0.3, seed=1
    ),
    "no-repeat": Sampling(no_repeat_ngram_size=2, repetition_penalty=1.2),
    "bias": Sampling(temperature=0.8, logit_bias={7: 4.0}, bad_words_ids=[[8]], seed=5),
    "ends": Sampling(min_new_tokens=6, temperature=0.9, seed=2),
    "several": Sampling(temperature=0.9, n=2, seed=4),
}
STATIC = pytest.mark.parametrize("static", ["off", "eager"])


@STATIC
@pytest.mark.parametrize("name", SETTINGS)
def test_speculation_changes_no_token(name: str, static: str, model: Any, plain: Engine) -> None:
    sampling = SETTINGS[name]
    expected = flat(plain.generate(PROMPTS, sampling, max_new_tokens=NEW, logprobs=2))
    engine = speculative(model, expected, static)
    for logprobs in (2, None):  # the second time over the buffers of the first
        result = flat(engine.generate(PROMPTS, sampling, max_new_tokens=NEW, logprobs=logprobs))
        assert [g.tokens for g in result] == [g.tokens for g in expected]
        for ours, theirs in zip(result, expected, strict=True) if logprobs else ():
            for mine, other in zip(ours.logprobs or (), theirs.logprobs or (), strict=True):
                assert mine.token == other.token and len(mine.top) == 2
                assert mine.logprob == pytest.approx(other.logprob, abs=1e-9)
    assert {g.report.static for g in result} == {static}
    accepted = sum(g.report.accepted for g in result)
    drafted = sum(g.report.drafted for g in result)
    assert 0 < accepted < drafted
    assert sum(g.report.forwards for g in result) < sum(g.report.forwards for g in expected)


@pytest.mark.parametrize("new", [1, 2, 7, 30])
def test_a_text_has_max_new_tokens_tokens_whatever_is_drafted(
    new: int, model: Any, plain: Engine
) -> None:
    whole = plain.generate(PROMPTS[1], max_new_tokens=30, ignore_eos=True).tokens
    engine = Engine(model, drafter=NoisyTrees({tuple(PROMPTS[1]): whole}, spoiled=0.0), budget=27)
    result = engine.generate(PROMPTS[1], max_new_tokens=new, ignore_eos=True)
    assert result.tokens == whole[:new] and len(whole) == 30


def test_a_stateful_processor_gets_the_calls_of_plain_decoding(model: Any, plain: Engine) -> None:
    first, second = StatefulProcessor(), StatefulProcessor()
    expected = plain.generate(PROMPTS[0], max_new_tokens=NEW, logits_processor=[first])
    engine = Engine(model, drafter=NoisyTrees({tuple(PROMPTS[0]): expected.tokens}), budget=12)
    result = engine.generate(PROMPTS[0], max_new_tokens=NEW, logits_processor=[second])
    assert result.tokens == expected.tokens
    assert second.calls == first.calls
    assert result.report.accepted > 0


class _Rooted(CausalTarget):
    """A target with one id for input only, which every prompt must begin with."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.input_size = self.vocab_size + 1

    def check_prompt(self, tokens: Sequence[int]) -> None:
        if tokens[0] != self.vocab_size:
            raise InputError("got no root")

    def forward(self, tokens: torch.Tensor, *rest: Any) -> torch.Tensor:
        return super().forward(tokens % self.vocab_size, *rest)


def test_an_engine_uses_a_target_unchanged(model: Any, plain: Engine) -> None:
    target = _Rooted(model)
    engine = Engine(target, None, budget=8)
    assert engine.target is target
    assert engine.model is model
    inputs = [[tiny.VOCAB, *prompt] for prompt in PROMPTS]
    rooted = [[0, *prompt] for prompt in PROMPTS]
    expected = plain.generate(rooted, max_new_tokens=NEW, ignore_eos=True)
    result = engine.generate(inputs, max_new_tokens=NEW, ignore_eos=True)
    assert [each.tokens for each in result] == [each.tokens for each in expected]
    with pytest.raises(InputError, match="no root"):
        engine.generate(PROMPTS[0])
    with pytest.raises(InputError, match=f"expected 0 to {tiny.VOCAB}"):
        engine.generate([tiny.VOCAB + 1])


@pytest.mark.parametrize("place", [slice(0, 1), slice(9, 9)])
def test_a_drafter_that_changes_its_context_is_a_fault(
    place: slice, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def propose(session: Any, context: Any, budget: int) -> Any:
        context.tokens[place] = [3]
        return DraftTree.empty()

    monkeypatch.setattr(FixedSession, "propose", propose)
    engine = Engine(model, drafter=FixedDrafter([]), budget=4)
    with pytest.raises(RuleError, match=r"the drafter changed .* Copy `context.tokens`"):
        engine.generate(PROMPTS[0], max_new_tokens=6)


@STATIC
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, seed=1), Sampling(0.8, top_p=0.9)])
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_non_finite_logits_are_an_error(static: str, sampling: Sampling, number: float) -> None:
    broken = copy.deepcopy(tiny.model("llama"))
    with torch.no_grad():
        broken.get_input_embeddings().weight[9] = number
    engine = Engine(open_target(broken, static), drafter="context", budget=4)
    with pytest.raises(ModelError, match="logits are not finite numbers at generated token 1;"):
        engine.generate(PROMPTS[2], sampling, max_new_tokens=6)
    bias = dict.fromkeys(range(tiny.VOCAB), float("-inf"))
    with pytest.raises(SamplingError, match="left no token at generated token 1;"):
        engine.generate(PROMPTS[1], replace(sampling, logit_bias=bias), max_new_tokens=6)
    for value, match in (
        (number * 0.0, "returned nan after 3 tokens"),
        (float("inf"), "returned inf after 3 tokens"),
        (None, "returned NoneType"),
    ):
        returns: Any = [lambda ids, scores, v=value: None if v is None else scores * v]
        with pytest.raises(InputError, match=match):
            engine.generate(PROMPTS[1], sampling, max_new_tokens=6, logits_processor=returns)


@STATIC
def test_texts_and_labels_follow_a_model_that_is_cast(static: str) -> None:
    target = open_target(copy.deepcopy(tiny.model("llama")), static)
    engine = Engine(target, drafter="context", budget=4)

    def result() -> tuple[list[int], str, str]:
        text = engine.generate(PROMPTS[0], Sampling(0.8, seed=3), max_new_tokens=NEW)
        return text.tokens, text.label, text.report.static

    expected = result()
    assert expected[1:] == ("exact", static)
    with torch.autocast("cpu", torch.bfloat16), pytest.warns(RuntimeWarning, match="autocast"):
        assert result() == expected
    engine.model.to(torch.bfloat16)
    off = "off" if static == "off" else "off: the model was cast to torch.bfloat16"
    _, label, steps = result()
    assert label == "exact up to rounding" and steps.startswith(off)
    plain = Engine(target, None, None)
    for resumed, label in (([], "exact"), ([5, 6], "exact up to rounding")):
        assert plain.generate(PROMPTS[0], resume_from=resumed, max_new_tokens=4).label == label
    engine.model.to(torch.float64)
    assert result()[1] == "exact"
    engine.model.to("meta", torch.float32)
    assert engine.target.device.type == "meta"
    off = "off" if static == "off" else "off: the model was moved to meta after it was opened"
    assert engine.target.static == off


class OneScale(torch.nn.Linear):
    """Rounds its inputs with one scale for all tokens, as some quantisers do."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        scale = inputs.abs().max() / 7
        return super().forward((inputs / scale).round() * scale)


def test_a_model_quantised_after_opening_is_probed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    probes = Mock(wraps=probe)
    monkeypatch.setattr("ragspec.verification.open.probe", probes)
    engine = Engine(copy.deepcopy(tiny.model("llama")), drafter="context", budget=4)
    expected, first = engine.generate(PROMPTS[0], max_new_tokens=6).tokens, probes.call_count
    layers = [layer.mlp.down_proj for layer in engine.model.model.layers]
    for layer in layers:
        layer.__class__ = OneScale
    with pytest.raises(UnsupportedModelError, match=r"after it was opened, .*later tokens of the"):
        engine.generate(PROMPTS[0], max_new_tokens=6)
    for layer in layers:
        layer.__class__ = torch.nn.Linear
    assert engine.generate(PROMPTS[0], max_new_tokens=6).tokens == expected
    assert probes.call_count == first + 1
    engine.model.to(torch.bfloat16)
    for _ in range(2):
        engine.generate(PROMPTS[0], max_new_tokens=6)
    assert probes.call_count == first + 2 and engine.target.packs


def test_copies_of_an_engine_have_separate_callbacks() -> None:
    plain = Engine(tiny.model("llama", seed=7), None, None)  # a model without hooks of other tests
    expected = plain.generate(PROMPTS[0], max_new_tokens=5).tokens
    copies = [copy.copy(plain), copy.deepcopy(plain), pickle.loads(pickle.dumps(plain))]
    assert [each.model is plain.model for each in copies] == [True, False, False]
    message: list[Generation] = []
    for each in copies:
        end = each.on_finish(message.append)
        assert each.generate(PROMPTS[0], max_new_tokens=5).tokens == expected
        plain.generate(PROMPTS[0], max_new_tokens=5)
        end()
    assert len(message) == len(copies)


def test_a_rule_that_cannot_judge_the_drafter_is_refused(model: Any) -> None:
    names: list[Any] = ["context", "model", "fused", "auto", None, ["context", "model"]]
    for name in names:  # as the caller wrote it
        listed = ", ".join(name) if isinstance(name, list) else name or "model"
        with pytest.raises(RuleError, match=rf"\(drafter '{listed}'\).* rule='walk'"):
            Engine(model, drafter=name, draft_model=model, rule="rejection")


def test_wrong_arguments_are_named_before_a_model_is_loaded(model: Any) -> None:
    with pytest.raises(InputError, match="unknown argument 'foo'"):
        Engine.from_pretrained("nosuch", foo=1)
    with pytest.raises(InputError, match="tokenizer is 'x'; expected an object"):
        Engine(model, "x")


def test_on_finish_reports_texts_until_it_is_unsubscribed(plain: Engine) -> None:
    message: list[Generation] = []
    twice = [plain.on_finish(message.append) for _ in range(2)]
    result = plain.generate(PROMPTS[:2], Sampling(temperature=0.8, n=2, seed=1), max_new_tokens=5)
    selection = [(g.prompt_tokens, g.tokens) for texts in result for g in texts for _ in twice]
    assert [(g.prompt_tokens, g.tokens) for g in message] == selection
    for _ in range(2):  # ending it again does nothing
        twice[0]()
    message.clear()
    stream = plain.stream("ab cd", max_new_tokens=5)
    assert "".join(stream) == message[0].text
    assert len(message) == 1
    cancelled = plain.stream("ab cd", max_new_tokens=50)
    next(cancelled)
    cancelled.close()
    assert len(message) == 1
    twice[1]()
    plain.generate(PROMPTS[0], max_new_tokens=5)
    assert len(message) == 1


def test_ranks_of_a_model_plan_without_clocks(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "_tp_size", 4, raising=False)
    assert model.tp_size == 4, "what transformers calls it"
    with pytest.raises(InputError, match=r"a model cut among 4 ranks; .* a number of draft nodes"):
        Engine(model, tiny.tokenizer(), drafter="context")
    assert Engine(model, drafter="context", budget=8).generate([[1, 2, 3]], max_new_tokens=2)
    assert Engine(model, drafter=None).generate([[1, 2, 3]], max_new_tokens=2)
