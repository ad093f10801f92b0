"""The costs of a step of fixed shape on an accelerator: one wait, one copy in, few launches."""

import math
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from ragspec import Engine, Sampling
from ragspec.drafters.base import DraftContext
from ragspec.engine.request import Options
from ragspec.errors import ModelError
from ragspec.sampling.batch_distribution import BatchDistribution, DistributionShape
from ragspec.sampling.distribution import TokenDistribution
from ragspec.sampling.noise import NoiseStream
from ragspec.sampling.penalties import PenaltyShape
from ragspec.trees.draft_tree import DraftTree
from ragspec.verification.causal import CausalTarget
from ragspec.verification.open import open_static, open_target
from ragspec.verification.static.layout import MOST_QUERIES
from ragspec.verification.static.step import StepShape
from tests.support import tiny
from tests.support.pretend import EVERY_SETTING, NAME, Pretend, pretend
from tests.support.pretend_steps import Bushes, Steps, count_steps
from tests.support.sessions import follow, prefill, static_session

VOCAB = 20_032  # large enough for candidates to be found block by block, as in large models
SETTINGS = {
    "greedy": Sampling(),
    "temperature": Sampling(temperature=0.3, seed=3),
    "top-p": Sampling(temperature=0.2, top_p=0.9, seed=3),
    "all": replace(EVERY_SETTING, presence_penalty=0.2, min_new_tokens=6),
}
FLAT = Sampling(temperature=1.5, top_k=0, top_p=0.99, repetition_penalty=1.1, seed=3)
EVERY = SETTINGS | {"flat": FLAT}
MIXED = [*SETTINGS.values(), Sampling(temperature=0.2, top_k=7, seed=3)]
KERNELS, BYTES = 120, 64 << 10


def model() -> Any:
    return tiny.model("llama", vocab_size=VOCAB)


def prompts(rows: int) -> list[list[int]]:
    return [tiny.prompt(9, vocab_size=VOCAB, seed=seed) for seed in range(rows)]


@cache
def of_the_forward(rows: int, n: int) -> int:
    """Return the kernels of a forward of transformers alone."""
    with Pretend() as device, torch.no_grad():
        alone = pretend(model())
        ids = torch.zeros(rows, n, dtype=torch.int64).to(NAME)
        mask = torch.zeros(rows, 1, n, n).to(NAME)
        with device.recording() as record:
            alone(ids, mask, ids, DynamicCache(), use_cache=True)
    return record.kernels


def counted(nodes: int, rows: int, sampling: Any) -> Steps:
    with Pretend() as device:
        drafter = Bushes(nodes, VOCAB) if nodes else None
        engine = Engine(open_target(pretend(model()), "eager"), drafter=drafter, budget=nodes or 1)
        return count_steps(device, engine, prompts(rows), sampling)


class LateSiblings(Bushes):
    """Drafts the true next tokens behind wrong siblings, so that accepted slots must move."""

    def __init__(self, texts: list[list[int]]) -> None:
        super().__init__(15, VOCAB)
        self._texts = texts

    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        begun = len(context.tokens)
        (text,) = (each for each in self._texts if each[:begun] == list(context.tokens))
        right = text[begun : begun + 3]
        wrong = [token for token in range(13) if token != right[0]][:12]
        parents = [-1] * 13 + [12, 13]
        return DraftTree.build([*wrong, *right], parents[: 12 + len(right)], "test")


def check_limits(steps: Steps, rows: int, nodes: int, looks: int = 1) -> None:
    """Check the costs of steps that choose tokens `looks` times."""
    kernels, waits = steps.most(lambda step: step.kernels), steps.most(lambda step: step.waits)
    copies = steps.most(lambda step: step.asynchronous)
    crossed = steps.most(lambda step: step.bytes_in + step.bytes_out)
    beside = (kernels - of_the_forward(rows, nodes + 1)) / looks
    assert waits == looks, f"{waits} waits\n{steps}"
    assert copies == 1, f"{copies} copies in\n{steps}"
    assert crossed <= BYTES, f"{crossed} bytes\n{steps}"
    assert beside <= KERNELS, f"{beside} kernels beside the forward\n{steps}"


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("nodes", [0, 15])
@pytest.mark.parametrize("name", EVERY)
def test_a_choice_waits_once_and_launches_few_kernels(name: str, nodes: int, rows: int) -> None:
    """Survivors beyond the candidates cost a second choice, of all rows together."""
    check_limits(counted(nodes, rows, EVERY[name]), rows, nodes, looks=1 + (name == "flat"))


