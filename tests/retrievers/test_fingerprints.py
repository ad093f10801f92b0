from __future__ import annotations

import copy

import pytest
import torch

from ragspec.retrievers.fingerprints import model_fingerprint, same_print, tokenizer_fingerprint
from tests.support import tiny


def test_one_tokenizer_has_one_fingerprint_whatever_it_was_used_for() -> None:
    tokenizer = copy.deepcopy(tiny.bpe_tokenizer())
    before = tokenizer_fingerprint(tokenizer)
    tokenizer("some text", truncation=True, max_length=2, padding="max_length")
    assert tokenizer_fingerprint(tokenizer) == before
    assert tokenizer_fingerprint(tiny.bpe_tokenizer()) == before
    assert tokenizer_fingerprint(tiny.tokenizer()) != before
    assert tokenizer_fingerprint(tiny.tokenizer(chat=True)) == tokenizer_fingerprint(
        tiny.tokenizer()
    )


def test_a_tokenizer_without_a_backend_is_reported_by_its_vocabulary() -> None:
    class Slow:
        def __init__(self, **vocabulary: int) -> None:
            self.vocabulary = vocabulary

        def get_vocab(self) -> dict[str, int]:
            return self.vocabulary

    assert tokenizer_fingerprint(Slow(a=0, b=1)) == tokenizer_fingerprint(Slow(b=1, a=0))
    assert tokenizer_fingerprint(Slow(a=0, b=1)) != tokenizer_fingerprint(Slow(a=1, b=0))


def test_a_model_is_its_weights_and_not_its_dtype() -> None:
    model = tiny.model(dtype=torch.bfloat16)
    result = model_fingerprint(model)
    wide = copy.deepcopy(model).to(torch.float64)
    assert model_fingerprint(wide) == result
    assert model_fingerprint(tiny.model(seed=1, dtype=torch.bfloat16)) != result
    with torch.no_grad():
        next(wide.parameters())[0, 0] += 1.0
    assert model_fingerprint(wide) != result


DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_loads_of_one_checkpoint_are_one_model(dtype: torch.dtype) -> None:
    checkpoint = copy.deepcopy(tiny.model()).to(dtype)
    with torch.no_grad():
        for weight in checkpoint.parameters():
            weight.mul_(1e-3)  # some are less than float16 holds in full
    prints = [model_fingerprint(copy.deepcopy(checkpoint).to(each)) for each in DTYPES]
    other = model_fingerprint(tiny.model(seed=1, dtype=dtype))
    for one in range(len(DTYPES)):
        assert not same_print(prints[one], other)
        for two in range(one):
            halves = {DTYPES[one], DTYPES[two]} == {torch.float16, torch.bfloat16}
            if not (halves and dtype in (torch.float32, torch.float64)):
                assert same_print(prints[one], prints[two])


def test_prints_are_the_same_where_they_share_a_part() -> None:
    assert same_print("a+b", "c+b") and same_print("a", "a+b") and same_print(None, None)
    assert not same_print("a+b", "c") and not same_print("a", None) and not same_print(None, "a")
