"""A training teaches a head the target's tokens and leaves the target unchanged."""

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from ragspec.drafters.heads.fresh import fresh_head
from ragspec.drafters.heads.head import DraftHead
from ragspec.errors import InputError, UnsupportedModelError
from ragspec.models.quantized import quantized
from ragspec.training.batches import StateReader, seeded
from ragspec.training.loss import Teacher, head_loss, rounds
from ragspec.training.trainer import HeadTrainer, HeadTraining, TrainingProgress
from ragspec.verification.causal import CausalTarget, read_states
from ragspec.verification.open import open_target
from ragspec.visual.models.target import ImageTarget
from tests.support import heads, image_models, tiny

FEW = HeadTraining(steps=6, batch_size=4, length=24, learning_rate=3e-3, seed=2)


def target(seed: int = 0) -> CausalTarget:
    return CausalTarget(heads.model(torch.float32, seed))


def texts(count: int = 12, length: int = 24, vocab: int = heads.VOCAB) -> list[list[int]]:
    return [tiny.prompt(length, vocab_size=vocab, seed=50 + seed) for seed in range(count)]


@pytest.mark.parametrize("depth", [2, 3])
def test_rounds_teach_the_head_to_go_on_from_its_guesses(depth: int) -> None:
    instance, inputs = target(), texts(24, 24)
    read = StateReader(instance, texts(8, 40)).read(range(8))
    settings = replace(FEW, steps=120, batch_size=8)

    def last_round(head: DraftHead) -> float:
        with torch.no_grad():
            guessed = list(rounds(head, read, 0.0, depth))[-1].read[:, depth - 1 :]
        return float((guessed - read.states[:, depth:]).abs().mean())

    once = last_round(heads.train_head(instance, inputs, settings))
    assert last_round(heads.train_head(instance, inputs, replace(settings, depth=depth))) < once


def test_a_target_without_states_is_refused_before_training() -> None:
    with pytest.raises(UnsupportedModelError, match="hidden states"):
        HeadTrainer(open_target(tiny.model("bloom")), texts(), HeadTraining(steps=2))


def test_a_training_on_other_conditions_cannot_be_resumed() -> None:
    """The ids of the conditions are the same: they only number them."""
    (one, prompts), (other, _) = picture(1.0), picture(1.0)
    other._conditions = [each + 1.0 for each in other._conditions]
    settings = HeadTraining(steps=6, batch_size=3, length=16)
    first, second = (HeadTrainer(instance, prompts, settings) for instance in (one, other))
    with pytest.raises(InputError, match="differs in conditions"):
        second.resume(first.state())


def test_a_resumed_training_has_the_tokens_of_its_head() -> None:
    start = fresh_head(target(), seeded(0, 0, 0), tokens=[2, 5, 11])
    settings = replace(FEW, draft_vocab_size=3)
    left = HeadTrainer(target(), texts(), settings, head=start).state()
    again = HeadTrainer(target(), texts(), settings)
    assert again.head.tokens is not None and again.head.tokens.tolist() != [2, 5, 11]
    again.resume(left)
    states = torch.randn(4, 32, generator=seeded(1, 0, 0))
    whole = target().output_head(states)
    torch.testing.assert_close(again._teacher.output(states), whole[:, [2, 5, 11]])


def test_a_head_may_draft_frequent_tokens_only() -> None:
    inputs = [[1, 2, 3, 2, 3, 2, 9, 9] * 3] * 12
    head = heads.train_head(target(), inputs, replace(FEW, draft_vocab_size=3))
    assert head.tokens is not None
    assert head.tokens.tolist() == [2, 3, 9]
    assert head.config.draft_vocab_size == 3
    with pytest.raises(InputError, match=f"vocabulary of {heads.VOCAB + 1} tokens; expected 1 to"):
        heads.train_head(target(), inputs, replace(FEW, draft_vocab_size=heads.VOCAB + 1))
    with pytest.raises(UnsupportedModelError, match="no single linear map"):
        instance, prompts = picture(3.0)
        heads.train_head(instance, prompts, HeadTraining(steps=1, length=16, draft_vocab_size=3))


def test_the_seed_decides() -> None:
    first, again = (heads.train_head(target(), texts(), FEW) for _ in range(2))
    other = heads.train_head(target(), texts(), replace(FEW, seed=3))
    assert torch.equal(first.fc.weight, again.fc.weight)
    assert not torch.equal(first.fc.weight, other.fc.weight)
    assert not first.training


def test_training_leaves_the_target_unchanged() -> None:
    instance: Any = copy.deepcopy(heads.model(torch.float32))
    before = {name: value.clone() for name, value in instance.named_parameters()}
    heads.train_head(CausalTarget(instance), texts(), FEW)
    for name, value in instance.named_parameters():
        assert torch.equal(value, before[name])
        assert value.grad is None
        assert value.requires_grad
    assert not instance.get_output_embeddings()._forward_pre_hooks


