"""For each setting that makes a processor, the bridge returns transformers' text or an error.

Most tests use padded batches, because a processor for a batch counts the padding.
"""

import copy
from typing import Any

import pytest
import torch
from transformers import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList

from ragspec.bridge import Speculation, generate
from ragspec.errors import InputError
from ragspec.sampling.distribution import TokenDistribution
from tests.support import tiny
from tests.support.calls import CountingCriterion, StatefulProcessor
from tests.support.generation_settings import (
    NEW,
    PAD,
    PROMPTS,
    SAMPLED,
    greedy,
    padded,
    plain,
    read_by_transformers,
)
from tests.support.noisy import NoisyTrees

COMMON: dict[str, Any] = {"max_new_tokens": NEW, "eos_token_id": None, "pad_token_id": PAD}
NAMES = list(greedy())
# Without effect after prompts of these lengths; see `test_a_first_token_that_is_forced`.
WITHOUT_EFFECT = {"forced_bos_token_id"}


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.model("llama")


def check_greedy(model: Any, prompts: list[list[int]], **request: Any) -> Any:
    """Check that our text, with drafts of which some are right, is transformers'; return it."""
    arguments = {**padded(prompts), **COMMON, "do_sample": False, **request}
    theirs = model.generate(**arguments)
    start = arguments["input_ids"].shape[1]
    truth = {tuple(p): row[start:].tolist() for p, row in zip(prompts, theirs, strict=True)}
    spec = Speculation(drafter=NoisyTrees(truth), budget=6)
    ours = generate(model, speculation=spec, **arguments)
    assert sum(report.accepted for report in spec.reports) > 0
    assert {generation.label for generation in spec.generations} == {"exact"}
    assert torch.equal(generate(model, speculation=Speculation(drafter=None), **arguments), ours)
    assert torch.equal(ours, theirs)
    return theirs


def test_every_setting_that_makes_a_processor_is_tried() -> None:
    tried = {name.split(",")[0] for name in (*NAMES, *SAMPLED)} - {"several"}
    assert read_by_transformers() == tried


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("name", NAMES)
def test_greedy_text_of_a_padded_batch_is_that_of_transformers(
    name: str, order: tuple[int, ...], model: Any
) -> None:
    prompts = [PROMPTS[row] for row in order]
    theirs = check_greedy(model, prompts, **greedy()[name])
    changed = [row[-NEW:].tolist() for row in theirs] != [plain()[row] for row in order]
    assert changed or theirs.shape[1] < len(prompts[0]) + NEW or name in WITHOUT_EFFECT


@pytest.mark.parametrize("name", NAMES)
def test_greedy_text_of_one_padded_row_is_that_of_transformers(name: str, model: Any) -> None:
    row = {key: value[1:] for key, value in padded(PROMPTS).items()}
    arguments = {**row, **COMMON, "do_sample": False, **greedy()[name]}
    spec = Speculation(drafter="context", budget=6)
    assert torch.equal(generate(model, speculation=spec, **arguments), model.generate(**arguments))


@pytest.mark.parametrize("prompts", [[[5]], [[5], [40]], [[5, 6, 7], [40]]])
def test_a_first_token_that_is_forced(prompts: list[list[int]], model: Any) -> None:
    request = {"forced_bos_token_id": 7, "begin_suppress_tokens": [plain()[0][0], 62, 91]}
    theirs = check_greedy(model, prompts, **request)
    start = max(map(len, prompts))
    assert (theirs[:, start] == 7).all() == (start == 1)


def test_infinite_scores_of_transformers_are_taken(model: Any) -> None:
    """A forced end token less a forbidden one has such scores."""
    request = {"remove_invalid_values": True, "exponential_decay_length_penalty": (3, 1.2)}
    request |= {"min_new_tokens": 5, "suppress_tokens": [plain()[0][1]], "forced_eos_token_id": 3}
    request["eos_token_id"] = [3, plain()[0][1]]
    check_greedy(model, [[5, 6, 7], [40]], **request)


NEGATIVE = padded([[60, 61, 62, 63], [33, 34]])


