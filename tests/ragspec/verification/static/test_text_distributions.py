"""What a row's law is told of its text: all at first, then what is new, and once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ragspec.sampling.distribution import TokenDistribution
from ragspec.sampling.noise import NoiseStream
from ragspec.sampling.row_laws import BatchDistribution
from ragspec.sampling.settings import Sampling
from ragspec.verification.static.step import RequestDistributions

VOCAB, ROWS = 50, 3
PENALISED = {"repetition_penalty": 1.5, "presence_penalty": 0.4, "frequency_penalty": 0.2}


def distribution(seed: int = 0, **settings: Any) -> TokenDistribution:
    return TokenDistribution(Sampling(**settings), NoiseStream(seed), 2)


def text_distributions() -> tuple[RequestDistributions, list[tuple[int, TokenDistribution | None]]]:
    """Return laws, and a note of every row that is set."""
    distributions, noted = BatchDistribution(ROWS, VOCAB, "cpu", 100), []
    current = distributions.set

    def noting(row: int, distribution: TokenDistribution | None, text: Sequence[int] = ()) -> None:
        noted.append((row, distribution))
        current(row, distribution, text)

    distributions.set = noting  # type: ignore[method-assign]
    return RequestDistributions(distributions, ROWS), noted


def chosen(
    distributions: BatchDistribution, logits: torch.Tensor, texts: Sequence[Sequence[int]]
) -> list[int]:
    """Return the token that each row's law takes after its text."""
    roots = torch.tensor([[text[-1]] for text in texts])
    indices = torch.tensor([[len(text) - 2] for text in texts])
    see = torch.ones(len(texts), 1, 1, dtype=torch.bool)
    tokens = distributions.choose(logits, indices, roots, see)
    return [int(token) for token in tokens[:, 0]]


def test_texts_that_grow_by_parts_are_known_as_a_whole() -> None:
    message, noted = text_distributions()
    distributions = [distribution(row, **PENALISED) for row in range(ROWS)]
    texts = [[1, 2, 3], [4, 4], [5, 6, 7, 8]]
    first: list[list[int]] = [[], [], []]
    grown: list[list[list[int]]] = [[[9], [1, 1, 2], []], [[10, 9, 9, 9], [], [5]], [[], [3], [3]]]
    generator = torch.Generator().manual_seed(0)
    differ = 0
    for new in [first, *grown]:
        texts = [[*text, *more] for text, more in zip(texts, new, strict=True)]
        shape = message.notify(dict(enumerate(zip(distributions, texts, strict=True))))
        message.distributions.grow(torch.from_numpy(message.fresh))  # as the step does
        assert shape == message.distributions.shape and shape.penalties.texts
        logits = torch.randn(ROWS, 1, VOCAB, generator=generator, dtype=torch.float64)
        logits[:, :, :12] += 1.5  # what the texts hold would be taken, but for the penalties
        again = BatchDistribution(ROWS, VOCAB, "cpu", 100)
        for row in range(ROWS):
            again.set(row, distributions[row], texts[row])
        result = chosen(message.distributions, logits, texts)
        assert result == chosen(again, logits, texts)
        differ += result != logits[:, 0].argmax(-1).tolist()
        held, known = (each._penalties._held for each in (message.distributions, again))  # type: ignore[union-attr]
        assert torch.equal(held[..., :VOCAB], known[..., :VOCAB])
    assert [row for row, _ in noted[:ROWS]] == [0, 1, 2] and len(noted) == ROWS, "set once"
    assert differ


def test_a_row_is_set_again_where_another_text_takes_it() -> None:
    message, noted = text_distributions()
    one, other = distribution(1, **PENALISED), distribution(2, **PENALISED)
    message.notify({0: (one, [1, 2, 3])})
    message.notify({0: (other, [1, 2, 3, 9, 9])})
    assert noted == [(0, one), (0, other)]
    held = message.distributions._penalties._held[0, 0, 0]  # type: ignore[union-attr]
    assert held.nonzero().flatten().tolist() == [1, 2, 3, 9] and held[9] == 2


def test_rows_that_nobody_asks_for_are_padding() -> None:
    message, noted = text_distributions()
    sample = distribution(3, temperature=1.0)
    assert message.notify({1: (sample, [1, 2])}).unfiltered
    assert message.notify({2: (distribution(), [1, 2])}).greedy, (
        "the row that ended asks for nothing"
    )
    assert noted[1] == (1, None)
    message.notify({})
    assert noted[-1] == (2, None)


def test_distributions_that_look_at_no_text_are_reported_nothing_more() -> None:
    message, _ = text_distributions()
    grown: list[Any] = []
    message.distributions.grow = lambda *inputs: grown.append(inputs)  # type: ignore[method-assign]
    plain = distribution(temperature=0.7)
    message.notify({0: (plain, [1, 2])})
    message.notify({0: (plain, [1, 2, 3])})
    assert not grown
