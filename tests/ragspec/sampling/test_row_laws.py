"""Laws of all rows at once: the tokens of `TokenLaw`, in one graph of few kernels."""

from __future__ import annotations

from collections.abc import Sequence
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


def law(number: int, settings: dict[str, Any]) -> TokenLaw:
    sampling = Sampling(**{"temperature": 1.0, **settings})
    return TokenLaw(sampling, NoiseStream(2**63 + 7 * number, number))


def random_logits(rows: int, n: int, size: int, scale: float = 4.0, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(rows, n, size, generator=generator, dtype=torch.float64)


def random_indices(rows: int, n: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(LONGEST, (rows, n), generator=torch.Generator().manual_seed(seed))


def row_laws(laws: Sequence[TokenLaw | None], size: int) -> RowLaws:
    made = RowLaws(len(laws), size, "cpu", LONGEST)
    for row, each in enumerate(laws):
        made.set(row, each)
    return made


def expected(
    laws: Sequence[TokenLaw | None], logits: torch.Tensor, indices: torch.Tensor
) -> torch.Tensor:
    rows = [
        row.argmax(-1) if law is None else law.select(row, index.tolist())
        for law, row, index in zip(laws, logits, indices, strict=True)
    ]
    return torch.stack(rows)


def check(laws: Sequence[TokenLaw | None], logits: torch.Tensor) -> torch.Tensor:
    """Assert that rows which are not beyond have the reference's tokens; return which are."""
    indices = random_indices(*logits.shape[:2])
    tokens, beyond = row_laws(laws, logits.shape[-1]).choose(logits, indices)
    wanted = expected(laws, logits, indices)
    assert tokens.dtype == torch.int64 and beyond.dtype == torch.bool
    assert torch.equal(tokens[~beyond], wanted[~beyond])
    return beyond


def named(names: Sequence[str | None]) -> list[TokenLaw | None]:
    return [None if name is None else law(i, LAWS[name]) for i, name in enumerate(names)]


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
