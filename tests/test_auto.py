from __future__ import annotations

from ragspec.drafting import build_drafter
from ragspec.engine import Engine
from ragspec.retrievers.auto import AutoDrafter
from ragspec.target import CausalTarget
from tests import tiny
from tests.mixing import MixingDrafter


def test_everything_at_hand_becomes_one_tree_of_equals() -> None:
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
    found = Engine(tiny.model(), drafter="auto", budget=6).generate(prompt, max_new_tokens=40)
    assert found.tokens == plain.tokens
    assert found.report.faults == {} and found.report.drafted > 0
