"""A target of one shape: the bits of a token do not depend on what is drafted beside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ragspec.engine.engine import Engine
from ragspec.errors import InputError, UnsupportedModelError
from ragspec.models.load import load_model
from ragspec.pipelines.cli.compare import plain_engine
from ragspec.sampling.settings import Sampling
from ragspec.trees.draft_tree import DraftKind, DraftTree
from ragspec.verification.causal import CausalTarget
from ragspec.verification.constant_width import ConstantWidthTarget
from tests.support import tiny
from tests.support.noisy import NoisyTrees

PROMPT = [5, 6, 7, 8, 9, 5, 6, 7]


def logits_of(target: CausalTarget, tokens: list[int], step: int) -> torch.Tensor:
    """Return the logits after each token [n, V], read `step` tokens at a time as drafts."""
    results = []
    with target.open(1, 64) as session:
        session.verify([PROMPT], [DraftTree.empty()])
        session.commit([()])
        for first in range(0, len(tokens), step):
            part = tokens[first : first + step]
            tree = DraftTree.chain(part[1:], "true")
            results.append(session.verify([part[:1]], [tree])[0, : len(part)].clone())
            session.commit([range(len(tree))])
    return torch.cat(results)


@pytest.mark.parametrize("width", [4, 8])
def test_the_bits_of_a_token_do_not_depend_on_the_draft(width: int) -> None:
    model, _ = load_model("starter", dtype=torch.bfloat16)
    target = ConstantWidthTarget(model, width)
    tokens = torch.randint(0, 1000, (32,), generator=torch.Generator().manual_seed(1)).tolist()
    alone = logits_of(target, tokens, 1)
    for step in (2, 3, width):
        assert torch.equal(logits_of(target, tokens, step), alone)
    # The check can fail: as the model is, forwards of several widths round otherwise.
    usual = CausalTarget(model)
    assert not torch.equal(logits_of(usual, tokens, 1), logits_of(usual, tokens, width))


def test_positions_are_right_and_text_is_that_of_the_model_in_float32() -> None:
    model = tiny.model("llama")
    for sampling in (Sampling(), Sampling(temperature=1.0, seed=3)):
        plain = Engine(model, drafter=None).generate(
            PROMPT, sampling, max_new_tokens=24, ignore_eos=True
        )
        engine = Engine(
            ConstantWidthTarget(model, 6),
            drafter=NoisyTrees({tuple(PROMPT): plain.tokens}),
            budget=9,
            batch_size=1,
        )
        result = engine.generate(PROMPT, sampling, max_new_tokens=24, ignore_eos=True)
        assert result.tokens == plain.tokens
        assert 0 < max(result.report.per_step_drafted) <= 5  # what the shape has room for


def test_the_label_says_exact_in_bfloat16_and_plain_is_decoded_by_the_same_target() -> None:
    target = ConstantWidthTarget(tiny.model("llama", dtype=torch.bfloat16), 4)
    engine = Engine(target, drafter="context", budget=3, batch_size=1)
    assert engine.generate(PROMPT, max_new_tokens=6, ignore_eos=True).label == "exact"
    assert plain_engine(engine).target is target


def test_a_draft_becomes_its_likeliest_path_and_of_draws_the_first() -> None:
    parents, accept_prob = [-1, -1, 1, 2, 3], [0.2, 0.7, 0.6, 0.5, 0.4]
    tree = DraftTree.build([1, 2, 3, 4, 5], parents, "x", accept_prob=accept_prob)
    sample = DraftTree.build(
        [1, 2], [-1, -1], "x", accept_prob=[0.1, 0.9], kind=DraftKind.SAMPLED_WITHOUT_REPLACEMENT
    )
    with ConstantWidthTarget(tiny.model("llama"), 4).open(1, 32) as session:
        assert session.admit(tree).tokens.tolist() == [2, 3, 4]
        assert session.admit(sample).tokens.tolist() == [1]


def test_only_one_row_and_two_positions_at_least() -> None:
    model = tiny.model("llama")
    with pytest.raises(InputError, match="width of 1; expected 2"):
        ConstantWidthTarget(model, 1)
    engine = Engine(ConstantWidthTarget(model, 4), drafter=None)
    with pytest.raises(InputError, match=r"got 2 rows; expected one.*batch_size=1"):
        engine.generate([PROMPT, PROMPT], max_new_tokens=2)


def test_a_machine_that_rounds_by_place_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Uneven(ConstantWidthTarget):
        def forward(self, tokens: torch.Tensor, *rest: Any) -> torch.Tensor:
            logits = super().forward(tokens, *rest)
            bump = torch.arange(logits.shape[1], device=logits.device)[None, :, None]
            return logits + 1e-6 * bump.to(logits.dtype)

    with pytest.raises(UnsupportedModelError, match="other bits at place 1 of 4"):
        Uneven(tiny.model("llama", dtype=torch.float64), 4)
