"""A head of few tokens drafts these alone, with the logits of the target's own output head."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ragspec import Engine, Sampling
from ragspec.drafters.eagle.batches import seeded
from ragspec.drafters.eagle.drafter import HeadDrafter
from ragspec.drafters.eagle.head import DraftVocabulary, FeatureHead, frequent_tokens
from ragspec.errors import InputError, ModelError
from ragspec.verification.causal import CausalTarget
from tests.support import heads, tiny


@pytest.fixture(scope="module")
def target() -> CausalTarget:
    return CausalTarget(heads.model(torch.float32))


def test_frequent_tokens_come_first_and_low_ids_fill_up() -> None:
    texts = [[9, 9, 9, 7, 7, 5], [7, 9]]
    assert frequent_tokens(texts, 1, 12) == (9,)
    assert frequent_tokens(texts, 2, 12) == (7, 9)
    assert frequent_tokens(texts, 5, 12) == (0, 1, 5, 7, 9)
    assert frequent_tokens(texts, 12, 12) == tuple(range(12))
    assert frequent_tokens([[14, 14, 3]], 2, 12) == (0, 3)  # 14 can only be read
    with pytest.raises(InputError, match="vocabulary of 13 tokens; expected 1 to 12"):
        frequent_tokens(texts, 13, 12)


def test_logits_are_rows_of_the_targets_its(target: CausalTarget) -> None:
    few = DraftVocabulary(target, torch.tensor([2, 5, 11]))
    states = torch.randn(2, 3, 32, generator=seeded(0, 0, 0))
    whole, instance = target.output_head(states), few.spread(few(states))
    torch.testing.assert_close(instance[..., [2, 5, 11]], whole[..., [2, 5, 11]])
    rest = torch.ones(instance.shape[-1], dtype=torch.bool)
    rest[[2, 5, 11]] = False
    assert bool((instance[..., rest] == -torch.inf).all())


@pytest.mark.parametrize(
    "mode", ["coupled", "deterministic", "sampled", "sampled-without-replacement"]
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_text_stays_exact_and_only_the_heads_tokens_are_drafted(
    target: CausalTarget, mode: str, temperature: float
) -> None:
    prompt = tiny.prompt(12, vocab_size=heads.VOCAB, seed=4)
    sampling = Sampling(temperature=temperature, seed=5)
    plain = Engine(target.model, drafter=None).generate(prompt, sampling, max_new_tokens=24)
    tokens = frequent_tokens([plain.tokens], len(set(plain.tokens)) // 2 + 1, heads.VOCAB)
    head = FeatureHead.fresh(target, seeded(1, 0, 0), tokens=tokens)
    width = 2 if mode.startswith("sampled") else None
    drafter = HeadDrafter(head, target.model, mode=mode, width=width)
    instance = Engine(target.model, drafter=drafter, budget=6).generate(
        prompt, sampling, max_new_tokens=24
    )
    drafted = {token for step in instance.steps for token in step.tree.tokens.tolist()}
    assert drafted
    assert drafted <= set(tokens)
    if not mode.startswith("sampled") or temperature == 0.0:
        assert instance.tokens == plain.tokens


def test_tokens_are_preserved_with_the_head_and_checked(
    target: CausalTarget, tmp_path: Path
) -> None:
    head = FeatureHead.fresh(target, seeded(1, 0, 0), tokens=[2, 5, 11])
    head.save(tmp_path, torch.bfloat16)
    read = FeatureHead.load(tmp_path)
    assert read.tokens is not None
    assert read.tokens.tolist() == [2, 5, 11]
    for wrong in ([5, 2, 11], [2, 2, 11], [2, 5, heads.VOCAB], [-1, 2, 5]):
        head.tokens = torch.tensor(wrong)
        head.save(tmp_path)
        with pytest.raises(ModelError, match="no increasing ids"):
            FeatureHead.load(tmp_path)