@pytest.mark.parametrize("use_cache", [True, False])
def test_negative_prompts_are_those_of_their_rows(use_cache: bool, model: Any) -> None:
    request: dict[str, Any] = {
        "guidance_scale": 1.8,
        "negative_prompt_ids": NEGATIVE["input_ids"],
        "negative_prompt_attention_mask": NEGATIVE["attention_mask"],
        "use_cache": use_cache,
    }
    check_greedy(model, PROMPTS, **request)
    three = NEGATIVE["input_ids"][[0, 1, 1]]
    with pytest.raises(InputError, match="3 rows of negative_prompt_ids for 2 prompts"):
        generate(model, **padded(PROMPTS), **COMMON, **request | {"negative_prompt_ids": three})


def test_allowed_tokens_are_requested_by_row(model: Any) -> None:
    rows: set[int] = set()

    def allowed(row: int, ids: torch.Tensor) -> list[int]:
        rows.add(row)
        assert ids.shape[0] >= len(PROMPTS[0])
        return list(range(10 + 20 * row, 30 + 20 * row))

    check_greedy(model, PROMPTS, prefix_allowed_tokens_fn=allowed)
    assert rows == {0, 1}
    # A number is that of a prompt since transformers 5.24, of a text before.
    sampled = {**padded(PROMPTS), **COMMON, "do_sample": True, "num_return_sequences": 2}
    sampled["prefix_allowed_tokens_fn"] = lambda row, ids: [10 + row]
    ours = generate(model, speculation=Speculation(), **sampled)
    assert torch.equal(ours, model.generate(**sampled))


def test_a_stateful_processor_gets_the_ids_of_transformers(model: Any) -> None:
    arguments = {**padded(PROMPTS), **COMMON, "do_sample": False}
    theirs = model.generate(**arguments, logits_processor=[StatefulProcessor()])
    inputs = StatefulProcessor()
    truth = {tuple(p): row[6:].tolist() for p, row in zip(PROMPTS, theirs, strict=True)}
    spec = Speculation(drafter=NoisyTrees(truth), budget=6)
    ours = generate(model, speculation=spec, **arguments, logits_processor=[inputs])
    assert torch.equal(ours, theirs)
    assert sum(report.accepted for report in spec.reports) > 0
    assert inputs.calls == []  # each row had a copy
    generate(model, PROMPTS_OF_ONE, speculation=spec, **COMMON, logits_processor=[inputs])
    assert len(inputs.calls) == NEW  # a single one has the object itself
    silent = type("Silent", (), {"__call__": lambda *_: None})()
    with pytest.raises(InputError, match=r"<function Silent at .* returned NoneType"):
        generate(model, PROMPTS_OF_ONE, speculation=spec, **COMMON, logits_processor=[silent])


PROMPTS_OF_ONE = torch.tensor(PROMPTS[:1])


