import numpy as np
import pytest

from ragspec.adapters import vllm
from ragspec.adapters.host_text import HostOptions, HostText, host_drafter
from ragspec.adapters.vllm import KnownTexts

ENDING = list(range(40))


def texts(idle: int = 8) -> KnownTexts:
    drafter = host_drafter(HostOptions(drafter="lookup"))
    return KnownTexts(lambda text: HostText(drafter, text.tolist(), 100), idle)


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int64)


def take(known: KnownTexts, *texts: np.ndarray) -> list[HostText]:
    return known.refresh((text, []) for text in texts)


def test_texts_with_equal_endings_have_different_sessions() -> None:
    known = texts()
    one, other = take(known, ids(7, *ENDING), ids(8, *ENDING))
    again = take(known, ids(8, *ENDING), ids(7, *ENDING))
    assert again[0] is other and again[1] is one


def test_equal_texts_have_a_session_each() -> None:
    known = texts()
    pair = take(known, ids(*ENDING), ids(*ENDING))
    assert pair[0] is not pair[1]
    *again, third = take(known, *[ids(*ENDING)] * 3)
    assert {id(each) for each in again} == {id(each) for each in pair}
    assert third not in pair


def test_a_text_is_identified_by_its_current_tokens() -> None:
    known = texts()
    (text,) = known.refresh([(ids(1, 2), [3])])
    before, after = take(known, ids(1, 2), ids(1, 2, 3))
    assert before is not text and after is text


def test_the_least_recently_used_session_is_dropped_first() -> None:
    known = texts(idle=2)
    instance = [take(known, ids(number))[0] for number in range(3)]
    take(known)
    assert len(known._sessions) == 2
    first, *others = take(known, *map(ids, range(3)))
    assert first is not instance[0]
    assert others == instance[1:]


def test_the_tokens_of_idle_texts_count_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "IDLE_TOKENS", 50)
    known = texts()
    for start in (1, 2, 3):
        take(known, ids(start, *ENDING[:20]))
    take(known)
    assert len(known._sessions) == 2
    take(known, ids(9, *ENDING))
    take(known)
    assert len(known._sessions) == 1
