"""RAPID: texts equal those of plain decoding, or follow the steered distribution exactly.

Steered texts are compared with two full forwards, and do not depend on drafts.
"""

from typing import Any

import pytest
import torch

from ragspec.drafters.base import DraftContext, DraftRequest
from ragspec.drafters.model.drafter import ModelDrafter, ModelSession
from ragspec.engine.engine import Engine
from ragspec.errors import InputError, UnsupportedModelError
from ragspec.retrievers import ContextDrafter, Rapid, Rasd
from ragspec.retrievers.methods.rapid import Steering
from ragspec.sampling.noise import NoiseStream
from ragspec.sampling.settings import Sampling
from tests.support import tiny
from tests.support.calls import noted
from tests.support.identities import target
from tests.support.noisy import NoisyTrees

SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.9, seed=5),
    Sampling(temperature=0.7, top_p=0.8, frequency_penalty=0.5, seed=2),
    Sampling(temperature=0.8, top_k=7, repetition_penalty=1.3, seed=9),
]
INPUTS: dict[str, Any] = {"max_new_tokens": 40, "ignore_eos": True}


def engine(drafter: Any = None, budget: Any = 6) -> Engine:
    return Engine(target(), tiny.tokenizer(), drafter, budget=budget)


@pytest.mark.parametrize("sampling", SAMPLINGS[:3])
@pytest.mark.parametrize("budget", ["auto", 6])
def test_the_text_is_that_of_plain_decoding(sampling: Sampling, budget: Any) -> None:
    prompt, other = tiny.prompt(60), tiny.prompt(9, seed=4)
    plain = engine(None).generate(prompt, sampling, **INPUTS)
    for drafter in (Rapid(target()), [ContextDrafter(), Rapid(tiny.model(seed=1))]):
        request = engine(drafter, budget)
        for current in (other, None, "a short text", prompt):
            result = request.generate(prompt, sampling, draft_prompt=current, **INPUTS)
            assert result.tokens == plain.tokens and result.label == "exact"


def test_rapid_with_the_same_prompt_equals_the_draft_model() -> None:
    prompt, sampling = tiny.prompt(30), Sampling(temperature=0.9, seed=5)
    for current in (None, prompt):
        result = engine(Rapid(target())).generate(prompt, sampling, draft_prompt=current, **INPUTS)
        model = engine(ModelDrafter(target())).generate(prompt, sampling, **INPUTS)
        assert result.report.per_step_accepted == model.report.per_step_accepted
        assert result.report.accepted_by_source == {"rapid": model.report.accepted}
        assert result.report.draft_acceptance_rate > 0.4  # shared noise gives equal choices
    session = Rapid(target()).open(DraftRequest(tuple(prompt), tiny.VOCAB))
    assert session.distributions() is None
    session.propose(DraftContext(prompt, len(prompt), 20), 4)
    assert session.distributions()


def test_the_drafter_reads_draft_prompt_and_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    read, requests = list[list[int]](), list[Any]()

    def look(session: Any, context: DraftContext, budget: int) -> list[int]:
        assert context.generated == len(context.tokens) - len(current)
        return list(context.tokens)

    monkeypatch.setattr(ModelSession, "propose", noted(ModelSession.propose, read, look))
    opened = noted(ModelDrafter.open, requests, lambda drafter, request: request)
    monkeypatch.setattr(ModelDrafter, "open", opened)
    prompt, current = tiny.prompt(50), tiny.prompt(7, seed=3)
    sources: dict[str, Any] = {"draft_prompt": current, "spans": [(0, 20, 0, 0)]}
    result = engine(Rapid(target())).generate(prompt, **sources, **INPUTS)
    (request,) = requests
    assert request.distribution.prompt_length == len(current)  # penalties count from there
    assert len(request.prompt) == len(current) + 1 and not request.spans
    assert read and not result.report.faults and all(tokens[:7] == current for tokens in read)
    for tokens in read:
        assert tokens[7:] == result.tokens[: len(tokens) - 7]


def test_a_resumed_text_equals_the_whole_text() -> None:
    prompt, current = tiny.prompt(40), tiny.prompt(6, seed=3)
    request = engine(Rapid(target()))
    whole = request.generate(prompt, draft_prompt=current, **INPUTS)
    first = request.generate(prompt, draft_prompt=current, stop_after=11, **INPUTS)
    rest = request.generate(prompt, draft_prompt=current, resume_from=first.tokens, **INPUTS)
    assert rest.tokens == whole.tokens and rest.report.accepted > 0


def test_no_draft_after_the_context_of_the_drafter_is_full() -> None:
    drafter = Rapid(tiny.model(seed=1, max_position_embeddings=32))
    result = engine(drafter).generate(tiny.prompt(60), draft_prompt=tiny.prompt(20), **INPUTS)
    assert result.tokens == engine(None).generate(tiny.prompt(60), **INPUTS).tokens
    assert not result.report.faults