def test_a_second_choice_extends_a_moved_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first token of a path is certain, the one after it is not; slots move twice."""
    choose, looks = BatchDistribution.choose, list[bool]()

    def partly(self: Any, logits: Any, *rest: Any, whole: bool = False) -> Any:
        looks.append(whole)
        tokens, top = choose(self, logits, *rest)
        tokens = tokens.clone()
        if not whole and tokens.shape[1] > 13:
            tokens[:, 13] = -1
        return tokens, top

    call: dict[str, Any] = {"max_new_tokens": 20, "ignore_eos": True}
    plain = Engine(model(), drafter=None).generate(prompts(2), **call)
    texts = [[*one, *two.tokens] for one, two in zip(prompts(2), plain, strict=True)]
    monkeypatch.setattr(BatchDistribution, "choose", partly)
    engine = Engine(open_target(model(), "eager"), drafter=LateSiblings(texts), budget=15)
    results = engine.generate(prompts(2), **call)
    assert [text.tokens for text in results] == [text.tokens for text in plain] and any(looks)


@pytest.mark.parametrize("sampling", [Sampling(seed=3), SETTINGS["temperature"], SETTINGS["all"]])
@pytest.mark.parametrize(
    ("dtype", "place", "value"),
    [
        (torch.float32, ..., math.nan),
        (torch.bfloat16, 5, math.nan),
        (torch.float16, ..., -math.inf),
    ],
)
def test_non_finite_logits_fail_their_row_alone(
    dtype: torch.dtype, sampling: Sampling, place: Any, value: float
) -> None:
    with Pretend():
        broken = pretend(model()).to(dtype)
        engine = Engine(open_target(broken, "eager"), drafter="context", budget=6)
        call = Options(max_new_tokens=12, ignore_eos=True)
        expected = engine.generate(prompts(3), sampling, **call)
        bad = expected[1].tokens[4]
        assert bad not in [*expected[0].tokens, *expected[2].tokens, *expected[1].tokens[:4]]

        def damage(module: Any, args: Any, inputs: Any, output: Any) -> None:
            for row, column in (inputs["input_ids"].cpu() == bad).nonzero().tolist():
                output.logits[row, column, place] = value

        broken.register_forward_hook(damage, with_kwargs=True)
        owner, requests = object(), engine.prepare(prompts(3), sampling, call)[0]
        handles = [engine.add(request, owner) for request in requests]
        while engine.step():
            pass
        with pytest.raises(ModelError, match="logits are not finite numbers at generated token 6;"):
            handles[1].result()
        for row in (0, 2):
            assert handles[row].result().tokens == expected[row].tokens


def test_a_second_choice_leaves_other_rows_unchanged() -> None:
    """Rows whose tokens are certain beside one whose tokens are chosen again."""
    samplings = [FLAT, Sampling(temperature=2.0), SETTINGS["greedy"], SETTINGS["all"]]
    distributions = [
        TokenDistribution(each, NoiseStream(row), 9) for row, each in enumerate(samplings)
    ]
    tree = DraftTree.chain([7, 8, 9], "test")
    rows = len(distributions)
    with static_session(open_static(CausalTarget(model()), "eager"), rows, 64) as session:
        prefill(session, *prompts(rows))
        texts = [[*text, 1] for text in prompts(rows)]
        logits = follow(session, [[1]] * rows, [tree] * rows, distributions, texts)
        assert session.chosen is not None
        for row, (text, current) in enumerate(zip(texts, distributions, strict=True)):
            paths = [[7, 8, 9][:depth] for depth in range(4)]
            scores = current.process(logits[row][:4], text, paths)
            assert session.chosen[row] == current.select(scores, [1, 2, 3, 4]).tolist()


@pytest.mark.parametrize(("name", "rows"), [("greedy", 1), ("all", 16), ("flat", 3)])
def test_accepted_slots_move_without_the_host(name: str, rows: int) -> None:
    new, sampling = 16, EVERY[name]
    plain = Engine(model(), drafter=None)
    results = plain.generate(prompts(rows), sampling, max_new_tokens=new, ignore_eos=True)
    texts = [
        [*prompt, *result.tokens] for prompt, result in zip(prompts(rows), results, strict=True)
    ]
    with Pretend() as device:
        target = open_target(pretend(model()), "eager")
        engine = Engine(target, drafter=LateSiblings(texts), budget=15)
        steps = count_steps(device, engine, prompts(rows), sampling, new)
    assert len(steps.records) < new // 2, "too few tokens were accepted"
    check_limits(steps, rows, 15, looks=1 + (name == "flat"))


def test_rows_of_all_distributions_at_once() -> None:
    rows, result, tree = 16, Steps(), DraftTree.chain(list(range(15)), "test")
    distributions = [
        TokenDistribution(MIXED[row % len(MIXED)], NoiseStream(row), 9) for row in range(rows)
    ]
    with Pretend() as device, torch.no_grad():
        target, texts = open_static(CausalTarget(pretend(model())), "eager"), prompts(rows)
        with static_session(target, rows, 64) as session:
            prefill(session, *texts)
            for token in range(3):
                texts = [[*text, token] for text in texts]
                with device.recording() as record:
                    follow(session, [[token]] * rows, [tree] * rows, distributions, texts)
                    session.commit([()] * rows)
                result.records.append(record)
    result.records = result.records[1:]
    check_limits(result, rows, len(tree))


def test_the_widest_step() -> None:
    check_limits(counted(MOST_QUERIES - 1, 1, SETTINGS["all"]), 1, MOST_QUERIES - 1)
    distribution = DistributionShape(penalties=PenaltyShape(repetition=True))
    widest = StepShape(16, MOST_QUERIES, 128, distribution)
    assert 8 * widest.rows * (widest.width + 2 * MOST_QUERIES) <= BYTES
