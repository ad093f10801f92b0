"""Likelihoods of given texts are those of transformers' own forward, row by row."""

from __future__ import annotations

import pytest
import torch

from ragspec.adapters import likelihood
from ragspec.adapters.likelihood import score_rows
from ragspec.verification.open import open_target
from tests.support import tiny


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
@pytest.mark.parametrize("most", [1 << 26, 1])
def test_scores_are_those_of_each_text_alone(
    architecture: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(likelihood, "MOST_LOGITS", most)
    model = tiny.model(architecture, dtype=torch.float64)
    rows = [
        (tiny.prompt(length, seed=length), scored)
        for length, scored in [(9, 3), (5, 4), (20, 1), (7, 0)]
    ]
    greedy = tiny.prompt(6)
    with torch.no_grad():
        greedy = [*greedy, int(model(torch.tensor([greedy])).logits[0, -1].argmax())]
    rows.append((greedy, 1))
    result = list(score_rows(open_target(model), rows, 0))
    for (ids, scored), (total, leads) in zip(rows, result, strict=True):
        with torch.no_grad():
            distributions = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        places = range(len(ids) - scored, len(ids))
        assert total == pytest.approx(
            sum(float(distributions[i - 1, ids[i]]) for i in places), abs=1e-5
        )
        assert leads == all(int(distributions[i - 1].argmax()) == ids[i] for i in places)
    assert result[-1][1]
    assert not all(leads for _, leads in result)
