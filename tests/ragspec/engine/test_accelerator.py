"""Text on an accelerator: every drafter, setting, rule and kind of target, as on the CPU.

The accelerator is a pretended one, which refuses what CUDA refuses, and CUDA's where there is one.
"""

import copy
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch

from ragspec import Engine, Generation, ModelDrafter, Sampling
from ragspec.drafters.base import SourceText
from ragspec.drafters.heads.drafter import HeadDrafter
from ragspec.drafters.method import Sources, build
from ragspec.registry import names, resolve
from ragspec.retrievers import CorpusIndex
from ragspec.verification.causal import CausalTarget
from ragspec.verification.open import open_target
from ragspec.verification.path_rows import PathTarget
from tests.ragspec.engine.test_engine import flat
from tests.support import heads, identities, tiny
from tests.support.architectures import build as architecture
from tests.support.next_tokens import Rows, write
from tests.support.pretend import DEVICES, EVERY_SETTING, Pretend, present, pretend
from tests.support.pretend_steps import Bushes, count_steps

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")  # of steps not captured, too
NEW = 8
BUDGET = 8
PROMPTS = identities.PROMPTS[:2]
TIMED = ("rasd", "auto", "fused")  # their drafts depend on measured times
INPUTS: dict[str, Any] = {"max_new_tokens": NEW, "ignore_eos": True}
SETTINGS = {
    "greedy": Sampling(seed=3),
    "temperature": Sampling(temperature=0.8, seed=3),
    "top-k": Sampling(temperature=0.8, top_k=7, seed=3),
    "top-p": Sampling(temperature=0.8, top_p=0.9, seed=3),
    "min-p": Sampling(temperature=0.9, min_p=0.05, seed=3),
    "penalties": Sampling(repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2),
    "all": EVERY_SETTING,
    "lazy": Sampling(temperature=0.8, top_p=0.9, no_repeat_ngram_size=2, seed=3),
    "several": Sampling(temperature=0.8, n=2, seed=3),
}
RULES = {
    "rejection": ("sampled", None),
    "multi-step": ("sampled", (2, 2)),
    "without-replacement": ("sampled-without-replacement", (2, 2)),
    "k-seq": ("sampled", 2),
    "block": ("sampled", None),
    "typical": ("coupled", None),
    "walk": ("deterministic", None),
}


def target() -> Any:
    return tiny.model("llama", dtype=torch.float64, num_hidden_layers=1)


def smaller() -> Any:
    """Return a draft model that sometimes agrees with the target."""
    return tiny.model("llama", dtype=torch.float64, num_hidden_layers=1, initializer_range=0.25)


@cache
def answers() -> tuple[SourceText, ...]:
    """Return texts that hold most of what will be written, with an error every few tokens."""
    texts = [text for settings in ("greedy", "all") for text in plain(settings)]
    return tuple(
        SourceText(tuple(token ^ (i % 4 == 3) for i, token in enumerate(text)), document=number)
        for number, text in enumerate(texts)
    )


@pytest.fixture(scope="module", params=DEVICES)
def there(request: pytest.FixtureRequest) -> CausalTarget:
    with present(request.param):
        return Engine(pretend(target(), request.param), drafter=None).target


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> CorpusIndex:
    folder = tmp_path_factory.mktemp("stores") / "answers"
    texts = [list(answer.tokens) for answer in answers()]
    return CorpusIndex.build(texts, tiny.VOCAB, folder)


def written(engine: Engine, sampling: Sampling, **options: Any) -> list[Generation]:
    """Return the generations of the prompts."""
    results = flat(engine.generate(PROMPTS, sampling, **(INPUTS | options)))
    assert not any(each.report.faults for each in results)
    return results


def tokens(results: Sequence[Any]) -> list[list[int]]:
    return [each.tokens for each in results]


def steps(results: Sequence[Any]) -> list[list[list[int]]]:
    """Return the tokens of each draft, and its accepted nodes."""
    return [[[*step.tree.tokens.tolist(), -1, *step.path] for step in r.steps] for r in results]


def scored(results: Sequence[Any]) -> list[list[float]]:
    """Return of each token itself and its best rival, then their log-probabilities."""
    return [
        [each.token, each.top[0][0], each.logprob, each.top[0][1], each.top[1][1]]
        for result in results
        for each in result.logprobs
    ]


@cache
def plain(settings: str) -> list[list[int]]:
    """Return what plain decoding writes on the CPU."""
    return tokens(written(Engine(target(), drafter=None), SETTINGS[settings]))


def create(name: str, where: CausalTarget, store: Any) -> Any:
    """Return a registered drafter that runs beside the target."""
    if "head" in resolve("drafter", name).method.needs:
        head = heads.fresh(CausalTarget(target()))
        return HeadDrafter(head.to(where.device), where, min_expected_gain=0.0)
    draft = smaller() if where.device.type == "cpu" else pretend(smaller(), where.device)
    rows: Rows = {(one,): {other: 99} for one, other in pairwise(plain("greedy")[0])}
    table = write(store.path.with_name("table.npy"), rows)
    return build(name, Sources(corpus=store, draft_model=draft, table=table))


@pytest.mark.parametrize("name", names("drafter"))
def test_drafters_draft_as_on_the_cpu(name: str, there: CausalTarget, store: CorpusIndex) -> None:
    def draft(where: CausalTarget) -> list[Any]:
        engine = Engine(where, drafter=create(name, where, store), budget=BUDGET)
        return [written(engine, SETTINGS[each], texts=answers()) for each in ("greedy", "all")]

    expected = [plain("greedy"), plain("all")]
    here = draft(CausalTarget(target()))
    with present(there.device.type):
        far = draft(there)
    assert list(map(tokens, far)) == list(map(tokens, here)) == expected
    if name not in TIMED:
        assert list(map(steps, far)) == list(map(steps, here))


