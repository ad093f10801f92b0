"""Numbers and their nouns in messages."""

from typing import Any

import numpy as np
import pytest
import torch

from ragspec import Engine
from ragspec.errors import InputError, pluralize
from tests.support import tiny


def test_a_noun_follows_its_number() -> None:
    for noun, several in (("token", "tokens"), ("query", "queries"), ("forward pass", None)):
        assert pluralize(1, noun) == f"1 {noun}"
        assert pluralize(0, noun) == f"0 {several or 'forward passes'}"
    assert pluralize(1200, "search", ",") == "1,200 searches" and pluralize(2, "key") == "2 keys"


@pytest.mark.parametrize("two", [2, np.int64(2), np.array(2), torch.tensor(2)])
def test_whole_numbers_of_any_library_are_counts(two: Any) -> None:
    engine = Engine(tiny.model(), drafter="context", budget=two)
    limited = engine.with_limits(two, two, two, max_model_len=two)
    assert (limited.scheduler.max_batch_size, limited.target.max_length) == (2, 2)
    for wrong in (0, -1, "2", 2.5, True, np.array([2]), torch.tensor([2]), torch.tensor(True)):
        with pytest.raises(InputError, match=r"max_model_len is .* expected a whole number"):
            engine.with_limits(2, max_model_len=wrong)  # type: ignore[arg-type]