def picture(scale: float) -> tuple[ImageTarget, list[list[int]]]:
    """Return a target of pictures, and texts for it."""
    instance = image_models.target(copy.deepcopy(image_models.model("class")).float(), scale)
    codes = enumerate(texts(3, 15))
    return instance, [[*instance.prompt(row), *each] for row, each in codes]


def test_a_picture_with_guidance_can_be_learned() -> None:
    instance, prompts = picture(3.0)
    known: list[TrainingProgress] = []
    settings = HeadTraining(steps=12, batch_size=3, length=16, learning_rate=3e-3)
    heads.train_head(instance, prompts, settings, on_step=known.append)
    assert known[-1].loss < known[0].loss


def test_a_picture_that_is_cut_from_its_condition_is_refused() -> None:
    instance, prompts = picture(1.0)
    settings = HeadTraining(steps=1, batch_size=3, length=15)
    with pytest.raises(InputError, match=r"text of 16 tokens that length=15 cuts.*length to 16"):
        heads.train_head(instance, prompts, settings)
    with pytest.raises(InputError, match="begins with 0 condition ids"):
        heads.train_head(instance, [texts(1, 15)[0]], settings)


def test_time_may_end_the_run() -> None:
    known: list[TrainingProgress] = []
    settings = HeadTraining(steps=10_000, seconds=0.3, batch_size=4, length=24)
    heads.train_head(target(), texts(), settings, on_step=known.append)
    assert 1 <= len(known) < 1000


def test_a_head_can_be_trained_further_for_its_target_alone() -> None:
    head = heads.fresh(target())
    weights = head.fc.weight.clone()
    assert heads.train_head(target(), texts(), FEW, head=head) is head
    assert not torch.equal(head.fc.weight, weights)
    with pytest.raises(UnsupportedModelError, match="another target"):
        heads.train_head(target(1), texts(), FEW, head=head)
    changes: list[dict[str, Any]] = [{"draft_vocab_size": 3}, {"form": "eagle3"}, {"slots": 2}]
    for change, start in zip([*changes, {"slots": 2}], [head, head, head, None], strict=True):
        (name,) = change
        with pytest.raises(InputError, match=rf"{name}=.* for a head of eagle1 with {name}="):
            heads.train_head(target(), texts(), replace(FEW, **change), head=start)
    trainer = HeadTrainer(target(), texts(), FEW, head=head)
    trainer.resume(HeadTrainer(target(), texts(), replace(FEW, form="eagle1"), head=head).state())


@pytest.mark.parametrize("form", ["eagle1", "eagle3", "peagle", "dflash", "medusa"])
def test_layers_may_be_wider_than_what_the_output_head_reads(form: str) -> None:
    """As in OPT-350m."""
    model = tiny.model("opt", word_embed_proj_dim=32, ffn_dim=48, do_layer_norm_before=False)
    head = heads.train_head(CausalTarget(model), texts(vocab=90), HeadTraining(2, form=form))
    assert all(each.report.drafted for each in heads.check_texts(model, head)[1])


@pytest.mark.parametrize("form", ["eagle1", "eagle3", "dflash", "medusa"])
def test_a_quantized_target_teaches_as_a_float_one(form: str) -> None:
    model = heads.model(torch.float32)
    heads_and_gradients = []
    for instance in (CausalTarget(model), CausalTarget(quantized(copy.deepcopy(model)))):
        head = fresh_head(instance, seeded(0, 0, 0), form=form)
        states = torch.ones(2, 32, requires_grad=True)
        logits = Teacher(instance, head).output(states)
        gradient = torch.autograd.grad(logits.square().sum(), states)
        heads_and_gradients.append(head.state_dict() | {"gradient": gradient[0]})
    torch.testing.assert_close(*heads_and_gradients, atol=0.02, rtol=0.05)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        *(([], "expected text"), ([[1, 2]], "expected text")),
        *(([[1, 2, 3, n]], rf"ids from .*{n}.*; expected 0 to 23\.") for n in (-1, heads.VOCAB)),
    ],
)
def test_texts_that_cannot_be_learned_are_refused(inputs: list[list[int]], message: str) -> None:
    with pytest.raises(InputError, match=message):
        heads.train_head(target(), inputs, FEW)


@pytest.mark.parametrize(
    "settings",
    [
        *({"steps": 0}, {"batch_size": 0}, {"length": 2}, {"depth": 0}, {"draft_vocab_size": 0}),
        *({"steps": 1.5}, {"learning_rate": 0.0}, {"seconds": 0.0}, {"weight_decay": math.inf}),
        *({"learning_rate": math.nan}, {"learning_rate": "0.1"}),
    ],
)
def test_bad_settings_are_refused_by_their_names(settings: dict[str, Any]) -> None:
    ((name, value),) = settings.items()
    with pytest.raises(InputError, match=f"{name}(=| is ){value!r}; expected a "):
        HeadTraining(**settings)


def text(length: int, seed: int) -> list[int]:
    return tiny.prompt(length, vocab_size=heads.VOCAB, seed=seed)