@pytest.mark.parametrize("settings", SETTINGS)
def test_every_setting_leaves_the_text_as_on_the_cpu(settings: str, there: CausalTarget) -> None:
    expected = plain(settings)
    with present(there.device.type):
        drafters: list[Any] = [None, [ModelDrafter(pretend(smaller(), there.device)), "recycling"]]
        for drafter in drafters:
            engine = Engine(there, drafter=drafter, budget=BUDGET)
            assert tokens(written(engine, SETTINGS[settings])) == expected


@pytest.mark.parametrize("settings", ["greedy", "all"])
def test_log_probabilities_are_those_of_the_cpu(settings: str, there: CausalTarget) -> None:
    request = SETTINGS[settings]
    inputs: dict[str, Any] = {"drafter": "context", "budget": BUDGET}
    here = written(Engine(target(), **inputs), request, logprobs=3)
    with present(there.device.type):
        far = written(Engine(there, **inputs), request, logprobs=3)
    for mine, other in zip(scored(here), scored(far), strict=True):
        assert other[:2] == mine[:2]
        # Llama's norms and rotary tables are float32 in every model, and CUDA rounds otherwise.
        rounding = 1e-5 if there.device.type == "cuda" else 1e-6
        assert other[2:] == pytest.approx(mine[2:], rel=rounding)


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_decides_as_on_the_cpu(rule: str, there: CausalTarget) -> None:
    def drafter(model: Any) -> ModelDrafter:
        mode, width = RULES[rule]
        least = None if "sampled" in mode else 0.0
        return ModelDrafter(model, 3, width, mode=mode, min_expected_gain=least)

    inputs: dict[str, Any] = {"rule": rule, "budget": BUDGET}
    here = written(Engine(target(), drafter=drafter(smaller()), **inputs), SETTINGS["top-p"])
    with present(there.device.type):
        draft = pretend(smaller(), there.device)
        far = written(Engine(there, drafter=drafter(draft), **inputs), SETTINGS["top-p"])
    assert tokens(far) == tokens(here)
    assert steps(far) == steps(here)


def test_every_rule_for_texts_is_tried() -> None:
    rooms = {name for name, where in names("rule").items() if "visual" in where}
    assert set(RULES) == set(names("rule")) - rooms


@pytest.mark.parametrize("mode", ["coupled", "deterministic"])
@pytest.mark.parametrize("width", [2, (2, 3, 2)])
def test_a_head_drafts_as_on_the_cpu(mode: str, width: Any, there: CausalTarget) -> None:
    def draft(where: CausalTarget) -> list[Any]:
        head = copy.deepcopy(heads.fresh(CausalTarget(heads.model()))).to(where.device)
        drafter = HeadDrafter(head, where, mode=mode, width=width, min_expected_gain=0.0)
        engine = Engine(where, drafter=drafter, budget=BUDGET)
        results = engine.generate(prompts, SETTINGS["top-p"], **INPUTS)
        assert not any(each.report.faults for each in results)
        return [*map(tokens, [results]), steps(results)]

    prompts = [tiny.prompt(8, vocab_size=heads.VOCAB, seed=300 + seed) for seed in range(2)]
    here = draft(CausalTarget(heads.model()))
    with present(there.device.type):
        assert draft(CausalTarget(pretend(heads.model(), there.device))) == here


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_targets_without_trees_run_there(name: str, there: CausalTarget) -> None:
    def write(model: Any) -> list[list[list[int]]]:
        engine = Engine(PathTarget(model), drafter="context", budget=4)
        matches = [engine.generate(prompts, requests, **INPUTS) for requests in settings]
        assert not any(each.report.faults for results in matches for each in results)
        return list(map(tokens, matches))

    prompts = [[each % 48 for each in prompt] for prompt in PROMPTS]
    settings = SETTINGS["greedy"], SETTINGS["all"]
    here = write(architecture(name))
    with present(there.device.type):
        assert write(pretend(architecture(name), there.device)) == here


COUNTED = {
    "greedy": Sampling(),
    "top-p": Sampling(temperature=0.2, top_p=0.9, seed=3),
    "all": Sampling(temperature=0.9, top_k=60, top_p=0.9, repetition_penalty=1.1, seed=3),
}
CEILINGS = {
    (0, 1, "greedy"): 2,
    (0, 16, "greedy"): 4,
    (15, 1, "greedy"): 4,
    (15, 16, "greedy"): 7,
    (0, 1, "top-p"): 4,
    (0, 16, "top-p"): 36,
    (15, 1, "top-p"): 6,
    (15, 16, "top-p"): 37,
    (15, 16, "all"): 38,
}


@pytest.mark.parametrize(("nodes", "rows", "name"), CEILINGS)
def test_steps_wait_for_the_device_at_most_as_often_as_listed(
    nodes: int, rows: int, name: str
) -> None:
    """For steps without fixed shapes."""
    prompts = [tiny.prompt(9, seed=seed) for seed in range(rows)]
    with Pretend() as device:
        drafter = Bushes(nodes, tiny.VOCAB) if nodes else None
        target = open_target(pretend(tiny.model("llama")), "off")
        engine = Engine(target, drafter=drafter, budget=nodes or 1)
        steps = count_steps(device, engine, prompts, COUNTED[name])
    waits = steps.most(lambda step: step.waits)
    assert waits <= CEILINGS[nodes, rows, name], f"{waits} waits\n{steps}"
