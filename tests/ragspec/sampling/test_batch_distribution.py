"""Distributions of all rows at once: the tokens of `TokenDistribution`, in few kernels."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode

from ragspec.sampling.batch_distribution import BatchDistribution, DistributionShape
from ragspec.sampling.distribution import TokenDistribution
from ragspec.sampling.noise import NoiseStream
from ragspec.sampling.penalties import Penalties
from ragspec.sampling.processors import HFProcessor, Processor, build_processors
from ragspec.sampling.settings import Sampling

LONGEST = 600
DISTRIBUTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "not sampled": {"temperature": 1.0, "do_sample": False, "top_k": 3},
    "temperature": {"temperature": 0.7},
    "hot": {"temperature": 40.0},
    "top-k": {"top_k": 7},
    "top-k 1": {"top_k": 1},
    "top-k of hundreds": {"top_k": 200, "temperature": 1.1},
    "top-k beyond the vocabulary": {"top_k": 100_000, "top_p": 0.95},
    "top-p": {"top_p": 0.8},
    "top-p tiny": {"top_p": 1e-9},
    "top-p almost one": {"top_p": 1 - 1e-12, "temperature": 0.2},
    "min-p": {"min_p": 0.1, "temperature": 1.3},
    "min-p one": {"min_p": 1.0},
    "top-k top-p": {"top_k": 20, "top_p": 0.6},
    "all": {"top_k": 30, "top_p": 0.9, "min_p": 0.05, "temperature": 0.9},
}
MIXED = [*DISTRIBUTIONS, None]
PENALTIES: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.3},
    "reward": {"repetition_penalty": 0.7, "top_k": 20},
    "frequency": {"frequency_penalty": 0.7, "temperature": 0.0},
    "presence": {"presence_penalty": -1.5, "top_p": 0.9},
    "bias": {"logit_bias": {3: 2.5, 7: -1.0, 11: float("-inf")}, "min_p": 0.05},
    "minimum": {"min_new_tokens": 30},
    "every": {
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.2,
        "presence_penalty": 0.3,
        "logit_bias": {0: 1.0, 5: -4.0},
        "min_new_tokens": 33,
        "top_k": 40,
        "top_p": 0.95,
    },
}
ALL = DISTRIBUTIONS | PENALTIES
PROMPT = 12
ENDS = (2, 9, 10**6)  # configs name ids that a model does not have


@dataclass
class Batch:
    """Trees of B rows, in the forms of the host and of the device."""

    distributions: Sequence[TokenDistribution | None]
    texts: list[list[int]]
    paths: list[list[list[int]]]
    tokens: torch.Tensor
    see: torch.Tensor
    indices: torch.Tensor

    @classmethod
    def of(
        cls, distributions: Sequence[TokenDistribution | None], n: int, size: int, seed: int = 0
    ) -> Batch:
        draw = random.Random(seed)
        few = min(size, 16)  # so that tokens repeat
        texts = [
            [draw.randrange(few) for _ in range(draw.randrange(PROMPT + 1, 50))]
            for _ in distributions
        ]
        tokens = torch.tensor([[draw.randrange(few) for _ in range(n)] for _ in distributions])
        tokens[:, 0] = torch.tensor([text[-1] for text in texts])
        see = torch.eye(n, dtype=torch.bool).repeat(len(distributions), 1, 1)
        paths: list[list[list[int]]] = []
        for row in range(len(distributions)):
            paths.append([[]])
            for node in range(1, n):
                parent = draw.randrange(node)
                paths[row].append([*paths[row][parent], int(tokens[row, node])])
                see[row, node] |= see[row, parent]
        indices = [
            [len(text) - PROMPT + len(path) for path in row]
            for text, row in zip(texts, paths, strict=True)
        ]
        return cls(distributions, texts, paths, tokens, see, torch.tensor(indices))

    def create(self, size: int) -> BatchDistribution:
        distributions = BatchDistribution(len(self.distributions), size, "cpu", LONGEST)
        self.fill(distributions)
        return distributions

    def fill(self, distributions: BatchDistribution) -> None:
        for row, (each, text) in enumerate(zip(self.distributions, self.texts, strict=True)):
            distributions.set(row, each, text)

    def chosen(
        self, distributions: BatchDistribution, logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens, and the rows some of whose tokens are left to the host."""
        tokens, _ = distributions.choose(logits, self.indices, self.tokens, self.see)
        return tokens, (tokens < 0).any(-1)

    def selection(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the tokens of the reference."""
        rows = []
        for row, distribution in enumerate(self.distributions):
            if distribution is None:
                rows.append(logits[row].argmax(-1))
                continue
            scores = distribution.process(logits[row], self.texts[row], self.paths[row])
            rows.append(distribution.select(scores, self.indices[row].tolist()))
        return torch.stack(rows)

    def check(self, logits: torch.Tensor) -> torch.Tensor:
        """Assert the reference's tokens of rows that are not beyond; return which are.

        These have them, too, where the whole vocabulary is looked at.
        """
        distributions, selection = self.create(logits.shape[-1]), self.selection(logits)
        tokens, beyond = self.chosen(distributions, logits)
        known = tokens >= 0
        assert tokens.dtype == torch.int64
        assert torch.equal(tokens[known], selection[known])
        if not known.all():
            whole, _ = distributions.choose(logits, self.indices, self.tokens, self.see, whole=True)
            unfit = known | ((logits.isnan() | (logits == torch.inf)).any(-1) & (whole < 0))
            unfit |= (logits == -torch.inf).all(-1)
            assert torch.equal(whole[~unfit], selection[~unfit])
        return beyond


def distribution(number: int, settings: dict[str, Any]) -> TokenDistribution:
    sampling = Sampling(**{"temperature": 1.0, **settings})
    processors = build_processors(sampling, PROMPT, ENDS)
    return TokenDistribution(sampling, NoiseStream(2**63 + 7 * number, number), PROMPT, processors)


def random_logits(rows: int, n: int, size: int, scale: float = 4.0, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(rows, n, size, generator=generator, dtype=torch.float64)


def check(
    distributions: Sequence[TokenDistribution | None], logits: torch.Tensor, seed: int = 0
) -> torch.Tensor:
    return Batch.of(distributions, logits.shape[1], logits.shape[2], seed).check(logits)


def named(names: Sequence[str | None]) -> list[TokenDistribution | None]:
    return [None if name is None else distribution(i, ALL[name]) for i, name in enumerate(names)]


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("size", "n"), [(50, 40), (1000, 20), (9000, 8), (128_000, 2)])
def test_mixed_rows_get_tokens_of_their_distributions(size: int, n: int, kind: torch.dtype) -> None:
    logits = random_logits(len(MIXED), n, size).to(kind)
    beyond = check(named(MIXED), logits)
    certain = [i for i, name in enumerate(MIXED) if name in (None, "greedy", "temperature", "hot")]
    assert not beyond[certain].any()
    assert int(beyond.sum()) <= (len(MIXED) // 2 if size > 8192 else 4)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_rows_of_one_kind(name: str, kind: torch.dtype) -> None:
    logits = random_logits(4, 12, 3000, scale=6.0, seed=3).to(kind)
    assert int(check(named([name] * 4), logits).sum()) < (5 if name == "top-p almost one" else 2)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("size", "n"), [(50, 30), (1000, 16), (20_000, 3)])
def test_penalties_are_those_of_each_path(size: int, n: int, kind: torch.dtype) -> None:
    names = [*PENALTIES, "top-p", "greedy", None]
    for seed in range(3):
        logits = random_logits(len(names), n, size, seed=seed)
        logits[..., :16] += 8.0  # the tokens of texts and settings, so that they matter
        assert int(check(named(names), logits.to(kind), seed).sum()) < 3


@pytest.mark.parametrize("name", ALL)
def test_ties_and_forbidden_tokens(name: str) -> None:
    logits = random_logits(4, 12, 3000, scale=2.0).round().to(torch.bfloat16)
    logits[1:, :, 64:] = float("-inf")
    logits[2, :, 3:] = float("-inf")
    assert not check(named([name] * 4), logits)[1:].any()


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("what", [float("nan"), float("-inf"), float("inf")])
def test_nodes_with_non_finite_logits_are_left_to_the_host_if_filtered(
    name: str, what: float
) -> None:
    logits = random_logits(2, 3, 700)
    logits[0, 1, 5:] = what
    logits[0, 1, :5] = float("-inf")
    mine = distribution(0, ALL[name])
    filtered = not mine.sampling.greedy and mine.sampling.filtered
    assert bool(check([mine, mine], logits)[0]) is filtered


def test_rows_before_the_first_with_penalties_keep_their_tokens() -> None:
    check(named(["greedy", "temperature", None, "repetition"]), random_logits(4, 6, 300))


def test_rows_with_flat_distributions_are_uncertain_and_never_wrong() -> None:
    distributions = named(["top-p", "top-k", "min-p", "temperature", "greedy", None])
    flat = random_logits(len(distributions), 3, 3000, scale=0.01)
    assert check(distributions, flat).tolist() == [True, False, True, False, False, False]
    assert check(distributions, torch.zeros_like(flat)).tolist() == [True] * 3 + [False] * 3


def test_a_row_with_ties_beyond_the_candidates_is_uncertain() -> None:
    logits = torch.full((1, 1, 3000), -5.0, dtype=torch.float64)
    logits[..., :1000], logits[..., 7] = 0.0, float(torch.tensor(150.0).log())
    assert check([distribution(0, {"top_k": 5, "top_p": 0.1})], logits).tolist() == [True]


def test_one_node_that_is_left_to_the_host_leaves_the_others_certain() -> None:
    distributions = named(["top-p", "top-p"])
    logits = random_logits(2, 4, 3000, scale=8.0)
    logits[0, 2] = logits[1, 3] = 0.0
    batch = Batch.of(distributions, 4, 3000)
    known = torch.tensor([[True, True, False, True], [True, True, True, False]])
    tokens, _ = batch.chosen(batch.create(3000), logits)
    assert torch.equal(tokens, batch.selection(logits).where(known, -1))


def test_texts_grow_by_the_accepted_tokens() -> None:
    distributions = named([*PENALTIES, "greedy", None])
    batch = Batch.of(distributions, 6, 500)
    grown = batch.create(500)
    new = torch.randint(16, (len(distributions), 5), generator=torch.Generator().manual_seed(1))
    selected = torch.arange(5) < (torch.arange(len(distributions)) % 4)[:, None]
    grown.grow(new.where(selected, 500))
    for text, more, count in zip(batch.texts, new.tolist(), selected.sum(1).tolist(), strict=True):
        text.extend(more[:count])
    batch.indices += selected.sum(1, keepdim=True)
    logits = random_logits(len(distributions), 6, 500)
    logits[..., :16] += 8.0
    for instance in (grown, batch.create(500)):
        assert torch.equal(batch.chosen(instance, logits)[0], batch.selection(logits))
    grown.grow(new[:, :1])
    assert not torch.equal(batch.chosen(grown, logits)[0], batch.selection(logits))


def test_new_rows_are_independent_of_earlier_ones() -> None:
    names = [*PENALTIES, *DISTRIBUTIONS, None]
    distributions = Batch.of(named(names), 4, 300).create(300)
    after = Batch.of(named([*reversed(DISTRIBUTIONS), None, *reversed(PENALTIES)]), 4, 300, seed=5)
    after.fill(distributions)
    logits = random_logits(len(names), 4, 300)
    logits[..., :16] += 6.0
    tokens, beyond = after.chosen(distributions, logits)
    assert not beyond.any() and torch.equal(tokens, after.selection(logits))
    for row in range(len(names)):
        distributions.set(row, None)
    assert distributions.shape == DistributionShape() and distributions.shape.greedy
    assert torch.equal(after.chosen(distributions, logits)[0], logits.argmax(-1))


def test_one_graph_serves_all_batches_of_a_shape() -> None:
    counter = CompileCounter()

    def step(dists: BatchDistribution, batch: Batch, logits: torch.Tensor) -> torch.Tensor:
        chosen, _ = dists.choose(logits, batch.indices, batch.tokens, batch.see)
        dists.grow(batch.tokens)
        return chosen

    compiled = torch.compile(step, backend=counter, fullgraph=True, dynamic=False)
    names: list[str | None] = [*PENALTIES, *DISTRIBUTIONS, None]
    distributions, shapes = BatchDistribution(len(names), 300, "cpu", LONGEST), set()
    padding: list[str | None] = [None] * len(names)
    for seed, order in enumerate([names, names[::-1], padding, names[3:] + names[:3]]):
        batch = Batch.of(named(order), 4, 300, seed)
        batch.fill(distributions)
        shapes.add(distributions.shape)
        logits = random_logits(len(names), 4, 300, seed=seed)
        tokens = compiled(distributions, batch, logits)
        assert torch.equal(tokens[tokens >= 0], batch.selection(logits)[tokens >= 0])
    assert len(shapes) == 2
    assert counter.frame_count == 2


class Kernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations that are more than another view of a tensor."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("name", "most"), [("greedy", 1), ("temperature", 28), ("top-p", 60), ("every", 105)]
)
def test_few_kernels(name: str, most: int) -> None:
    batch = Batch.of(named([name] * 16), 16, 16_384)
    distributions, logits = batch.create(16_384), torch.zeros(16, 16, 16_384)
    with Kernels() as kernels:
        distributions.choose(logits, batch.indices, batch.tokens, batch.see)
    assert kernels.count <= most, kernels.count


def test_distributions_that_need_the_host_are_not_taken() -> None:
    assert all(BatchDistribution.takes(each) for each in named([*ALL]) if each is not None)
    sampling, noise = Sampling(repetition_penalty=1.2), NoiseStream(0)
    forbid = Penalties({4: float("-inf")})
    cases: list[tuple[list[Processor], bool]] = [
        ([forbid, Penalties(ends=[1], minimum=3)], True),
        ([Penalties(ends=[1], minimum=3), forbid, Penalties(ends=[1, 2], minimum=9)], True),
        ([Penalties({4: 1.0})], False),  # behind the penalty
        ([Penalties(ends=range(99), minimum=3)], True),
        ([HFProcessor(lambda ids, scores: scores)], False),
    ]
    for current, taken in cases:
        processors = build_processors(sampling, 0, (), dict(zip("abc", current, strict=False)))
        assert BatchDistribution.takes(TokenDistribution(sampling, noise, 0, processors)) is taken


def test_tokens_that_the_model_forbids_stay_forbidden_in_calls() -> None:
    current: dict[str, Processor] = {
        "a": Penalties(ends=[2, 4], minimum=17, prompt_length=PROMPT - 2),
        "b": Penalties(ends=[6], minimum=27, prompt_length=PROMPT),
        "c": Penalties({1: float("-inf")}),
    }
    request = Sampling(temperature=0.7, logit_bias={1: 99.0, 6: 5.0}, min_new_tokens=20)
    processors = build_processors(request, PROMPT, ENDS, current)
    distributions = [
        TokenDistribution(request, NoiseStream(row), PROMPT, processors) for row in range(40)
    ]
    for end in (2, 4, 6, 9):
        logits = random_logits(40, 8, 50, scale=0.1)
        logits[..., end] += 50.0  # taken as soon as it may be
        assert not check(distributions, logits).any()


def test_a_filter_that_is_off_excludes_no_token() -> None:
    logits = torch.full((2, 1, 3000), -100.0, dtype=torch.float64)
    logits[..., 0] = 0.0  # the others' masses vanish in the sum with this one's
    assert check(
        [distribution(0, {"min_p": 1e-60}), distribution(1, {"top_p": 0.5})], logits
    ).tolist() == [True, False]
