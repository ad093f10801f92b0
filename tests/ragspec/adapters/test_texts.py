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


def test_the_whole_text_decides_and_not_its_ending() -> None:
    known = texts()
    one, other = known.take(ids(7, *ENDING)), known.take(ids(8, *ENDING))
    known.keep([one, other])
    assert known.take(ids(8, *ENDING)) is other
    assert known.take(ids(7, *ENDING)) is one


def test_texts_that_say_the_same_have_a_session_each() -> None:
    known = texts()
    pair = [known.take(ids(*ENDING)), known.take(ids(*ENDING))]
    assert pair[0] is not pair[1]
    known.keep(pair)
    again = [known.take(ids(*ENDING)), known.take(ids(*ENDING))]
    assert {id(each) for each in again} == {id(each) for each in pair}
    assert known.take(ids(*ENDING)) not in pair


def test_a_text_is_detected_by_what_it_says_now() -> None:
    known = texts()
    text = known.take(ids(1, 2))
    text.refresh([3])
    known.keep([text])
    assert known.take(ids(1, 2)) is not text
    assert known.take(ids(1, 2, 3)) is text


def test_the_longest_unasked_goes_first() -> None:
    known = texts(idle=2)
    instance = [known.take(ids(number)) for number in range(3)]
    for each in instance:
        known.keep([each])
    known.keep([])
    assert len(known._sessions) == 2
    assert known.take(ids(0)) is not instance[0]
    assert [known.take(ids(number)) for number in (1, 2)] == instance[1:]


def test_the_tokens_of_idle_texts_count_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "IDLE_TOKENS", 50)
    known = texts()
    for start in (1, 2, 3):
        known.keep([known.take(ids(start, *ENDING[:20]))])
    known.keep([])
    assert len(known._sessions) == 2
    known.keep([known.take(ids(9, *ENDING))])
    known.keep([])
    assert len(known._sessions) == 1