def test_min_expected_gain_ends_a_draft_at_an_unlikely_path() -> None:
    """Stop as the published code does, but by the probability of the whole path."""
    last: dict[float, list[float]] = {}
    for least in (0.0, 0.1):
        drafter = Rapid(ModelDrafter(tiny.model(seed=1), width=1, min_expected_gain=least))
        result = engine(drafter, 10).generate(tiny.prompt(40), Sampling(seed=1), **INPUTS)
        trees = [step.tree for step in result.steps if len(step.tree) > 1]
        last[least] = [float(each) for tree in trees for each in tree.accept_prob[:-1]]
    assert len(last[0.0]) > len(last[0.1]) > 0 and min(last[0.0]) < 0.1 <= min(last[0.1])


def test_containers_need_a_draft_prompt_if_a_part_does() -> None:
    rapid = Rapid(target())
    assert rapid.needs.draft_prompt and engine([ContextDrafter(), rapid]).needs.draft_prompt
    assert Rasd(rapid, [ContextDrafter()]).needs.draft_prompt
    assert not ContextDrafter().needs.draft_prompt and not engine(None).needs.draft_prompt


def test_bad_draft_prompts_and_no_model_are_refused() -> None:
    wrong: dict[str, Any] = {
        "draft_prompt has the token id 999": [5, 999],
        "draft_prompt has the token id None": [None],
        "got int as draft_prompt": 7,
    }
    for message, inputs in wrong.items():
        with pytest.raises(InputError, match=message):
            engine(Rapid(target())).generate(tiny.prompt(), draft_prompt=inputs)
    with pytest.raises(InputError, match="expected one prompt"):
        engine(None).generate([tiny.prompt(), tiny.prompt(seed=1)], draft_prompt=[5])
    with pytest.raises(InputError, match="no draft model"):
        Rapid()


SMALL = 64
STEERED_INPUTS: dict[str, Any] = {"max_new_tokens": 30, "ignore_eos": True}
OF_MODEL = tiny.prompt(7, seed=4)


def other() -> Any:
    return tiny.model(seed=1, dtype=torch.float64)


def steered(
    engine: Engine,
    prompt: list[int],
    sampling: Sampling,
    distribution: Steering,
    draft_prompt: list[int] = OF_MODEL,
    **options: Any,
) -> Any:
    """Generate over a prompt, steered by a model that reads another prompt."""
    inputs = {**STEERED_INPUTS, "transform": distribution, "draft_prompt": draft_prompt, **options}
    return engine.generate(prompt, sampling, **inputs)


def naive(p: torch.Tensor, q: torch.Tensor, eta: float, z: torch.Tensor) -> torch.Tensor:
    """Return the steered logits by equation 6: distributions p, q and scaled logits z [T, V]."""
    plausible = q >= 0.1 * q.max(-1, keepdim=True).values
    return torch.where(plausible, z + eta * (q - p), z)


@pytest.mark.parametrize("eta", [3.0, 20.0])
def test_each_token_is_that_of_two_full_forwards(eta: float) -> None:
    """Compare every token of 100 texts with argmax(log p_hat + g)."""
    long, short = (tiny.model(vocab_size=SMALL, seed=n, dtype=torch.float64) for n in (0, 1))
    prompt, current = (tiny.prompt(n, vocab_size=SMALL, seed=n) for n in (20, 6))
    request = Engine(long, None, Rapid(short, eta=eta), budget=4)
    temperature, new = 0.8, 5
    moved = 0
    for seed in range(100):
        sampling = Sampling(temperature=temperature, seed=seed)
        result = request.generate(
            prompt, sampling, draft_prompt=current, max_new_tokens=new, ignore_eos=True
        )
        rows = []
        with torch.no_grad():
            for model, start in ((long, prompt), (short, current)):
                logits = model(torch.tensor([start + result.tokens])).logits[0]
                rows.append(logits[len(start) - 1 : -1].double() / temperature)
        z, p, q = rows[0], rows[0].softmax(-1), rows[1].softmax(-1)
        noise = NoiseStream(seed, 0).gumbel(list(range(new)), torch.arange(SMALL).expand(new, -1))
        distribution = naive(p, q, eta, z).log_softmax(-1)
        assert (distribution + noise).argmax(-1).tolist() == result.tokens
        moved += int(((z + noise).argmax(-1) != (distribution + noise).argmax(-1)).sum())
        difference = 0.5 * (distribution.exp() - p).abs().sum(-1)
        assert result.report.drift == pytest.approx(float(difference.mean()), abs=1e-9)
    assert moved > 12


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_drafts_do_not_change_steered_text(sampling: Sampling) -> None:
    prompt = tiny.prompt(50)
    distribution = Steering(other())
    plain = steered(engine(), prompt, sampling, distribution)
    assert plain.label == "exact-for(RAPID, eta 10)"
    assert plain.tokens != engine().generate(prompt, sampling, **STEERED_INPUTS).tokens
    noisy = NoisyTrees({tuple(prompt): plain.tokens})
    drafters: list[Any] = ["context", "auto", noisy, Rapid(target()), [noisy, Rapid(other())]]
    for drafter in drafters:
        for budget in (4, 40) if drafter is noisy else (0, "auto") if drafter == "auto" else (4,):
            result = steered(engine(drafter, budget), prompt, sampling, distribution)
            assert result.tokens == plain.tokens and result.label == plain.label
            assert result.report.drift == pytest.approx(plain.report.drift)
            assert drafter is not noisy or budget != 40 or result.report.accepted > 5
    for budget in (4, "auto"):
        current = engine([ContextDrafter(), Rapid(other(), eta=10.0)], budget)
        result = current.generate(prompt, sampling, draft_prompt=OF_MODEL, **STEERED_INPUTS)
        assert result.tokens == plain.tokens