def test_rounds_are_the_drafts_of_the_head_one_token_at_a_time() -> None:
    """The expected drafts come one by one: each reads the text's states and the guesses so far."""
    head, read = heads.trained(), StateReader(target(), [text(12, 3)]).read([0])
    embedded, states = read.embedded[:, 1:], read.states[:, :-1]
    with torch.no_grad():
        instance = [each.fed for each in rounds(head, read, 0.0, 3)]
        for start in range(9):  # the text's last known state
            inputs = states[:, : start + 1]
            for number in range(3):
                guessed = head(embedded[:, : start + 1 + number], inputs).fed[:, -1:]
                result = instance[number][:, start + number : start + number + 1]
                torch.testing.assert_close(result, guessed, atol=1e-5, rtol=1e-4)
                inputs = torch.cat([inputs, guessed], 1)


@pytest.mark.parametrize("depth", [1, 2])
def test_padding_changes_no_loss(depth: int) -> None:
    head = fresh_head(target(), seeded(0, 0, 0))
    teacher = Teacher(target(), head)
    reader = StateReader(target(), [text(20, 1), text(9, 2)])
    both, long, short = (reader.read(numbers) for numbers in ([0, 1], [0], [1]))
    states = both.states + 50.0 * ~both.real[..., None]
    spoilt = replace(both, states=states, taps=states)
    losses = [head_loss(head, teacher, each, depth=depth) for each in (spoilt, long, short)]
    if depth == 1:
        torch.testing.assert_close(losses[0][0], (19 * losses[1][0] + 8 * losses[2][0]) / 27)
    plain = head_loss(head, teacher, both, depth=depth)
    torch.testing.assert_close(losses[0][0], plain[0])
    assert losses[0][1] == pytest.approx((19 * losses[1][1] + 8 * losses[2][1]) / 27)


def test_later_rounds_begin_where_there_is_something_to_learn() -> None:
    head, whole = heads.trained(), StateReader(target(), [text(14, 5)]).read([0])
    part = replace(whole, real=torch.arange(14)[None] >= 7)
    with torch.no_grad():
        expected, result = (
            [each.fed for each in rounds(head, read, 0.0, 3)] for read in (whole, part)
        )
    torch.testing.assert_close(result[0], expected[0])
    for number in (1, 2):  # of 13 places the first six are not learned from
        assert result[number].shape[1] == 7
        sound = expected[number][:, 6 + number :]
        torch.testing.assert_close(result[number][:, number:], sound, atol=1e-5, rtol=1e-4)


MIXED = [text(n, seed=n) for n in (9, 24, 5, 17)]


def test_states_are_those_of_the_target_and_padding_is_marked() -> None:
    read = StateReader(target(), MIXED).read([3, 1, 2])
    assert read.real.sum(1).tolist() == [17, 24, 5]
    for row, number in enumerate((3, 1, 2)):
        text = MIXED[number]
        real = read.real[row]
        assert real.tolist() == [True] * len(text) + [False] * (24 - len(text))
        rounded = heads.states(target(), text)[0].bfloat16().float()
        torch.testing.assert_close(read.states[row, real], rounded, atol=1e-6, rtol=1e-2)
        embedded = target().embed(torch.tensor(text))
        torch.testing.assert_close(read.embedded[row, real], embedded)


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_copies_are_separate_rows(scale: float) -> None:
    instance, prompts = picture(scale)
    read = StateReader(instance, prompts).read(range(3))
    assert len(read.states) == 3 * instance.copies
    for row, text in enumerate(prompts):
        here = slice(row * instance.copies, (row + 1) * instance.copies)
        rounded = heads.states(instance, text).bfloat16().float()
        torch.testing.assert_close(read.states[here], rounded, atol=1e-6, rtol=1e-2)
        torch.testing.assert_close(read.embedded[here], instance.embed(torch.tensor([text])))


def test_texts_with_too_many_logits_are_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = [text(24, seed) for seed in range(4)]
    whole = StateReader(target(), chunks).read(range(4))
    for logits in (2 * 24, 6):  # whole texts in parts, and their ends alone
        for module in ("verification.tree_session", "verification.causal"):
            monkeypatch.setattr(f"ragspec.{module}.MOST_LOGITS", logits * heads.VOCAB)
        parts = StateReader(target(), chunks).read(range(4))
        torch.testing.assert_close(parts.states, whole.states, atol=1e-6, rtol=1e-2)
        torch.testing.assert_close(parts.embedded, whole.embedded)


@pytest.mark.parametrize("room", [0, 64 * 32, 1 << 20])
def test_states_are_read_once_while_they_fit(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = StateReader(target(), MIXED, cache_bytes=room)
    first, read = reader.read(range(4)), list[Any]()
    monkeypatch.setattr(
        "ragspec.training.batches.read_states",
        lambda target, texts, taps: read.extend(texts) or read_states(target, texts, taps),  # type: ignore
    )
    again = reader.read([2, 0])
    assert torch.equal(again.states[0, :5], first.states[2, :5])
    assert torch.equal(again.embedded[1], first.embedded[0, :9])
    assert bool(read) is (room == 0)
    assert reader._room >= 0
