import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragspec.drafters.base import DraftRequest
from ragspec.errors import InputError
from ragspec.retrievers.methods.context import ContextDrafter
from ragspec.retrievers.methods.sam_decoding import MatchDrafter, Select
from ragspec.trees.draft_tree import DraftKind
from ragspec.trees.operations import check
from tests.support.fixed import FixedDrafter
from tests.support.spelling import at

VOCAB = 5
texts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30)


def match(prompt: list[int], budget: int = 64) -> list[int]:
    session = MatchDrafter().open(DraftRequest(tuple(prompt), VOCAB))
    tree = session.propose(at(prompt), budget)
    check(tree, VOCAB)
    result: list[int] = tree.tokens.tolist()
    return result


@given(texts)
def test_the_longest_match_is_continued_from_its_latest_place(text: list[int]) -> None:
    expected: list[int] = []
    for n in range(len(text) - 1, 0, -1):
        ends = [i + n for i in range(len(text) - n) if text[i : i + n] == text[-n:]]
        if ends:
            # After the end of the text the copy itself is copied.
            whole = list(text)
            for i in range(1 + 4 * n):
                whole.append(whole[ends[-1] + i])
            expected = whole[len(text) :]
            break
    assert match(text) == expected[:40]


def test_repeated_tokens_have_the_origin_of_the_first_copy() -> None:
    text = (0, 1, 0, 1)
    session = MatchDrafter().open(DraftRequest(text, VOCAB, spans=((0, 4, 3, 0),)))
    tree = session.propose(at(text), 5)
    assert tree.tokens.tolist() == [0, 1, 0, 1, 0]
    assert tree.origin.tolist() == [[3, 2], [3, 3], [3, 2], [3, 3], [3, 2]]


def chosen(select: Select, prompt: list[int]) -> tuple[str, ...]:
    return select.open(DraftRequest(tuple(prompt), 100)).propose(at(prompt), 8).sources


def test_the_longest_match_wins_and_discounts_count() -> None:
    one, two = FixedDrafter([7], "one", matched=6), FixedDrafter([8], "two", matched=9)
    assert chosen(Select([one, two]), [1, 2]) == ("one",)
    assert chosen(Select([one, two], discount=2), [1, 2]) == ("two",)


def test_the_fallback_drafts_if_no_match_reaches_the_threshold() -> None:
    short, other = FixedDrafter([7], "short", matched=4), FixedDrafter([8], "other")
    assert chosen(Select([short], other), [1]) == ("other",)
    assert chosen(Select([short], other, threshold=4), [1]) == ("short",)
    assert chosen(Select([short]), [1]) == ("short",)
    both = Select([FixedDrafter([], "nothing"), short], other, threshold=-1)
    assert chosen(both, [1]) == ("short",), "a match of 4 less a discount of 5"
    assert chosen(Select([short], FixedDrafter([], "nothing")), [1]) == ("short",)


def test_a_source_without_a_match_length_is_reported() -> None:
    session = Select([FixedDrafter([7], "mute")]).open(DraftRequest((1,), 100))
    with pytest.raises(InputError, match=r"'mute' does not tell.*as the fallback"):
        session.propose(at([1]), 8)


def test_select_is_coupled_if_one_drafter_is_not_deterministic() -> None:
    assert Select([ContextDrafter()]).kind is DraftKind.DETERMINISTIC
    sampled = FixedDrafter([7, 7], "sampled", kind=DraftKind.SAMPLED, siblings=True)
    select = Select([MatchDrafter()], sampled)
    assert select.kind is DraftKind.COUPLED
    tree = select.open(DraftRequest((1, 2), 100)).propose(at([1, 2]), 8)
    assert tree.kind is DraftKind.COUPLED
    assert tree.tokens.tolist() == [7]
