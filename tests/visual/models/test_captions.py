"""Captions: the vectors of their tokens, zeros behind, and what is refused."""

import pytest

from ragspec.errors import InputError
from ragspec.models.resolve import resolve_model
from ragspec.visual.models.captions import EMBEDDER, CaptionEncoder


@pytest.fixture(scope="module")
def encoder() -> CaptionEncoder:
    return CaptionEncoder.from_pretrained(resolve_model(EMBEDDER, offline=True).folder, 4)


def test_a_text_becomes_the_vectors_of_its_tokens(encoder: CaptionEncoder) -> None:
    both = encoder(["cat face", "cat"])
    assert both.shape == (2, 4, encoder.width)
    ids = encoder.tokenizer.encode("cat", add_special_tokens=False).ids
    assert (both[1, : len(ids)] == encoder.vectors[ids]).all()
    assert not both[1, len(ids) :].any()
    assert (both[0, 0] == both[1, 0]).all()  # no context: a token is its vector


def test_a_long_text_is_cut_with_a_warning(encoder: CaptionEncoder) -> None:
    with pytest.warns(UserWarning, match="^a prompt has 7 tokens; the model reads the first 4"):
        result = encoder(["one two three four five six seven"])
    assert result[0].any(1).all()


def test_an_empty_text_is_refused(encoder: CaptionEncoder) -> None:
    with pytest.raises(InputError, match="holds no word"):
        encoder(["cat", ""])
