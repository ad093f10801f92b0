"""Image targets: guidance and draft trees draw the codes of plain decoding without a cache."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from ragspec import Engine, ModelDrafter, Sampling
from ragspec.errors import InputError, PromptTooLongError, SamplingError
from ragspec.sampling.distribution import TokenDistribution
from ragspec.sampling.noise import NoiseStream
from ragspec.trees.draft_tree import DraftTree
from ragspec.visual.models.target import ConditionTable, ImageTarget
from tests.support import image_models
from tests.support.noisy import NoisyTrees

ALL = image_models.SIDE**2
SAMPLED = Sampling(temperature=1.0, top_k=12, seed=3)
CONDITIONS = pytest.mark.parametrize("condition", ["class", "features"])


def engine_of(target: ImageTarget | None = None, drafter: Any = None, budget: Any = 6) -> Engine:
    """Return an engine over a target, None for one of classes; it decodes plainly by default."""
    target = image_models.target(image_models.model()) if target is None else target
    return Engine(target, None, drafter=drafter, budget=budget)


def draw(engine: Engine, rows: Any, sampling: Sampling = SAMPLED, count: int = ALL) -> Any:
    target = engine.target
    assert isinstance(target, ImageTarget)
    several = isinstance(rows, list)
    prompts: Any = [target.prompt(row) for row in rows] if several else target.prompt(rows)
    return engine.generate(prompts, sampling, max_new_tokens=count, ignore_eos=True)


@CONDITIONS
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_trees_draw_what_two_forwards_over_everything_draw(condition: str, scale: float) -> None:
    target = image_models.target(image_models.model(condition), scale)
    truth = {
        tuple(target.prompt(row)): image_models.plain(target.model, row, SAMPLED, 3, scale=scale)
        for row in range(image_models.CLASSES)
    }
    plain, engine = engine_of(target), engine_of(target, NoisyTrees(truth), 9)
    for row in range(image_models.CLASSES):
        sample = draw(engine, row)
        assert sample.tokens == draw(plain, row).tokens == truth[tuple(target.prompt(row))]
        trees = [step.tree for step in sample.steps]
        assert any(len(set(tree.parents)) < len(tree) for tree in trees)  # branches
        assert len(sample.steps) < ALL // 2 + 2
        assert sample.label == "exact"


@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.parametrize("sampling", [SAMPLED, Sampling(temperature=0.0)], ids=str)
@pytest.mark.parametrize("drafted", [False, True])
def test_prompts_may_differ_in_length(scale: float, sampling: Sampling, drafted: bool) -> None:
    model, paddings = image_models.model("features"), (2, 0, 1)
    target = image_models.target(model, scale, padding=paddings)
    seed = sampling.seed if isinstance(sampling.seed, int) else 7
    seeded, alone = replace(sampling, seed=[seed] * 3), replace(sampling, seed=seed)
    plain = partial(image_models.plain, model, scale=scale)
    truth = {
        tuple(target.prompt(row)): plain(row, seeded, seed, padding=padding)
        for row, padding in enumerate(paddings)
    }
    assert truth[tuple(target.prompt(0))] != plain(0, seeded, seed)  # so that it matters
    engine = engine_of(target, NoisyTrees(truth) if drafted else None, 9)
    for sample, tokens in zip(draw(engine, [0, 1, 2], seeded), truth.values(), strict=True):
        assert sample.tokens == tokens
    for row, tokens in enumerate(truth.values()):  # and alone
        assert draw(engine, row, alone).tokens == tokens


def test_a_draft_model_reads_a_padded_prompt_as_the_target_does() -> None:
    model, small = (image_models.model("features", layers=layers) for layers in (2, 1))
    target, *drafts = (image_models.target(m, padding=(2, 0, 1)) for m in (model, model, small))
    for draft, whole in zip(drafts, (True, False), strict=True):
        drafter = ModelDrafter(draft, 4, 1, mode="coupled")
        sample = draw(engine_of(target, drafter), [0, 1, 2])
        for row, padding in enumerate((2, 0, 1)):
            expected = image_models.plain(model, row, SAMPLED, 3, padding=padding)
            assert sample[row].tokens == expected
            drafted = [step for step in sample[row].steps if len(step.tree)]
            assert drafted
            selected = [len(step.path) == len(step.tree) for step in drafted]
            assert all(selected[:-1]) is whole


@CONDITIONS
def test_rows_of_a_batch_and_samples_of_a_prompt_do_not_disturb_each_other(condition: str) -> None:
    model = image_models.model(condition)
    target = image_models.target(model)
    sampling = Sampling(temperature=1.0, seed=[4, 5, 6], n=2)
    truth = {
        tuple(target.prompt(row)): image_models.plain(model, row, sampling, 4 + row)
        for row in range(image_models.CLASSES)
    }
    engine = engine_of(target, NoisyTrees(truth))
    for row, samples in enumerate(draw(engine, [0, 1, 2], sampling)):
        for number, sample in enumerate(samples):
            expected = image_models.plain(model, row, sampling, 4 + row, sample=number)
            assert sample.tokens == expected


@CONDITIONS
@pytest.mark.parametrize("draft_scale", [1.0, 3.0])
def test_a_smaller_model_drafts(condition: str, draft_scale: float) -> None:
    """The draft model is another target with other conditions and guidance."""
    model = image_models.model(condition)
    small = image_models.target(image_models.model(condition, 7, layers=1), draft_scale)
    drafter = ModelDrafter(small, depth=3, width=2, min_expected_gain=0.0)
    sample = draw(engine_of(image_models.target(model), drafter), 1)
    assert sample.tokens == image_models.plain(model, 1, SAMPLED, 3)
    assert sample.report.label == "exact"
    assert sum(len(step.tree) for step in sample.steps) > ALL  # it did draft


def test_logits_of_a_tree_are_those_of_its_paths() -> None:
    """Two rows of unequal length, before and after the cache commits an accepted path."""
    model = image_models.model("features")
    target = image_models.target(model)
    tree = DraftTree.build([5, 6, 7, 8, 9], [-1, -1, 0, 2, 1], "test")
    paths = [(0,), (1,), (0, 2), (0, 2, 3), (1, 4)]
    texts = [(0, [3, 4, 5]), (2, [1])]
    with target.open(2, 8) as session:
        pending = [target.prompt(row) + text for row, text in texts]
        for _ in range(2):
            logits = session.verify(pending, [tree, tree])
            for i, (row, text) in enumerate(texts):
                for node, path in enumerate(paths):
                    whole = text + [int(tree.tokens[step]) for step in path]
                    expected = image_models.guided(model, row, whole)[-1]
                    torch.testing.assert_close(logits[i][node + 1], expected)
            session.commit([(1, 4), (0,)])
            texts = [(0, [3, 4, 5, 6, 9, 2]), (2, [1, 5, 2])]
            pending = [[2], [2]]


def test_a_pair_costs_one_forward_and_scale_one_no_pair() -> None:
    assert image_models.target(image_models.model(), 1.0).copies == 1
    target = image_models.target(image_models.model(), 2.0)
    with target.open(3, 4) as session:
        session.verify([target.prompt(0)] * 3, [DraftTree.empty()] * 3)
        session.commit([()] * 3)
        for row in session.active_rows:
            assert row.cache.layers(1)[0][0].shape[0] == 2


def test_guidance_may_end_early() -> None:
    model = image_models.model()
    sampling = Sampling(temperature=0.0)
    target = image_models.target(model, guidance_interval=(0, 5))
    truth = image_models.plain(model, 1, sampling, count=5)
    while len(truth) < ALL:
        truth.append(int(image_models.guided(model, 1, truth, 1.0)[-1].argmax()))
    for drafter in (None, NoisyTrees({tuple(target.prompt(1)): truth})):
        assert draw(engine_of(target, drafter), 1, sampling).tokens == truth


def test_fewer_condition_positions_leave_the_codes_where_they_were() -> None:
    """Queries and keys of conditions vanish, so a masked condition position may be left out."""
    model = image_models.model("features")
    full = image_models.table(model)
    target = ImageTarget(model, ConditionTable(full.conditions[:1, :2], full.partners[:2]), 3.0)
    assert target.max_length == ALL + 2
    sample = draw(engine_of(target), 0, count=3).tokens
    with torch.no_grad():
        read = partial(model, torch.tensor([sample[:2]]), position_ids=torch.arange(1, 5)[None])
        conditions = (full.conditions[0], full.partners)
        pair = [read(condition_embeds=each[None, :2]).logits[0, 1:] for each in conditions]
    distribution = pair[1] + 3.0 * (pair[0] - pair[1])
    known = TokenDistribution(SAMPLED, NoiseStream(3), 0)
    assert known.select(distribution, [0, 1, 2]).tolist() == sample


def test_inputs_and_logits_of_a_feature_head() -> None:
    model = image_models.model("features")
    target = image_models.target(model)
    embedded = target.embed(torch.tensor([[*target.prompt(1), 4, 5]]))
    assert embedded.shape == (2, 5, 16)
    torch.testing.assert_close(embedded[0, :3], image_models.table(model).conditions[1])
    torch.testing.assert_close(embedded[1, :3], image_models.table(model).partners)
    with torch.no_grad():
        outputs = model(inputs_embeds=embedded, output_hidden_states=True, use_cache=False)
        guided = target.head_logits(outputs.hidden_states[-1], torch.arange(5)[None])
    torch.testing.assert_close(guided[0, 2:], image_models.guided(model, 1, [4, 5]))


def test_codes_beyond_the_picture_are_refused() -> None:
    with pytest.raises(PromptTooLongError, match="17"):
        draw(engine_of(), 0, count=ALL + 1)


@pytest.mark.parametrize("prompt", [[5], [24, 25], [24, 5, 25], [5, 24]])
def test_prompts_without_their_condition_are_refused(prompt: list[int]) -> None:
    with pytest.raises(InputError, match="condition ids"):
        engine_of().generate(prompt, max_new_tokens=2)
    with pytest.raises(InputError, match="expected 0 to 26"):
        engine_of().generate([27], max_new_tokens=2)


@pytest.mark.parametrize("settings", [{"repetition_penalty": 1.2}, {"no_repeat_ngram_size": 2}])
def test_penalties_that_count_the_prompt_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(SamplingError, match="frequency_penalty"):
        draw(engine_of(), 0, Sampling(temperature=1.0, **settings))
    assert len(draw(engine_of(), 0, Sampling(temperature=1.0, frequency_penalty=0.5)).tokens) == ALL


def test_bad_targets_are_refused() -> None:
    model = image_models.model()
    known = image_models.table(model)
    scales: list[Any] = [-1.0, math.nan, math.inf, None, "2"]
    for scale in scales:
        with pytest.raises(InputError, match="guidance_scale"):
            ImageTarget(model, known, scale)
    intervals: list[Any] = [(4, 4), (-1, 3), (3,), (0, 1, 2), 3, (0, 2.5), "ab"]
    for interval in intervals:
        with pytest.raises(InputError, match="guidance_interval"):
            ImageTarget(model, known, 2.0, interval)


def test_its_cost_can_be_measured_past_the_last_code() -> None:
    target = image_models.target(image_models.model())
    assert target.time_forward(64, 1) > 0.0
    engine = engine_of(target, "context", "auto")
    assert draw(engine, 0).tokens == image_models.plain(target.model, 0, SAMPLED, 3)
