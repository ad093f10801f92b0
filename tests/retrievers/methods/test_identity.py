"""The text of every method is that of plain decoding, and its wrong settings are refused."""

from typing import Any

import pytest
import torch

from ragspec.drafters.base import Drafter
from ragspec.drafters.model.drafter import ModelDrafter
from ragspec.errors import InputError
from ragspec.retrievers.corpus.rest import RestDrafter
from ragspec.retrievers.methods.context import ContextDrafter
from ragspec.retrievers.methods.hierarchy_drafting import HierarchyDrafter
from ragspec.retrievers.methods.ngrams import NGramDrafter
from ragspec.retrievers.methods.prompt_lookup import LookupDrafter
from ragspec.retrievers.methods.rasd import Rasd
from ragspec.retrievers.methods.sam_decoding import MatchDrafter, Select
from ragspec.retrievers.methods.suffix_decoding import SuffixDrafter
from ragspec.retrievers.methods.token_recycling import NeighbourDrafter, NeighbourTable
from tests.support import tiny
from tests.support.identities import BATCHES, SAMPLINGS, check_identity, target


def drafters() -> dict[str, Drafter]:
    model = ModelDrafter(tiny.model(seed=1, dtype=torch.float64))
    small = ModelDrafter(model.model, min_expected_gain=0.0)
    sampled = ModelDrafter(model.model, mode="sampled", width=(2, 1))
    return {
        "context": ContextDrafter(),
        "lookup": LookupDrafter(),
        "ngrams": NGramDrafter(),
        "recycling": NeighbourDrafter(),
        "recycling, shared": NeighbourDrafter(NeighbourTable(orders=1)),
        "suffix": SuffixDrafter(),
        "suffix, past": SuffixDrafter(ContextDrafter(), factor=4.0),
        "match": MatchDrafter(),
        "select": Select([MatchDrafter(), LookupDrafter()], discount=0),
        "select, model": Select([MatchDrafter()], model, threshold=2),
        "rasd": Rasd(small, [ContextDrafter(), SuffixDrafter()]),
        "rasd, paper": Rasd(ModelDrafter(target(), depth=2), [LookupDrafter()], grace=None),
        "rasd, sampled": Rasd(sampled, [ContextDrafter()]),
        "rasd, texts alone": Rasd(SuffixDrafter(), [ContextDrafter()]),
    }


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("settings", SAMPLINGS)
@pytest.mark.parametrize("method", drafters())
def test_the_text_is_that_of_plain_decoding(method: str, settings: str, batch: int) -> None:
    copies = not method.startswith("recycling")
    check_identity(drafters()[method], settings, batch, copies=copies)


LOOKUP = LookupDrafter()
WRONG: dict[Any, list[Any]] = {
    NGramDrafter: [{"level": 1}, {"guess": 0}, {"level": "5"}],
    HierarchyDrafter: [{"reserve": each} for each in ("a", None, 5, -1, float("nan"))]
    + [{"corpus": LOOKUP, "reserve": 0.5}, {"reserve": "a"}, {"form": "tree"}],
    LookupDrafter: [{"longest": 0}, {"shortest": 4}, {"tokens": 0}, {"longest": "x"}],
    NeighbourTable: [{"k": 0}, {"orders": 0}, {"orders": 4}, {"most": 0}],
    RestDrafter: [{"corpus": "a.store"}],
    SuffixDrafter: [{"factor": -1}, {"depth": 0}, {"least": 2}, {"factor": "a"}, {"offset": None}],
    Select: [{"sources": []}, {"sources": 5}, {"sources": [LOOKUP], "threshold": "a"}],
    Rasd: [{"retrievers": []}, {"retrievers": ContextDrafter()}, {"prune_rank": -1}]
    + [{"prune_rank": "a"}, {"prune_probability": 2}, {"grace": 2.0}, {"grace": ""}],
}


@pytest.mark.parametrize(
    ("method", "settings"), [(method, each) for method, every in WRONG.items() for each in every]
)
def test_wrong_settings_are_reported(method: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="expected"):
        method(**settings)
