from __future__ import annotations

import pytest

from ragspec.drafters.build import build_drafter
from ragspec.errors import TokenizerMismatchError
from ragspec.models.supported import check_vocabulary
from ragspec.verification.causal import CausalTarget
from tests.support import tiny


def test_vocabularies_that_agree_pass() -> None:
    tokenizer = tiny.tokenizer()
    check_vocabulary(tokenizer, tiny.tokenizer(chat=True), 97, 97)
    check_vocabulary(tokenizer, tokenizer, 97, 128)
    check_vocabulary(None, None, 97, 97)


def test_vocabularies_that_differ_are_refused() -> None:
    with pytest.raises(TokenizerMismatchError, match=r"id \d+ is .* in the draft.*expected one"):
        check_vocabulary(tiny.tokenizer(), tiny.bpe_tokenizer(), 97, 320)
    with pytest.raises(TokenizerMismatchError, match="128 token ids and the target 97"):
        check_vocabulary(tiny.tokenizer(), None, 97, 128)
    with pytest.raises(TokenizerMismatchError):
        build_drafter(
            None, (tiny.model(), tiny.bpe_tokenizer()), tiny.tokenizer(), CausalTarget(tiny.model())
        )
