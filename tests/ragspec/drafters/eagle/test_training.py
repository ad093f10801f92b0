"""Training teaches a head what the target will say, and leaves the target as it was."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from ragspec.drafters.eagle.head import FeatureHead
from ragspec.drafters.eagle.training import (
    HeadTraining,
    Progress,
    head_loss,
    read_states,
    train_head,
)
from ragspec.errors import InputError, UnsupportedModelError
from ragspec.target.causal import CausalTarget
from ragspec.visual.models.target import ImageTarget
from tests.support import heads, image_models, tiny

FEW = HeadTraining(steps=6, batch_size=4, length=24, learning_rate=3e-3, seed=2)


def target(seed: int = 0) -> CausalTarget:
    return CausalTarget(heads.model(torch.float32, seed))


def texts(count: int = 12, length: int = 24, vocab: int = heads.VOCAB) -> list[list[int]]:
    return [tiny.prompt(length, vocab_size=vocab, seed=50 + seed) for seed in range(count)]


def agreement(head: FeatureHead) -> float:
    """Return how often the head's best token is the target's, on texts that it never saw."""
    made = target()
    quiet = HeadTraining(noise=0.0)
    embedded, states = read_states(made, texts(8, 40))
    with torch.no_grad():
        return head_loss(head, made, embedded, states, quiet, torch.Generator())[1]


def test_a_head_learns_what_the_target_will_say() -> None:
    before, after = agreement(heads.fresh(target())), agreement(heads.trained())
    assert before < 0.2
    assert after > before + 0.2


def test_the_loss_falls() -> None:
    seen: list[Progress] = []
    train_head(target(), texts(), replace(FEW, steps=30), on_step=seen.append)
    assert [progress.step for progress in seen] == list(range(30))
    losses = [progress.loss for progress in seen]
    assert sum(losses[-5:]) < sum(losses[:5])


def test_the_seed_decides() -> None:
    first, again = (train_head(target(), texts(), FEW) for _ in range(2))
    other = train_head(target(), texts(), replace(FEW, seed=3))
    assert torch.equal(first.fc.weight, again.fc.weight)
    assert not torch.equal(first.fc.weight, other.fc.weight)
    assert not first.training


def test_the_target_is_left_as_it_was() -> None:
    made: Any = copy.deepcopy(heads.model(torch.float32))
    before = {name: value.clone() for name, value in made.named_parameters()}
    train_head(CausalTarget(made), texts(), FEW)
    for name, value in made.named_parameters():
        assert torch.equal(value, before[name])
        assert value.grad is None
        assert value.requires_grad
    assert not made.get_output_embeddings()._forward_pre_hooks


def test_states_are_the_targets_own() -> None:
    made = target()
    embedded, states = read_states(made, texts(3))
    for row, text in enumerate(texts(3)):
        torch.testing.assert_close(states[row], heads.states(made, text)[0])
        torch.testing.assert_close(embedded[row], made.embed(torch.tensor(text)))


def picture(scale: float) -> ImageTarget:
    made = copy.deepcopy(image_models.model("class")).float()
    return image_models.target(made, scale)


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_copies_are_texts_of_their_own(scale: float) -> None:
    made = picture(scale)
    prompts = [[*made.prompt(row), *codes] for row, codes in enumerate(texts(3, 15))]
    embedded, states = read_states(made, prompts)
    assert len(states) == 3 * made.copies
    for row, text in enumerate(prompts):
        here = slice(row * made.copies, (row + 1) * made.copies)
        torch.testing.assert_close(states[here], heads.states(made, text))
        torch.testing.assert_close(embedded[here], made.embed(torch.tensor([text])))
    seen: list[Progress] = []
    settings = HeadTraining(steps=12, batch_size=3, length=16, learning_rate=3e-3)
    train_head(made, prompts, settings, on_step=seen.append)
    assert seen[-1].loss < seen[0].loss


def test_a_picture_that_is_cut_from_its_condition_is_refused() -> None:
    made = picture(1.0)
    prompts = [[*made.prompt(row), *codes] for row, codes in enumerate(texts(3, 15))]
    settings = HeadTraining(steps=1, batch_size=3, length=15)
    with pytest.raises(InputError, match=r"text of 16 tokens that length=15 cuts.*length to 16"):
        train_head(made, prompts, settings)
    with pytest.raises(InputError, match="begins with 0 condition ids"):
        train_head(made, [texts(1, 15)[0]], settings)


def test_texts_with_too_many_logits_are_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    made = target()
    whole = read_states(made, texts(4))
    limit = 2 * 24 * heads.VOCAB
    monkeypatch.setattr("ragspec.target.causal.MOST_LOGITS", limit)
    monkeypatch.setattr("ragspec.drafters.eagle.training.MOST_LOGITS", limit)
    for one, other in zip(read_states(made, texts(4)), whole, strict=True):
        torch.testing.assert_close(one, other)
    monkeypatch.setattr("ragspec.target.causal.MOST_LOGITS", 6 * heads.VOCAB)
    monkeypatch.setattr("ragspec.drafters.eagle.training.MOST_LOGITS", 6 * heads.VOCAB)
    for one, other in zip(read_states(made, texts(4)), whole, strict=True):
        torch.testing.assert_close(one, other[:, -6:])


def test_long_texts_are_cut_and_short_ones_kept_apart() -> None:
    lengths: list[int] = []
    made = target()
    read = made.embed

    def embed(tokens: torch.Tensor) -> torch.Tensor:
        lengths.append(tokens.shape[1])
        return read(tokens)

    made.embed = embed  # type: ignore[method-assign]
    given = [*texts(2, 60), *texts(2, 10), *texts(1, 3)]
    train_head(made, given, HeadTraining(steps=8, batch_size=8, length=24))
    assert set(lengths) == {1, 24, 10}  # 1: the sizes of a fresh head


def test_the_rate_goes_with_one_over_the_width() -> None:
    plain, given = (
        train_head(target(), texts(), replace(FEW, learning_rate=rate)) for rate in (None, 0.6 / 32)
    )
    assert torch.equal(plain.fc.weight, given.fc.weight)


def test_time_may_end_the_run() -> None:
    seen: list[Progress] = []
    settings = HeadTraining(steps=10_000, seconds=0.3, batch_size=4, length=24)
    train_head(target(), texts(), settings, on_step=seen.append)
    assert 1 <= len(seen) < 1000


def test_a_head_can_go_on_but_not_for_another_target() -> None:
    head = heads.fresh(target())
    weights = head.fc.weight.clone()
    assert train_head(target(), texts(), FEW, head=head) is head
    assert not torch.equal(head.fc.weight, weights)
    with pytest.raises(UnsupportedModelError, match="another target"):
        train_head(target(1), texts(), FEW, head=head)


@pytest.mark.parametrize("given", [[], [[1, 2]]])
def test_no_text_is_refused(given: list[list[int]]) -> None:
    with pytest.raises(InputError, match="expected text"):
        train_head(target(), given, FEW)


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
        {"laws": math.inf},
        {"weight_decay": math.nan},
        {"learning_rate": math.nan},
        {"seconds": math.nan},
        {"learning_rate": "0.1"},
        {"steps": 1.5},
        {"batch_size": 2.5},
        {"length": 8.0},
    ],
)
def test_bad_settings_are_refused_by_their_names(settings: dict[str, Any]) -> None:
    ((name, value),) = settings.items()
    with pytest.raises(InputError, match=f"^got {name}={value!r}; expected at least"):
        HeadTraining(**settings)
