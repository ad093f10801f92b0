"""The tiny models and tokenizers are what the other tests take them for."""

from __future__ import annotations

import pytest
import torch

from tests.support import tiny


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_a_tiny_model_is_small_and_sure_of_itself(architecture: str) -> None:
    model = tiny.model(architecture)
    ids = torch.tensor([tiny.prompt()])
    with torch.no_grad():
        logits = model(ids).logits
    assert logits.shape == (1, 24, tiny.VOCAB)
    assert torch.isfinite(logits).all()
    assert logits.std() > 0.4, "a nearly flat law hides faults"
    assert sum(parameter.numel() for parameter in model.parameters()) < 200_000
    assert not model.training


def test_a_character_is_a_token_and_text_comes_back() -> None:
    tokenizer = tiny.tokenizer()
    text = "Evidence: [1] it's  so.\nAnswer: so~"
    encoded = tokenizer(text, return_offsets_mapping=True)
    assert encoded["offset_mapping"] == [(i, i + 1) for i in range(len(text))]
    assert tokenizer.decode(encoded["input_ids"]) == text
    assert tokenizer.eos_token_id == len(tokenizer) - 1 == tiny.VOCAB - 1


@pytest.mark.parametrize("text", [tiny.TEXT, " é€ 漢字\n\n  x"])
def test_the_byte_level_tokenizer_loses_nothing(text: str) -> None:
    tokenizer = tiny.bpe_tokenizer()
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert len(tokenizer(tiny.TEXT).input_ids) < 0.6 * len(tiny.TEXT), "tokens hold one character"
