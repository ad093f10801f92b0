from __future__ import annotations

import copy

import torch

from ragspec.retrievers.fingerprints import model_fingerprint, tokenizer_fingerprint
from tests import tiny


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


def test_a_tokenizer_without_a_backend_is_told_by_its_vocabulary() -> None:
    class Slow:
        def __init__(self, **vocabulary: int) -> None:
            self.vocabulary = vocabulary

        def get_vocab(self) -> dict[str, int]:
            return self.vocabulary

    assert tokenizer_fingerprint(Slow(a=0, b=1)) == tokenizer_fingerprint(Slow(b=1, a=0))
    assert tokenizer_fingerprint(Slow(a=0, b=1)) != tokenizer_fingerprint(Slow(a=1, b=0))


def test_a_model_is_its_weights_and_not_its_dtype() -> None:
    model = tiny.model(dtype=torch.bfloat16)
    found = model_fingerprint(model)
    wide = copy.deepcopy(model).to(torch.float64)
    assert model_fingerprint(wide) == found
    assert model_fingerprint(tiny.model(seed=1, dtype=torch.bfloat16)) != found
    with torch.no_grad():
        next(wide.parameters())[0, 0] += 1.0
    assert model_fingerprint(wide) != found