@pytest.mark.parametrize("sampling", SAMPLINGS[:2])
def test_eta_0_is_the_target_alone(sampling: Sampling) -> None:
    prompt = tiny.prompt(40)
    plain = engine().generate(prompt, sampling, **STEERED_INPUTS)
    drafter = Rapid(other(), eta=0.0)
    result = engine(drafter).generate(prompt, sampling, draft_prompt=OF_MODEL, **STEERED_INPUTS)
    assert result.tokens == plain.tokens and result.label == "exact" and result.report.drift is None
    still = engine().generate(prompt, sampling, transform=Steering(other(), 0.0), **STEERED_INPUTS)
    assert still.tokens == plain.tokens and still.report.drift == 0.0


def test_greedy_text_is_steered_in_logits() -> None:
    prompt, eta = tiny.prompt(30), 4.0
    result = steered(engine(), prompt, Sampling(), Steering(other(), eta))
    rows = []
    with torch.no_grad():
        for model, start in ((target(), prompt), (other(), OF_MODEL)):
            rows.append(model(torch.tensor([start + result.tokens])).logits[0][len(start) - 1 : -1])
    moved = naive(rows[0].softmax(-1), rows[1].softmax(-1), eta, rows[0])
    assert moved.argmax(-1).tolist() == result.tokens
    changed = (moved.argmax(-1) != rows[0].argmax(-1)).double().mean()
    assert result.report.drift == pytest.approx(float(changed)) and changed > 0
    assert result.label == "exact-for(RAPID, eta 4)"


@pytest.mark.parametrize("sampling", SAMPLINGS[:2])
def test_steering_ends_where_the_model_cannot_read_the_text(sampling: Sampling) -> None:
    prompt, current = tiny.prompt(30), tiny.prompt(20, seed=3)
    short = tiny.model(seed=1, dtype=torch.float64, max_position_embeddings=32)
    few = tiny.model(seed=1, dtype=torch.float64, vocab_size=40)
    for model, read in ((short, current), (few, [token % 40 for token in current])):
        distribution = Steering(model, 40.0)
        plain = steered(engine(), prompt, sampling, distribution, read)
        noisy = NoisyTrees({tuple(prompt): plain.tokens})
        for budget in (3, 40):
            result = steered(engine(noisy, budget), prompt, sampling, distribution, read)
            assert result.tokens == plain.tokens and result.report.accepted > 5
            assert result.report.drift == pytest.approx(plain.report.drift)
        assert model is few or (plain.report.drift or 0.0) > 0.0


def test_a_resumed_steered_text_equals_the_whole_text() -> None:
    inputs = engine("context"), tiny.prompt(40), SAMPLINGS[1], Steering(other())
    whole, first = steered(*inputs), steered(*inputs, stop_after=11)
    rest = steered(*inputs, resume_from=first.tokens)
    assert rest.tokens == whole.tokens


def test_each_sample_has_separate_steering() -> None:
    inputs = tiny.prompt(24), Sampling(temperature=0.9, n=3, seed=1), Steering(other())
    three, alone = steered(engine("context"), *inputs), steered(engine(), *inputs)
    assert [text.tokens for text in three] == [text.tokens for text in alone]
    assert len({tuple(text.tokens) for text in three}) == 3


@pytest.mark.parametrize("eta", [-1.0, float("nan"), "10", True, None])
def test_bad_settings_are_refused(eta: Any) -> None:
    with pytest.raises(InputError, match=r"eta is .*; expected a number from 0"):
        Rapid(tiny.model(seed=1), eta=eta)


def test_drafters_and_models_that_cannot_steer_are_refused() -> None:
    with pytest.raises(InputError, match="expected a draft model, whose distribution steers"):
        Rapid(ContextDrafter(), eta=10.0)
    with pytest.raises(UnsupportedModelError):
        Steering(tiny.model("qwen3_next"))
    drafter = Rapid(other(), eta=10.0)
    with pytest.raises(InputError, match="expected one of them"):
        engine(drafter).generate(tiny.prompt(), transform=Steering(other()))
    with pytest.raises(InputError, match="each bring a transform"):
        engine([drafter, Rapid(other(), eta=10.0)]).generate(tiny.prompt())
