"""A model is leased for single forwards: between two steps it is unchanged, in every mode."""

import copy
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from ragspec import Engine, Sampling
from ragspec.retrievers.methods.token_recycling import NeighbourDrafter, NeighbourTable
from ragspec.verification import cpu_weights as packing
from ragspec.verification.cpu_weights import Packed
from ragspec.verification.sequence_cache import SequenceCache
from ragspec.verification.tree_attention import NAME, lease
from ragspec.verification.tree_session import TreeSession
from tests.support import tiny
from tests.support.architectures import build

IDS = torch.tensor([[5, 6, 7, 8, 9, 5]])
TEXT = "ab ab ab ab"
NEW = 24


def eager(name: str = "llama") -> Any:
    """Return a fresh model whose attention returns its weights."""
    model = copy.deepcopy(tiny.model(name))
    model.set_attn_implementation("eager")
    return model


def is_unchanged(model: Any) -> bool:
    plain = model.config._attn_implementation == "eager"
    lent = any("forward" in module.__dict__ for module in model.modules())
    hooked = any(module._forward_pre_hooks for module in model.modules())
    return plain and not lent and not hooked


@pytest.mark.parametrize("drafter", ["context", "recycling", "model"])
def test_an_open_stream_leaves_the_model_unchanged(drafter: str) -> None:
    model = eager()
    chosen: dict[str, Any] = {"drafter": drafter}
    if drafter == "model":
        chosen = {"drafter": None, "draft_model": model}
    engine = Engine(model, tiny.tokenizer(), budget=4, **chosen)
    whole = engine.generate(TEXT, max_new_tokens=NEW)
    before = model(IDS, output_attentions=True)
    stream = engine.stream(TEXT, max_new_tokens=NEW)
    chunks = [next(stream), next(stream)]
    assert is_unchanged(model)
    now = model(IDS, output_attentions=True)
    assert len(now.attentions) == 2
    for mine, theirs in zip(now.attentions, before.attentions, strict=True):
        assert torch.equal(mine, theirs)
    twin = copy.deepcopy(model)
    chunks.extend(stream)
    assert "".join(chunks) == whole.text
    assert is_unchanged(twin)
    assert torch.equal(twin(IDS).logits, before.logits)
    assert is_unchanged(model)


def test_callbacks_and_processors_get_the_unchanged_model() -> None:
    model, result = eager(), []

    def look(*inputs: Any) -> Any:
        result.append(is_unchanged(model))
        return inputs[-1]

    looks: Any = {"logits_processor": [look], "on_step": look}
    looks["stopping_criteria"] = [lambda ids, scores: look(False)]
    Engine(model, drafter="context", budget=4).generate(
        [5, 6, 5, 6, 5, 6], max_new_tokens=6, ignore_eos=True, **looks
    )
    assert len(result) > 12
    assert all(result)


def test_weights_are_checked_once_a_text_not_every_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, available = Engine(tiny.model("llama"), drafter=None), Mock(return_value=True)
    monkeypatch.setattr(packing, "available", available)
    result = engine.generate(IDS, max_new_tokens=NEW, ignore_eos=True)
    assert (available.call_count, result.report.forwards) == (1, NEW - 1)


def test_packs_may_be_released_in_any_order() -> None:
    layers = [torch.nn.Linear(3, 3) for _ in range(3)]
    first, second = Packed(layers[:2]), Packed(layers[1:])
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert [packing._is_lent(each.forward) for each in layers] == [False, True, True]
    first.__enter__()
    second.__exit__(None, None, None)
    assert [packing._is_lent(each.forward) for each in layers] == [True, True, False]
    first.__exit__(None, None, None)
    assert not any("forward" in each.__dict__ for each in layers)


ENDS = [("llama", "sdpa"), ("llama", "eager"), ("gemma2", "eager"), ("gpt_oss", "eager")]
ENDS.append(("gemma3_text", "sdpa"))  # whose masks are of another dtype


@pytest.mark.parametrize("leased_first", [True, False])
@pytest.mark.parametrize("name,current", ENDS)
def test_a_lease_may_begin_and_end_inside_the_forward_of_another(
    leased_first: bool, name: str, current: str
) -> None:
    """As if by two threads, one of them between its mask and its attention."""
    model = copy.deepcopy(build(name))
    model.set_attn_implementation(current)
    text = torch.tensor([[*range(3, 60)]])
    with torch.no_grad():
        expected = model(text).logits
        borrowed = lease(model)

        def turn(*inputs: Any) -> None:
            if model.config._attn_implementation == NAME:
                borrowed.__exit__(None, None, None)
            else:
                borrowed.__enter__()

        layers = [module for key, module in model.named_modules() if key.endswith("self_attn")]
        hook = layers[0].register_forward_pre_hook(turn)
        if leased_first:
            borrowed.__enter__()
        result = model(text).logits
        hook.remove()
    assert (model.config._attn_implementation == NAME) is not leased_first
    if not leased_first:
        borrowed.__exit__(None, None, None)
    torch.testing.assert_close(result, expected, atol=1e-4, rtol=1e-4)


def engine_of(kind: str) -> Engine:
    if kind == "model":
        return Engine(tiny.model("llama"), tiny.tokenizer(), None, tiny.model("llama", seed=1))
    drafter = NeighbourDrafter(NeighbourTable()) if kind == "recycling for all texts" else kind
    return Engine(tiny.model("llama"), tiny.tokenizer(), drafter, budget=6)


@pytest.mark.filterwarnings("error")  # a drafter that fails is left out with a warning
@pytest.mark.parametrize(
    "kind", ["context", "recycling", "recycling for all texts", "model", "auto"]
)
@pytest.mark.parametrize("first", [True, False])
def test_a_stream_goes_on_in_another_mode_than_it_began(kind: str, first: bool) -> None:
    sampling = Sampling(temperature=0.7, repetition_penalty=1.1, seed=3)
    plain = Engine(tiny.model("llama"), tiny.tokenizer(), None)
    whole = plain.generate(TEXT, sampling, max_new_tokens=NEW).text
    with torch.inference_mode(first):
        engine = engine_of(kind)
        stream = engine.stream(TEXT, sampling, max_new_tokens=NEW)
        chunks = [next(stream), next(stream)]
        assert torch.is_inference_mode_enabled() is first
    with torch.inference_mode(not first):
        chunks += [next(stream), next(stream)]
    with torch.enable_grad():
        chunks.append(next(stream))
        assert torch.is_grad_enabled()
        chunks += stream
        assert torch.is_grad_enabled()
    assert "".join(chunks) == whole
    with torch.inference_mode(not first):
        assert engine.generate(TEXT, sampling, max_new_tokens=NEW).text == whole


def test_a_cache_grown_in_one_mode_is_written_in_another(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Engine(tiny.model("llama"), drafter=None).generate(IDS, max_new_tokens=NEW)
    monkeypatch.setattr(TreeSession, "_empty_cache", lambda session, slots: SequenceCache(1))
    engine = Engine(tiny.model("llama"), tiny.tokenizer(), drafter=None)
    stream = engine.stream(IDS, max_new_tokens=NEW)
    for _ in stream:
        with torch.inference_mode(len(stream.result.tokens) % 4 < 2):
            next(stream, None)
    assert stream.result.tokens == whole.tokens
