from __future__ import annotations

from pathlib import Path

import pytest

from ragspec.drafters.build import build_drafter
from ragspec.engine.engine import Engine
from ragspec.retrievers.corpus.index import CorpusIndex
from ragspec.retrievers.methods.auto import AutoDrafter
from ragspec.verification.causal import CausalTarget
from tests.support import tiny
from tests.support.fixed import FixedDrafter, fake_clock
from tests.support.identities import BATCHES, PROMPTS, SAMPLINGS, check_identity, expected
from tests.support.mixing import MixingDrafter


def test_everything_available_becomes_one_tree_of_equals() -> None:
    drafter = AutoDrafter(MixingDrafter({}))
    assert [each.name for each in drafter.drafters] == ["context", "mixing", "recycling"]
    target = CausalTarget(tiny.model())
    built = build_drafter("auto", tiny.model(num_hidden_layers=1), tiny.tokenizer(), target)
    assert [each.name for each in getattr(built, "drafters")] == ["context", "recycling", "model"]  # noqa: B009


def test_the_prompt_is_read_once_and_not_for_second_choices() -> None:
    drafter = AutoDrafter()
    assert drafter.top_logits > 0 and not drafter.reads_prompt


def test_the_text_is_that_of_plain_decoding() -> None:
    prompt = [*range(5, 15), *range(5, 15)]
    plain = Engine(tiny.model(), drafter=None).generate(prompt, max_new_tokens=40)
    result = Engine(tiny.model(), drafter="auto", budget=6).generate(prompt, max_new_tokens=40)
    assert result.tokens == plain.tokens
    assert result.report.faults == {} and result.report.drafted > 0


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("settings", SAMPLINGS)
def test_no_token_changes_with_a_store_beside_the_text(
    settings: str, batch: int, tmp_path: Path
) -> None:
    known = zip(PROMPTS, expected(settings, batch), strict=False)
    texts = [[*prompt[-3:], *answer[:9], 0, *answer[10:]] for prompt, answer in known]
    with CorpusIndex.build(texts, None, tmp_path / "c", vocab_size=tiny.VOCAB) as store:
        check_identity(AutoDrafter(store.drafter()), settings, batch)


def test_a_source_that_stalls_is_counted_in_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = fake_clock(monkeypatch)
    drafter = AutoDrafter(FixedDrafter([1], "stalling", [0.1], seconds=1.0, clock=clock))
    plain = Engine(tiny.model(), drafter=None).generate(PROMPTS[0], max_new_tokens=40)
    with pytest.warns(RuntimeWarning, match="'stalling' is switched off"):
        result = Engine(tiny.model(), drafter=drafter, budget=6).generate(
            PROMPTS[0], max_new_tokens=40
        )
    assert result.tokens == plain.tokens
    assert result.report.faults == {"stalling": 3} and clock == [4.0]
