"""Training teaches a head what the target will say, and leaves the target as it was."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from ragspec.drafters.eagle.batches import StateReader, seeded
from ragspec.drafters.eagle.head import FeatureHead
from ragspec.drafters.eagle.loss import agreement as agreement_of
from ragspec.drafters.eagle.loss import rounds
from ragspec.drafters.eagle.training import HeadTrainer, HeadTraining, Progress, train_head
from ragspec.errors import InputError, UnsupportedModelError
from ragspec.verification.causal import CausalTarget
from ragspec.visual.models.target import ImageTarget
from tests.support import heads, image_models, tiny

FEW = HeadTraining(steps=6, batch_size=4, length=24, learning_rate=3e-3, seed=2)


def target(seed: int = 0) -> CausalTarget:
    return CausalTarget(heads.model(torch.float32, seed))


def texts(count: int = 12, length: int = 24, vocab: int = heads.VOCAB) -> list[list[int]]:
    return [tiny.prompt(length, vocab_size=vocab, seed=50 + seed) for seed in range(count)]


def agreement(head: FeatureHead) -> float:
    """Return how often the head's best token is the target's, on texts that it never saw."""
    instance = target()
    return agreement_of(head, instance, [StateReader(instance, texts(8, 40)).read(range(8))])


def test_a_head_learns_what_the_target_will_say() -> None:
    before, after = agreement(heads.fresh(target())), agreement(heads.trained())
    assert before < 0.2
    assert after > before + 0.2


def test_the_loss_falls() -> None:
    known: list[Progress] = []
    train_head(target(), texts(), replace(FEW, steps=30), on_step=known.append)
    assert [progress.step for progress in known] == list(range(30))
    losses = [progress.loss for progress in known]
    assert sum(losses[-5:]) < sum(losses[:5])


@pytest.mark.parametrize("depth", [2, 3])
def test_rounds_teach_the_head_to_go_on_from_its_its_guesses(depth: int) -> None:
    instance, inputs = target(), texts(24, 24)
    read = StateReader(instance, texts(8, 40)).read(range(8))
    settings = replace(FEW, steps=120, batch_size=8)

    def last_round(head: FeatureHead) -> float:
        with torch.no_grad():
            guessed = rounds(head, read, 0.0, depth)[-1][:, depth - 1 :]
        return float((guessed - read.states[:, depth:]).abs().mean())

    once = last_round(train_head(instance, inputs, settings))
    assert last_round(train_head(instance, inputs, replace(settings, depth=depth))) < once


def test_cached_states_give_the_head_that_prefill_again_gives() -> None:
    chunks = HeadTrainer(target(), texts(), FEW).batches.chunks
    trainers = [
        HeadTrainer(target(), texts(), FEW, reader=StateReader(target(), chunks, room))
        for room in (0, 1 << 30)
    ]
    for trainer in trainers:
        list(trainer.run())
    one, other = (trainer.head.fc.weight for trainer in trainers)
    torch.testing.assert_close(one, other, atol=2e-3, rtol=0.05)


def test_a_training_of_other_conditions_is_not_gone_on_with() -> None:
    """Their ids are the same: they only number the conditions."""
    one, other = picture(1.0), picture(1.0)
    other._conditions = other._conditions + 1.0
    prompts = [[*one.prompt(row), *codes] for row, codes in enumerate(texts(3, 15))]
    settings = HeadTraining(steps=6, batch_size=3, length=16)
    first, second = (HeadTrainer(instance, prompts, settings) for instance in (one, other))
    with pytest.raises(InputError, match="differs in conditions"):
        second.go_on(first.state())


def test_a_training_goes_on_with_the_tokens_of_its_head() -> None:
    start = FeatureHead.fresh(target(), seeded(0, 0, 0), tokens=[2, 5, 11])
    settings = replace(FEW, draft_vocab_size=3)
    left = HeadTrainer(target(), texts(), settings, head=start).state()
    again = HeadTrainer(target(), texts(), settings)
    assert again.head.tokens is not None and again.head.tokens.tolist() != [2, 5, 11]
    again.go_on(left)
    states = torch.randn(4, 32, generator=seeded(1, 0, 0))
    whole = target().output_head(states)
    torch.testing.assert_close(again._output(states), whole[:, [2, 5, 11]])


def test_a_head_may_draft_frequent_tokens_only() -> None:
    inputs = [[1, 2, 3, 2, 3, 2, 9, 9] * 3] * 12
    head = train_head(target(), inputs, replace(FEW, draft_vocab_size=3))
    assert head.tokens is not None
    assert head.tokens.tolist() == [2, 3, 9]
    assert head.config.draft_vocab_size == 3
    with pytest.raises(InputError, match=f"vocabulary of {heads.VOCAB + 1} tokens; expected 1 to"):
        train_head(target(), inputs, replace(FEW, draft_vocab_size=heads.VOCAB + 1))
    with pytest.raises(UnsupportedModelError, match="no single linear map"):
        instance = picture(3.0)
        prompts = [[*instance.prompt(row), *codes] for row, codes in enumerate(texts(3, 15))]
        train_head(instance, prompts, HeadTraining(steps=1, length=16, draft_vocab_size=3))


def test_the_seed_decides() -> None:
    first, again = (train_head(target(), texts(), FEW) for _ in range(2))
    other = train_head(target(), texts(), replace(FEW, seed=3))
    assert torch.equal(first.fc.weight, again.fc.weight)
    assert not torch.equal(first.fc.weight, other.fc.weight)
    assert not first.training


def test_the_target_is_left_as_it_was() -> None:
    instance: Any = copy.deepcopy(heads.model(torch.float32))
    before = {name: value.clone() for name, value in instance.named_parameters()}
    train_head(CausalTarget(instance), texts(), FEW)
    for name, value in instance.named_parameters():
        assert torch.equal(value, before[name])
        assert value.grad is None
        assert value.requires_grad
    assert not instance.get_output_embeddings()._forward_pre_hooks


def picture(scale: float) -> ImageTarget:
    instance = copy.deepcopy(image_models.model("class")).float()
    return image_models.target(instance, scale)


def test_a_picture_with_guidance_can_be_learned() -> None:
    instance = picture(3.0)
    prompts = [[*instance.prompt(row), *codes] for row, codes in enumerate(texts(3, 15))]
    known: list[Progress] = []
    settings = HeadTraining(steps=12, batch_size=3, length=16, learning_rate=3e-3)
    train_head(instance, prompts, settings, on_step=known.append)
    assert known[-1].loss < known[0].loss


def test_a_picture_that_is_cut_from_its_condition_is_refused() -> None:
    instance = picture(1.0)
    prompts = [[*instance.prompt(row), *codes] for row, codes in enumerate(texts(3, 15))]
    settings = HeadTraining(steps=1, batch_size=3, length=15)
    with pytest.raises(InputError, match=r"text of 16 tokens that length=15 cuts.*length to 16"):
        train_head(instance, prompts, settings)
    with pytest.raises(InputError, match="begins with 0 condition ids"):
        train_head(instance, [texts(1, 15)[0]], settings)


def test_the_rate_goes_with_one_over_the_width() -> None:
    plain, inputs = (
        train_head(target(), texts(), replace(FEW, learning_rate=rate)) for rate in (None, 0.6 / 32)
    )
    assert torch.equal(plain.fc.weight, inputs.fc.weight)


def test_time_may_end_the_run() -> None:
    known: list[Progress] = []
    settings = HeadTraining(steps=10_000, seconds=0.3, batch_size=4, length=24)
    train_head(target(), texts(), settings, on_step=known.append)
    assert 1 <= len(known) < 1000


def test_a_head_can_go_on_but_not_for_another_target() -> None:
    head = heads.fresh(target())
    weights = head.fc.weight.clone()
    assert train_head(target(), texts(), FEW, head=head) is head
    assert not torch.equal(head.fc.weight, weights)
    with pytest.raises(UnsupportedModelError, match="another target"):
        train_head(target(1), texts(), FEW, head=head)
    with pytest.raises(InputError, match="draft_vocab_size=3 and a head of None"):
        train_head(target(), texts(), replace(FEW, draft_vocab_size=3), head=head)


@pytest.mark.parametrize("inputs", [[], [[1, 2]]])
def test_no_text_is_refused(inputs: list[list[int]]) -> None:
    with pytest.raises(InputError, match="expected text"):
        train_head(target(), inputs, FEW)


@pytest.mark.parametrize(
    "settings",
    [
        {"steps": 0},
        {"batch_size": 0},
        {"length": 2},
        {"learning_rate": 0.0},
        {"seconds": 0.0},
        {"noise": -1.0},
        {"noise": math.nan},
        {"distributions": math.inf},
        {"weight_decay": math.nan},
        {"learning_rate": math.nan},
        {"seconds": math.nan},
        {"learning_rate": "0.1"},
        {"steps": 1.5},
        {"batch_size": 2.5},
        {"length": 8.0},
        {"depth": 0},
        {"draft_vocab_size": 0},
        {"draft_vocab_size": 1.5},
    ],
)
def test_bad_settings_are_refused_by_their_names(settings: dict[str, Any]) -> None:
    ((name, value),) = settings.items()
    with pytest.raises(InputError, match=f"^got {name}={value!r}; expected at least"):
        HeadTraining(**settings)
