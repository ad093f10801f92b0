import copy
from collections.abc import Callable
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from ragspec.drafters.fuse import Fuse
from ragspec.engine.engine import Engine
from ragspec.errors import InputError, StoreError
from ragspec.retrievers.fingerprints import (
    check_prints,
    model_fingerprint,
    prints_of,
    same_print,
    tokenizer_fingerprint,
)
from ragspec.retrievers.methods.auto import AutoDrafter
from ragspec.retrievers.methods.context import ContextDrafter
from ragspec.retrievers.methods.hierarchy_drafting import HierarchyDrafter
from ragspec.retrievers.methods.rasd import Rasd
from ragspec.retrievers.methods.sam_decoding import MatchDrafter, Select
from ragspec.retrievers.methods.suffix_decoding import SuffixDrafter
from ragspec.retrievers.methods.token_recycling import NeighbourDrafter
from tests.support import tiny


def test_using_a_tokenizer_does_not_change_its_fingerprint() -> None:
    tokenizer = copy.deepcopy(tiny.bpe_tokenizer())
    before = tokenizer_fingerprint(tokenizer)
    tokenizer("some text", truncation=True, max_length=2, padding="max_length")
    assert tokenizer_fingerprint(tokenizer) == before
    assert tokenizer_fingerprint(tiny.bpe_tokenizer()) == before
    plain = tokenizer_fingerprint(tiny.tokenizer())
    assert plain == tokenizer_fingerprint(tiny.tokenizer(chat=True)) != before


def test_each_adapter_has_a_fingerprint() -> None:
    settings = LoraConfig(target_modules=["q_proj"])
    model: Any = get_peft_model(copy.deepcopy(tiny.model()), settings, "one")
    model.add_adapter("two", settings)
    first = model_fingerprint(model)
    model.set_adapter("two")
    with model.disable_adapter():
        assert not same_print(model_fingerprint(model), first)
    assert not same_print(model_fingerprint(model), first)


def test_a_tokenizer_without_a_backend_is_reported_by_its_vocabulary() -> None:
    def fingerprint(**vocabulary: int) -> str:
        return tokenizer_fingerprint(SimpleNamespace(get_vocab=lambda: vocabulary))

    assert fingerprint(a=0, b=1) == fingerprint(b=1, a=0)
    assert fingerprint(a=0, b=1) != fingerprint(a=1, b=0)


def test_a_model_fingerprint_depends_on_weights_not_on_dtype() -> None:
    model = tiny.model(dtype=torch.bfloat16)
    result = model_fingerprint(model)
    wide = copy.deepcopy(model).to(torch.float64)
    assert model_fingerprint(wide) == result
    assert model_fingerprint(tiny.model(seed=1, dtype=torch.bfloat16)) != result
    with torch.no_grad():
        next(wide.parameters())[0, 0] += 1.0
    changed = model_fingerprint(wide)
    wide.register_buffer("qweight", torch.ones(2, 3, dtype=torch.int32))
    assert len({result, changed, model_fingerprint(wide)}) == 3


DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_loads_of_one_checkpoint_are_one_model(dtype: torch.dtype) -> None:
    checkpoint = copy.deepcopy(tiny.model()).to(dtype)
    with torch.no_grad():
        for weight in checkpoint.parameters():
            weight.mul_(1e-3)  # some are subnormal in float16
    prints = [model_fingerprint(copy.deepcopy(checkpoint).to(each)) for each in DTYPES]
    other = model_fingerprint(tiny.model(seed=1, dtype=dtype))
    assert not any(same_print(each, other) for each in prints)
    for one, two in combinations(range(len(DTYPES)), 2):
        halves = {DTYPES[one], DTYPES[two]} == {torch.float16, torch.bfloat16}
        if not (halves and dtype in (torch.float32, torch.float64)):
            assert same_print(prints[one], prints[two])


def test_fingerprints_that_share_a_part_are_equal() -> None:
    assert same_print("a+b", "c+b") and same_print("a", "a+b") and same_print(None, None)
    assert not same_print("a+b", "c") and not same_print("a", None) and not same_print(None, "a")


def test_prints_of_covers_the_passed_model_and_tokenizer() -> None:
    model, tokenizer = tiny.model(), tiny.tokenizer()
    assert prints_of(None, None) == {}
    assert prints_of("abc", None) == {"model": "abc"}
    assert prints_of(model, tokenizer) == {
        "model": model_fingerprint(model),
        "tokenizer": tokenizer_fingerprint(tokenizer),
    }


def test_a_store_fits_unless_its_fingerprint_differs() -> None:
    check_prints("it", {}, {"model": "a"})
    check_prints("it", {"model": None}, {"model": "a"})
    check_prints("it", {"model": "a", "tokenizer": "t"}, {"model": "a"})
    check_prints("it", {"model": "a+b"}, {"model": "b"})  # one of two is enough
    with pytest.raises(StoreError, match="it was made with another tokenizer"):
        check_prints("it", {"model": "a", "tokenizer": "t"}, {"model": "a", "tokenizer": "u"})
    with pytest.raises(StoreError, match=r"another config .fingerprint none"):
        check_prints("it", {"model": "a"}, {"model": "a", "config": "c"})


HOLDERS: dict[str, Callable[[Any], Any]] = {
    "list": lambda drafter: [ContextDrafter(), drafter],
    "fuse": lambda drafter: Fuse([ContextDrafter(), drafter]),
    "auto": AutoDrafter,
    "rasd": lambda drafter: Rasd(ContextDrafter(), [drafter]),
    "select": lambda drafter: Select([MatchDrafter()], drafter),
    "suffix": SuffixDrafter,
    "suffix of several": lambda drafter: SuffixDrafter(Fuse([drafter, ContextDrafter()])),
    "hierarchy": lambda drafter: HierarchyDrafter(corpus=drafter, lookahead=False),
}


class Bound(NeighbourDrafter):
    """A drafter that belongs to one model."""

    def fits(self, model: Any = None, tokenizer: Any = None) -> None:
        check_prints("the table", prints_of(tiny.model(seed=1), None), prints_of(model, tokenizer))


@pytest.mark.parametrize("holder", HOLDERS)
def test_containers_refuse_a_drafter_of_another_model(holder: str) -> None:
    drafter = HOLDERS[holder](Bound())
    Engine(tiny.model(seed=1), drafter=drafter, budget=4)
    with pytest.raises(StoreError, match="made with another model"):
        Engine(tiny.model(seed=2), drafter=drafter, budget=4)


@pytest.mark.parametrize("holder", sorted(HOLDERS.keys() - {"list", "auto"}))
def test_containers_need_prompt_tokens_if_a_part_does(holder: str) -> None:
    for reads in (True, False):
        drafter = HOLDERS[holder](NeighbourDrafter(reads_prompt=reads))
        assert drafter.needs.prompt_top_tokens is reads


@pytest.mark.parametrize("wrong", ["context", ContextDrafter, 3])
@pytest.mark.parametrize("holder", sorted(HOLDERS))
def test_containers_refuse_objects_that_are_not_drafters(holder: str, wrong: Any) -> None:
    if (holder, wrong) == ("list", "context"):
        return  # a list may contain names
    with pytest.raises(InputError, match="expected"):
        Engine(tiny.model(), drafter=HOLDERS[holder](wrong), budget=4)