@pytest.mark.parametrize("kind", ["strings", "length", "local", "state"])
def test_criteria_count_the_padding_too(kind: str, model: Any) -> None:
    tokenizer = tiny.tokenizer()
    one, two = plain()
    ends = {"eos_token_id": [95], "pad_token_id": PAD}  # with none, transformers pads nothing
    stops = [tokenizer.decode(one[3:5]), tokenizer.decode(two[5:7])]

    def local(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.tensor([row.shape[0] > 9 for row in ids])

    request: dict[str, Any] = {
        "strings": {"stop_strings": stops, "tokenizer": tokenizer},
        "length": {"stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(10)])},
        "local": {"stopping_criteria": [local]},
        "state": {"stopping_criteria": [CountingCriterion(4)]},
    }[kind]
    arguments = {**padded(PROMPTS), **COMMON, **ends, "do_sample": False, **request}
    ours = generate(model, speculation=Speculation(drafter=None, tokenizer=tokenizer), **arguments)
    theirs = model.generate(**arguments)
    assert torch.equal(ours, theirs)
    assert theirs.shape[1] < 6 + NEW


def test_criteria_of_the_caller_replace_those_of_the_settings(model: Any) -> None:
    end = plain()[0][2]
    inputs = [MaxLengthCriteria(6 + NEW + 3), EosTokenCriteria(end)]
    arguments = {**padded(PROMPTS), **COMMON, "do_sample": False, "stopping_criteria": inputs}
    for ends in ([plain()[1][1]], None, [10**6]):
        arguments["eos_token_id"] = ends
        theirs = model.generate(**arguments)
        assert torch.equal(generate(model, **arguments), theirs)
        assert theirs.shape[1] == 6 + NEW + 3


def test_end_tokens_outside_the_vocabulary_are_ignored(model: Any) -> None:
    ends = [10**6, plain()[0][3], plain()[1][2]]
    check_greedy(model, PROMPTS, eos_token_id=ends, min_new_tokens=5)


def test_positions_that_do_not_count_the_tokens_are_refused(model: Any) -> None:
    inputs = padded(PROMPTS)
    counted = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    spec = Speculation(drafter=None)
    arguments = {**inputs, **COMMON, "do_sample": False}
    ours = generate(model, speculation=spec, position_ids=counted, **arguments)
    assert torch.equal(ours, model.generate(position_ids=counted, **arguments))
    twice = {**arguments, "position_ids": counted, "do_sample": True, "num_return_sequences": 2}
    assert len(generate(model, speculation=spec, **twice)) == 4
    for wrong in (counted + 1, counted + (counted == 2), counted[:, :-1], counted[:, :1]):
        with pytest.raises(InputError, match="position_ids"):
            generate(model, speculation=spec, position_ids=wrong, **arguments)
    plain_ids = torch.arange(6)[None]
    assert generate(model, PROMPTS_OF_ONE, position_ids=plain_ids, **COMMON).shape == (1, 6 + NEW)


@pytest.mark.parametrize("call", [{}, {"repetition_penalty": 1.0}, {"suppress_tokens": [62]}])
def test_processors_of_the_models_config_apply_once(call: dict[str, Any]) -> None:
    model = copy.deepcopy(tiny.model("llama"))
    model.generation_config.repetition_penalty = 1.2
    model.generation_config.suppress_tokens = [plain()[0][1], plain()[1][1]]
    check_greedy(model, PROMPTS, **call)


def prepared(model: Any, arguments: dict[str, Any]) -> Any:
    """Return the processors that transformers makes of a call."""
    selected: list[Any] = []

    def keep(model: Any, input_ids: Any, logits_processor: Any, **rest: Any) -> Any:
        selected.append(logits_processor)
        return input_ids

    model.generate(**arguments, custom_generate=keep)
    return selected[0]


@pytest.mark.parametrize("name", [*SAMPLED, *NAMES])
def test_the_distribution_of_sampled_text_is_that_of_transformers(
    name: str, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each position of a padded batch the tokens have the distribution of transformers."""
    request = SAMPLED[name] if name in SAMPLED else greedy()[name]
    inputs = padded(PROMPTS)
    arguments = {**inputs, **COMMON, "do_sample": True, "temperature": 1.3, "top_k": 0, **request}
    select, distributions, result = TokenDistribution.select, [], {}

    def watched(dist: TokenDistribution, scores: torch.Tensor, indices: Any) -> torch.Tensor:
        if dist not in distributions:
            distributions.append(dist)
        result[distributions.index(dist), indices[0]] = dist.probabilities(scores)[0]
        return select(dist, scores, indices)

    monkeypatch.setattr(TokenDistribution, "select", watched)
    spec = Speculation(drafter=None, seed=3)
    ours = generate(model, speculation=spec, **arguments)
    processors, mask = prepared(model, arguments), inputs["attention_mask"]
    for index in range(ours.shape[1] - 6):
        ids = ours[:, : 6 + index]
        visible = torch.cat([mask, torch.ones(2, index, dtype=torch.int64)], 1)
        places = (visible.cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            logits = model(ids, attention_mask=visible, position_ids=places).logits[:, -1].float()
            distribution = processors(ids, logits).double().softmax(-1)
        for row, generation in enumerate(spec.generations):
            if index < len(generation.tokens):
                torch.testing.assert_close(result[row, index], distribution[row], atol=2e-5, rtol=0)
    assert len(result) == sum(len(generation.tokens) for generation in spec.generations)


def test_several_sequences_have_separate_processors(model: Any) -> None:
    """Each sample of a batch equals that of its prompt alone."""
    arguments = {**padded(PROMPTS), **COMMON, "do_sample": True, "num_return_sequences": 2}
    for name in ("guidance_scale", "watermarking_config, synthid", "encoder_repetition_penalty"):
        request = {**arguments, **greedy()[name]}
        ours = generate(model, speculation=Speculation(drafter=None, seed=1), **request)
        for row in (0, 1):
            prompt = {key: value[row : row + 1] for key, value in padded(PROMPTS).items()}
            alone = {**request, **prompt}
            only = generate(model, speculation=Speculation(drafter=None, seed=1), **alone)
            assert torch.equal(ours[2 * row : 2 * row + 2], only)
