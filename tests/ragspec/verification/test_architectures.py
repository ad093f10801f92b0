"""Every architecture: the probe's verdict, logits of trees, and tokens that never depend on drafts.

Levels L1 (logits) and L2 (tokens) of the losslessness tests, in float64; routed experts in
float32. Drafts are trees in which the true continuation is mixed with noise (`support.noisy`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ragspec.drafters.base import Drafter, SourceText
from ragspec.drafters.model.drafter import ModelDrafter
from ragspec.engine.engine import Engine
from ragspec.engine.output import Generation
from ragspec.sampling.settings import Sampling
from ragspec.verification.causal import CausalTarget
from ragspec.verification.probe import probe, probe_target
from tests.ragspec.drafters.model.test_drafter import alike
from tests.support.architectures import ARCHITECTURES, VOCAB, build
from tests.support.identities import PROMPTS, target
from tests.support.noisy import NoisyTrees

NEW = 20
BUDGET = 9
CLOSELY = ("llama", "gemma3_text", "qwen3_5_text")  # full attention, windows, a recurrent hybrid
SETTINGS = {
    "greedy": Sampling(),
    "sampled": Sampling(temperature=0.8, seed=5),
    "penalties": Sampling(
        temperature=0.8,
        seed=5,
        repetition_penalty=1.3,
        frequency_penalty=0.4,
        presence_penalty=0.3,
    ),
    "top-k": Sampling(temperature=1.2, seed=5, top_k=20),
    "top-p": Sampling(temperature=1.2, seed=5, top_p=0.8),
    "min-p": Sampling(temperature=1.2, seed=5, min_p=0.05),
    "no-repeat": Sampling(no_repeat_ngram_size=2),
    "stateful": Sampling(temperature=0.8, seed=5),
}


class Counting:
    """A processor with a memory: what it favours depends on how often its text was looked at."""

    def __init__(self, lengths: set[int]) -> None:
        self.lengths = lengths
        self.calls: dict[tuple[int, ...], int] = {}

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        text = tuple(input_ids[0, : min(self.lengths)].tolist())
        count = self.calls[text] = self.calls.get(text, 0) + 1
        favoured = torch.arange(scores.shape[-1]) % 5 == count % 5
        return scores + 3.0 * favoured.to(scores)


def prompts(rows: int) -> list[list[int]]:
    random = torch.Generator().manual_seed(11)
    lengths = [13, 19, 6, 10][:rows]
    return [torch.randint(VOCAB - 1, (n,), generator=random).tolist() for n in lengths]


def run(engine: Engine, request: list[list[int]], name: str, **options: Any) -> list[Generation]:
    extra = [Counting({len(prompt) for prompt in request})] if name == "stateful" else []
    result: list[Generation] = engine.generate(
        request, SETTINGS[name], max_new_tokens=NEW, logits_processor=extra, **options
    )
    return result


def compare(model: Any, cache: Path, name: str, rows: int) -> tuple[list[list[int]], float]:
    """Assert that drafts change nothing; return the tokens and accepted nodes per step."""
    texts = prompts(rows)
    plain = run(Engine(model, drafter=None, cache=cache), texts, name)
    truths = {tuple(text): out.tokens for text, out in zip(texts, plain, strict=True)}
    engine = Engine(model, drafter=NoisyTrees(truths), budget=BUDGET, cache=cache)
    drafted = run(engine, texts, name)
    assert [out.tokens for out in drafted] == [out.tokens for out in plain]
    assert {out.label for out in drafted} == {"exact"}
    assert not any(out.report.faults for out in drafted)
    steps = sum(out.report.steps for out in drafted)
    accepted = sum(out.report.accepted for out in drafted)
    assert 0 < accepted < sum(out.report.drafted for out in drafted)
    return [out.tokens for out in plain], accepted / steps


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("verdicts")


def test_there_are_enough_architectures() -> None:
    assert len(ARCHITECTURES) >= 25
    assert {"bloom", "mpt", "gpt_neo", "qwen3_next"} <= {
        name for name, entry in ARCHITECTURES.items() if entry.mode != "tree"
    }


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_probe_says_what_is_known(name: str) -> None:
    expected = ARCHITECTURES[name].mode
    verdict = probe_target(CausalTarget(build(name))).verdict
    assert verdict.mode == expected, verdict.reason
    assert verdict.error < 5e-5, "the verified mode is this close"
    if expected != "tree":
        assert "tree attention goes wrong" in verdict.reason


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss", "deepseek_v3", "bloom"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_probe_is_right_in_half_precision(name: str, dtype: torch.dtype) -> None:
    verdict = probe(CausalTarget(build(name, dtype)))
    assert verdict.mode == ARCHITECTURES[name].mode, verdict


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_tokens_do_not_depend_on_drafts(name: str, cache: Path) -> None:
    model = build(name)
    greedy, _ = compare(model, cache, "greedy", 1)
    compare(model, cache, "sampled", 1)
    ids = torch.tensor(prompts(1))
    current = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False
    )
    assert current[0, ids.shape[1] :].tolist() == greedy[0], (
        "plain decoding is not transformers' own"
    )


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("architecture", CLOSELY)
def test_tokens_do_not_depend_on_drafts_under_any_setting(
    architecture: str, name: str, rows: int, cache: Path
) -> None:
    tokens, accepted = compare(build(architecture), cache, name, rows)
    assert accepted > 0.5, "too little was accepted for the test to mean anything"
    if rows == 4:
        alone, _ = compare(build(architecture), cache, name, 1)
        assert name == "stateful" or tokens[0] == alone[0], "a row depends on its neighbours"


@pytest.mark.parametrize("budget", [6, "auto"])
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_do_not_depend_on_a_draft_model_beside_the_context(
    name: str, rows: int, budget: Any, cache: Path
) -> None:
    alone = Engine(target(), drafter=None, cache=cache)
    plain = run(alone, PROMPTS[:rows], name, ignore_eos=True)
    # How the texts begin can be copied; the rest is left to the model.
    texts = [SourceText(tuple(out.tokens[:6]), i) for i, out in enumerate(plain)]
    drafters: list[str | Drafter] = ["context", ModelDrafter(alike(), min_expected_gain=0.0)]
    engine = Engine(target(), drafter=drafters, budget=budget, cache=cache)
    drafted = run(engine, PROMPTS[:rows], name, ignore_eos=True, texts=texts)
    assert [out.tokens for out in drafted] == [out.tokens for out in plain]
    assert {out.label for out in drafted} == {"exact"}
    assert not any(out.report.faults for out in drafted)
    if budget != "auto":  # which may find that no draft of so small a model pays
        for out in drafted:
            assert out.report.accepted_by_source.keys() == {"context", "model"}


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "phi3", "bloom", "qwen3_next"])
def test_rows_of_a_batch_do_not_mix(name: str, cache: Path) -> None:
    together, _ = compare(build(name), cache, "greedy", 4)
    alone, _ = compare(build(name), cache, "greedy", 1)
    assert together[0] == alone[0]


@pytest.mark.parametrize("architecture", CLOSELY)
def test_an_end_token_inside_a_draft_ends_the_text(architecture: str, cache: Path) -> None:
    model, (text,) = build(architecture), prompts(1)
    whole = Engine(model, drafter=None, cache=cache).generate(text, max_new_tokens=NEW).tokens
    end = whole[7]
    drafter = NoisyTrees({tuple(text): whole}, spoiled=0.0)
    engine = Engine(model, drafter=drafter, budget=BUDGET, cache=cache)
    out = engine.generate(text, max_new_tokens=NEW, stop_token_ids=[end])
    assert out.tokens == whole[: whole.index(end) + 1]
    assert out.finish_reason == "stop"
