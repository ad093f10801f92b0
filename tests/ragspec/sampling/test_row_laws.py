"""Laws of all rows at once: the tokens of `TokenLaw`, in one graph of few kernels."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from ragspec.sampling.distribution import TokenLaw
from ragspec.sampling.noise import NoiseStream
from ragspec.sampling.row_laws import RowLaws
from ragspec.sampling.settings import Sampling

LONGEST = 600
LAWS: dict[str, dict[str, Any]] = {
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
MIXED = [*LAWS, None]
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
ALL = LAWS | PENALTIES
PROMPT = 12
ENDS = (2, 9, 10**6)  # configs name ids that a model does not have


@dataclass
class Batch:
    """Trees of B rows: what the host's path is told of them, and what the device's is."""

    laws: Sequence[TokenLaw | None]
    texts: list[list[int]]
    paths: list[list[list[int]]]
    tokens: torch.Tensor
    see: torch.Tensor
    indices: torch.Tensor

    @classmethod
    def of(cls, laws: Sequence[TokenLaw | None], n: int, size: int, seed: int = 0) -> Batch:
        draw = random.Random(seed)
        few = min(size, 16)  # so that tokens repeat
        texts = [[draw.randrange(few) for _ in range(draw.randrange(PROMPT + 1, 50))] for _ in laws]
        tokens = torch.tensor([[draw.randrange(few) for _ in range(n)] for _ in laws])
        tokens[:, 0] = torch.tensor([text[-1] for text in texts])
        see = torch.eye(n, dtype=torch.bool).repeat(len(laws), 1, 1)
        paths: list[list[list[int]]] = []
        for row in range(len(laws)):
            paths.append([[]])
            for node in range(1, n):
                parent = draw.randrange(node)
                paths[row].append([*paths[row][parent], int(tokens[row, node])])
                see[row, node] |= see[row, parent]
        indices = [
            [len(text) - PROMPT + len(path) for path in row]
            for text, row in zip(texts, paths, strict=True)
        ]
        return cls(laws, texts, paths, tokens, see, torch.tensor(indices))

    def made(self, size: int) -> RowLaws:
        laws = RowLaws(len(self.laws), size, "cpu", LONGEST)
        for row, (law, text) in enumerate(zip(self.laws, self.texts, strict=True)):
            laws.set(row, law, text)
        return laws

    def chosen(self, laws: RowLaws, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return laws.choose(logits, self.indices, self.tokens, self.see)

    def wanted(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the tokens of the reference."""
        rows = []
        for row, law in enumerate(self.laws):
            if law is None:
                rows.append(logits[row].argmax(-1))
                continue
            scores = law.process(logits[row], self.texts[row], self.paths[row])
            rows.append(law.select(scores, self.indices[row].tolist()))
        return torch.stack(rows)

    def check(self, logits: torch.Tensor) -> torch.Tensor:
        """Assert the reference's tokens of rows that are not beyond; return which are."""
        tokens, beyond = self.chosen(self.made(logits.shape[-1]), logits)
        assert tokens.dtype == torch.int64 and beyond.dtype == torch.bool
        assert torch.equal(tokens[~beyond], self.wanted(logits)[~beyond])
        return beyond


def law(number: int, settings: dict[str, Any]) -> TokenLaw:
    sampling = Sampling(**{"temperature": 1.0, **settings})
    return TokenLaw(sampling, NoiseStream(2**63 + 7 * number, number), PROMPT, ENDS)


def random_logits(rows: int, n: int, size: int, scale: float = 4.0, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(rows, n, size, generator=generator, dtype=torch.float64)


def check(laws: Sequence[TokenLaw | None], logits: torch.Tensor, seed: int = 0) -> torch.Tensor:
    return Batch.of(laws, logits.shape[1], logits.shape[2], seed).check(logits)


def named(names: Sequence[str | None]) -> list[TokenLaw | None]:
    return [None if name is None else law(i, ALL[name]) for i, name in enumerate(names)]


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("size", "n"), [(50, 40), (1000, 20), (9000, 8), (128_000, 2)])
def test_mixed_rows_get_the_tokens_of_their_own_laws(size: int, n: int, kind: torch.dtype) -> None:
    logits = random_logits(len(MIXED), n, size).to(kind)
    beyond = check(named(MIXED), logits)
    certain = [i for i, name in enumerate(MIXED) if name in (None, "greedy", "temperature", "hot")]
    assert not beyond[certain].any()
    assert int(beyond.sum()) <= (len(MIXED) // 2 if size > 8192 else 4)


@pytest.mark.parametrize("name", LAWS)
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
