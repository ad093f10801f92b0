"""Rounds of guesses see what a draft of their depth sees, and padding counts for nothing."""

from __future__ import annotations

import pytest
import torch

from ragspec.drafters.eagle.batches import PrefillJob, StateReader, seeded
from ragspec.drafters.eagle.head import FeatureHead
from ragspec.drafters.eagle.loss import frozen_output, head_loss, round_mask, rounds
from ragspec.verification.causal import CausalTarget
from tests.support import heads, tiny


@pytest.fixture(scope="module")
def target() -> CausalTarget:
    return CausalTarget(heads.model(torch.float32))


def text(length: int, seed: int) -> list[int]:
    return tiny.prompt(length, vocab_size=heads.VOCAB, seed=seed)


def test_a_place_sees_the_text_and_its_its_variant() -> None:
    """Spelled out for three places and three rounds."""
    rows = [
        "".join("x" if visible else "." for visible in row) for row in round_mask(3, 3).tolist()
    ]
    assert rows[:3] == ["x........", "xx.......", "xxx......"]
    assert rows[3:6] == ["...x.....", "x...x....", "xx...x..."]
    assert rows[8] == "x...x...x"


def test_rounds_are_the_drafts_of_the_head_one_token_at_a_time(target: CausalTarget) -> None:
    """Each draft here is made the plain way: the states of the text, then guess after guess."""
    head, read = heads.trained(), StateReader(target, [text(12, 3)]).read([0])
    embedded, states = read.embedded[:, 1:], read.states[:, :-1]
    with torch.no_grad():
        instance = rounds(head, read, 0.0, 3)
        for start in range(9):  # the text's last known state
            inputs = states[:, : start + 1]
            for number in range(3):
                guessed = head(embedded[:, : start + 1 + number], inputs)[:, -1:]
                result = instance[number][:, start + number : start + number + 1]
                torch.testing.assert_close(result, guessed, atol=1e-5, rtol=1e-4)
                inputs = torch.cat([inputs, guessed], 1)


@pytest.mark.parametrize("depth", [1, 2])
def test_padding_changes_no_loss(target: CausalTarget, depth: int) -> None:
    head = FeatureHead.fresh(target, seeded(0, 0, 0))
    output = frozen_output(target, None)
    reader = StateReader(target, [text(20, 1), text(9, 2)])
    both, long, short = (reader.read(numbers) for numbers in ([0, 1], [0], [1]))
    spoilt = PrefillJob(both.embedded, both.states + 50.0 * ~both.real[..., None], both.real)
    losses = [
        head_loss(head, output, each, distributions=0.1, depth=depth)
        for each in (spoilt, long, short)
    ]
    if depth == 1:
        share = (19 * losses[1][0] + 8 * losses[2][0]) / 27
        torch.testing.assert_close(losses[0][0], share)
    plain = head_loss(head, output, both, distributions=0.1, depth=depth)
    torch.testing.assert_close(losses[0][0], plain[0])
    assert losses[0][1] == pytest.approx((19 * losses[1][1] + 8 * losses[2][1]) / 27)


@pytest.mark.parametrize("tokens", [None, [3, 5, 8]])
def test_no_gradient_reaches_the_targets_head(
    target: CausalTarget, tokens: list[int] | None
) -> None:
    head = FeatureHead.fresh(target, seeded(0, 0, 0), tokens=tokens)
    read = StateReader(target, [text(20, 1)]).read([0])
    loss, _ = head_loss(head, frozen_output(target, head.tokens), read, distributions=0.1, depth=2)
    loss.backward()  # type: ignore[no-untyped-call]
    assert head.fc.weight.grad is not None
    assert target.output_head.weight.grad is None


def test_later_rounds_begin_where_there_is_something_to_learn(target: CausalTarget) -> None:
    head, whole = heads.trained(), StateReader(target, [text(14, 5)]).read([0])
    places = torch.arange(14)[None]
    behind = torch.arange(14)[None] >= 7
    part = PrefillJob(whole.embedded, whole.states, behind, places)
    with torch.no_grad():
        expected, result = rounds(head, whole, 0.0, 3), rounds(head, part, 0.0, 3)
    torch.testing.assert_close(result[0], expected[0])
    for number in (1, 2):  # of 13 places the first six are not learned from
        assert result[number].shape[1] == 7
        sound = expected[number][:, 6 + number :]
        torch.testing.assert_close(result[number][:, number:], sound, atol=1e-5, rtol=1e-4)


def test_gaps_between_tokens_are_visible(target: CausalTarget) -> None:
    head, read = heads.trained(), StateReader(target, [text(14, 5)]).read([0])
    even = torch.arange(14)[None]
    losses = []
    for places in (None, even + 5, even + 30 * (even > 6)):
        inputs = PrefillJob(read.embedded, read.states, read.real, places)
        losses.append(
            head_loss(head, frozen_output(target, None), inputs, distributions=0.1)[0].item()
        )
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0] != pytest.approx(losses[2], rel=1e-4)
