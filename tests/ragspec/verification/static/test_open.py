"""Which models run steps of fixed shape, and that all give the same texts."""

import copy
import functools
from typing import Any

import pytest
import torch

from ragspec import Engine, Sampling
from ragspec.errors import InputError, PromptTooLongError
from ragspec.models.checks import MODES
from ragspec.verification.causal import CausalTarget
from ragspec.verification.open import open_static, open_target
from tests.ragspec.engine.test_engine import PROMPTS
from tests.support import architectures, tiny
from tests.support.noisy import NoisyTrees


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_texts_fill_the_context_and_no_more(architecture: str) -> None:
    """Padded rows and queries of a step have positions within the model's context."""
    limit = 64
    model = tiny.model(architecture, dtype=torch.float64, max_position_embeddings=limit)
    prompts = [tiny.prompt(limit - 8, seed=1), tiny.prompt(limit - 20, seed=2), [5] * 30]

    def write(take: Any) -> list[Any]:
        """Return what is written up to the limit by `generate` or `submit`."""
        options: Any = {"sampling": Sampling(repetition_penalty=1.1), "ignore_eos": True}
        return [take(prompt, max_new_tokens=limit - len(prompt), **options) for prompt in prompts]

    expected = _tokens(write(Engine(model, drafter=None).generate))
    truth = {tuple(prompt): tokens for prompt, tokens in zip(prompts, expected, strict=True)}
    engine = Engine(open_target(model, "eager"), drafter=NoisyTrees(truth), budget=12)
    assert engine.target.static == "eager"
    with engine.with_limits(3) as pool:
        assert _tokens(handle.result() for handle in write(pool.submit)) == expected
    for static in ("off", "eager"):
        other = Engine(open_target(model, static), budget=3)
        with pytest.raises(PromptTooLongError, match=rf"\b{limit}\b"):
            other.generate(prompts[0], max_new_tokens=9, ignore_eos=True)


def test_unknown_modes_and_graphs_without_cuda_are_refused(model: Any) -> None:
    with pytest.raises(InputError, match=r"got static='fast'; expected one of 'auto', 'off'"):
        open_target(model, "fast")
    with pytest.raises(InputError, match="static='graph' for a model on cpu; expected one on"):
        open_target(model, "graph")
    assert set(MODES) == {"auto", "off", "eager", "graph", "compile"}


@pytest.mark.parametrize(
    ("architecture", "why"),
    [
        ("qwen3_next", "makes its forwards in a way of its own"),
        ("gpt2", ""),
        ("dynamic", "depend on the length"),
    ],
)
def test_models_without_fixed_steps_report_the_reason(architecture: str, why: str) -> None:
    rotary = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    dynamic = architectures.make("llama", rope_parameters=rotary)
    model = dynamic if architecture == "dynamic" else tiny.model(architecture)
    text = Engine(open_target(model, "eager"), budget=3).generate(PROMPTS[0], max_new_tokens=6)
    assert text.tokens == Engine(model, drafter=None).generate(PROMPTS[0], max_new_tokens=6).tokens
    assert text.report.static.startswith("off: " if why else "eager") and why in text.report.static


def test_models_that_ignore_masks_fail_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    model = copy.deepcopy(architectures.build("llama"))
    current = model.forward

    @functools.wraps(current)  # its signature is inspected
    def forgetful(*args: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        if torch.is_tensor(attention_mask):
            attention_mask = torch.zeros_like(attention_mask)
        return current(*args, attention_mask=attention_mask, **kwargs)

    monkeypatch.setattr(model, "forward", forgetful)
    target = open_static(CausalTarget(model), "eager")
    assert target.runner is None
    assert "goes wrong here (logits are off by" in target.static


def _tokens(texts: Any) -> list[list[int]]:
    return [text.tokens for text in texts]
