from __future__ import annotations

from typing import Any

import pytest
import torch

from ragspec.drafters.build import with_prediction
from ragspec.drafters.combined import within
from ragspec.drafters.fuse import Fuse
from ragspec.engine.engine import Engine
from ragspec.engine.output import Generation
from ragspec.engine.prompts import ANCHOR, read_prediction
from ragspec.errors import InputError
from ragspec.retrievers.methods.cascade import Cascade
from ragspec.retrievers.methods.context import ContextDrafter
from ragspec.retrievers.methods.hierarchy_drafting import HierarchyDrafter
from ragspec.retrievers.methods.token_recycling import NeighbourDrafter
from ragspec.rules.rejection import ChainRejection
from ragspec.rules.walk import Walk
from ragspec.sampling.settings import Sampling
from ragspec.trees.draft_tree import PREDICTION, DraftKind
from tests.support import tiny
from tests.support.fixed import FixedDrafter

SAMPLINGS = {"greedy": Sampling(), "sampled": Sampling(temperature=0.8, top_p=0.95)}
PROMPT = tiny.prompt(12)
TOKENIZER = tiny.tokenizer()
NEW = 30


def read(prediction: Any, prompts: int = 1, tokenizer: Any = TOKENIZER) -> list[Any]:
    inputs = [[*PROMPT, number] for number in range(prompts)]
    result = read_prediction(prediction, inputs, tokenizer, tiny.VOCAB)
    return [None if text is None else list(text.tokens[ANCHOR:]) for text in result]


@pytest.mark.parametrize(
    "form",
    [
        "abc",
        [65, 66, 67],
        {"type": "content", "content": "abc"},
        {"type": "content", "content": [{"type": "text", "text": "ab"}, {"text": "c"}]},
    ],
)
def test_every_form_is_read(form: Any) -> None:
    assert read(form) == [[65, 66, 67]]
    assert read(form, 2) == [[65, 66, 67]] * 2
    assert read([form, None], 2) == [[65, 66, 67], None]


def test_no_prediction_is_no_text() -> None:
    assert read(None) == []
    assert read("") == read([]) == [None]


def test_the_end_of_the_prompt_leads_into_it() -> None:
    (text,) = read_prediction([7], [PROMPT], None, tiny.VOCAB)
    assert text is not None
    assert text.tokens == (*PROMPT[-ANCHOR:], 7)
    assert (text.document, text.offset) == (PREDICTION, -ANCHOR)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (3.5, "float as a prediction; expected a text"),
        (b"abc", "bytes as a prediction; expected a text"),
        ([1, "x"], "list as a prediction"),
        ({"content": None}, "without text"),
        ([[tiny.VOCAB]], "token id 97; expected 0 to 96"),
        (["a", "b"], "2 predictions for 1 prompts"),
    ],
)
def test_other_forms_are_reported(form: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read(form)
    with pytest.raises(InputError, match="no tokenizer"):
        read("abc", tokenizer=None)


def generate(prediction: Any, sampling: Sampling, drafter: str | None = "context") -> Generation:
    model = tiny.model("llama", dtype=torch.float64)
    engine = Engine(model, TOKENIZER, drafter=drafter, budget=8)
    result: Generation = engine.generate(
        PROMPT, sampling, max_new_tokens=NEW, ignore_eos=True, prediction=prediction
    )
    return result


@pytest.mark.parametrize("settings", SAMPLINGS)
def test_a_right_prediction_saves_forwards_and_a_wrong_one_changes_nothing(settings: str) -> None:
    sampling = SAMPLINGS[settings]
    sampling = Sampling(temperature=sampling.temperature, top_p=sampling.top_p, seed=4)
    plain = generate(None, sampling, drafter=None)
    right = generate(plain.tokens, sampling)
    assert right.tokens == plain.tokens
    assert right.report.forwards <= 6
    assert right.report.accepted_prediction_tokens >= NEW - 8
    half = [(t + 1) % tiny.VOCAB if i % 5 == 4 else t for i, t in enumerate(plain.tokens)]
    wrong = generate(half, sampling)
    assert wrong.tokens == plain.tokens
    assert wrong.report.rejected_prediction_tokens > 0
    assert right.report.forwards < wrong.report.forwards < plain.report.forwards
    assert generate("nothing of the kind", sampling).tokens == plain.tokens
    assert generate(half, sampling, drafter=None).tokens == plain.tokens


def test_it_is_a_source_where_the_drafter_reads_no_texts() -> None:
    plain = generate(None, Sampling(), drafter=None)
    for drafter in ("recycling", "rasd", "hierarchy"):
        right = generate(plain.tokens, Sampling(), drafter=drafter)
        assert right.tokens == plain.tokens
        assert right.report.accepted_prediction_tokens >= NEW - 8
        assert right.report.accepted_by_source["prediction"] >= NEW - 8


def test_it_is_joined_only_where_nothing_else_reads_it_and_the_rule_can_judge_both() -> None:
    walk, chain = Walk(), ChainRejection()
    context, recycling = ContextDrafter(), NeighbourDrafter()
    joined = with_prediction(Fuse([recycling]), walk)
    assert [each.name for each in within(joined)] == ["fuse", "context", "recycling"]
    for reads in (Fuse([context]), Fuse([recycling, Cascade([context])]), HierarchyDrafter()):
        assert with_prediction(reads, walk) is reads
    sample = Fuse([FixedDrafter([1], kind=DraftKind.SAMPLED)])
    assert with_prediction(sample, chain) is sample


def test_each_prompt_of_a_batch_has_its_its() -> None:
    model = tiny.model("llama", dtype=torch.float64)
    prompts = [tiny.prompt(9, seed=seed) for seed in range(3)]
    plain = Engine(model, drafter=None).generate(prompts, max_new_tokens=NEW, ignore_eos=True)
    engine = Engine(model, drafter="context", budget=8, batch_size=2)
    options: Any = {"max_new_tokens": NEW, "ignore_eos": True}
    result = engine.generate(prompts, prediction=[g.tokens for g in plain], **options)
    assert [g.tokens for g in result] == [g.tokens for g in plain]
    assert all(g.report.accepted_prediction_tokens > NEW / 2 for g in result)


def test_nothing_of_a_prediction_is_cited() -> None:
    tokens = generate(None, Sampling()).tokens
    steps = generate(tokens, Sampling()).steps
    documents = {int(step.tree.origin[node][0]) for step in steps for node in step.path}
    assert documents <= {-1, PREDICTION}
    assert PREDICTION in documents


def test_half_a_surrogate_pair_is_no_reason_to_stop() -> None:
    tokenizer = tiny.bpe_tokenizer()
    expected = read("a\ufffdb", tokenizer=tokenizer)
    assert read("a\ud83db", tokenizer=tokenizer) == expected
    parts = {"type": "content", "content": [{"type": "text", "text": "a\ud83db"}]}
    assert read(parts, tokenizer=tokenizer) == expected
