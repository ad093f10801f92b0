"""From what the user asked for to one drafter."""

from __future__ import annotations

import copy
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ragspec.drafters.build import build_drafter
from ragspec.drafters.fuse import Fuse
from ragspec.errors import (
    InputError,
    ModelNotFoundError,
    TokenizerMismatchError,
    UnknownNameError,
    UnsupportedModelError,
)
from ragspec.registry import NAMES
from ragspec.trees.draft_tree import DraftKind
from ragspec.verification.causal import CausalTarget
from ragspec.verification.path_rows import PathTarget
from tests.support import tiny
from tests.support.mixing import MixingDrafter


def build(drafter: Any, draft_model: Any = None) -> Any:
    target = CausalTarget(tiny.model("llama"))
    return build_drafter(drafter, draft_model, tiny.tokenizer(), target)


def names(result: Fuse) -> list[str]:
    return [drafter.name for drafter in result.drafters]


def test_nothing_requested_is_plain_decoding() -> None:
    assert build(None) is None
    assert build([]) is None
    assert build(()) is None


def test_names_objects_and_lists() -> None:
    mixing = MixingDrafter({})
    assert names(build("context")) == ["context"]
    assert build(mixing).drafters == (mixing,)
    assert names(build(["context", mixing])) == ["context", "mixing"]
    assert names(build((mixing, "context"))) == ["mixing", "context"]
    fused = Fuse([mixing])
    assert build(fused) is fused
    assert build([fused]) is fused


def test_a_draft_model_is_one_more_source(tmp_path: Path) -> None:
    small = tiny.model("llama", num_hidden_layers=1)
    result = build("context", small)
    assert len(result.drafters) == 2
    assert result.kind is DraftKind.COUPLED
    assert len(build(None, (small, tiny.tokenizer())).drafters) == 1
    copy.deepcopy(small).save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    for form in (tmp_path, str(tmp_path)):
        assert names(build(None, form)) == names(build(None, small))


@pytest.mark.parametrize("wrong", [5, 3.0, object(), b"context", [5], [None], ["context", 7]])
def test_what_is_no_drafter_is_refused(wrong: Any) -> None:
    with pytest.raises(InputError, match="as a drafter; expected a name"):
        build(wrong)


def test_names_that_nothing_answers_to() -> None:
    with pytest.raises(UnknownNameError, match="context"):
        build("contxt")
    with pytest.raises(ModelNotFoundError):
        build(None, "no-such-draft-model-here")


@pytest.mark.parametrize("name", NAMES["drafter"])
def test_a_name_alone_gives_a_drafter_or_says_what_is_missing(name: str) -> None:
    with suppress(InputError):
        assert build(name).drafters


def test_fused_drafters_are_a_list_and_no_name() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown drafter 'fuse'.* Known: auto, context"):
        build("fuse")


def test_what_is_no_draft_model_is_refused() -> None:
    with pytest.raises(InputError, match="got int as a draft model"):
        build(None, 5)


def test_a_target_may_be_the_draft_model() -> None:
    small = CausalTarget(tiny.model("llama", seed=1))
    assert names(build(None, small)) == ["model"]
    other = CausalTarget(tiny.model("llama", vocab_size=50))
    with pytest.raises(TokenizerMismatchError, match="50 token ids and the target 97"):
        build(None, other)
    with pytest.raises(UnsupportedModelError, match="cannot draft: it has no tree attention"):
        build(None, PathTarget(tiny.model("llama")))


def test_a_draft_model_of_another_vocabulary_is_refused() -> None:
    with pytest.raises(TokenizerMismatchError):
        build(None, tiny.model("llama", vocab_size=50))
    with pytest.raises(TokenizerMismatchError):
        build(None, (tiny.model("llama", vocab_size=320), tiny.bpe_tokenizer()))
