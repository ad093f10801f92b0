"""Build one drafter from names, objects and models; faults of contained drafters."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from ragspec import errors
from ragspec.drafters.base import DraftContext, Drafter, DraftRequest
from ragspec.drafters.build import build_drafter
from ragspec.drafters.fuse import Fuse
from ragspec.registry import NAMES
from ragspec.retrievers import HierarchyDrafter, Rasd, Select
from ragspec.rules.base import Step
from ragspec.trees.draft_tree import DraftKind
from ragspec.verification.causal import CausalTarget
from ragspec.verification.path_rows import PathTarget
from tests.support import tiny
from tests.support.fixed import BrokenDrafter, FixedDrafter
from tests.support.noisy import NoisyTrees


def build(drafter: Any, draft_model: Any = None) -> Any:
    target = CausalTarget(tiny.model("llama"))
    return build_drafter(drafter, draft_model, tiny.tokenizer(), target)


def names(result: Fuse) -> list[str]:
    return [drafter.name for drafter in result.drafters]


def test_nothing_requested_is_plain_decoding() -> None:
    assert build(None) is build([]) is build(()) is None


def test_names_objects_and_lists() -> None:
    noisy = NoisyTrees({})
    assert names(build("context")) == ["context"]
    assert build(noisy).drafters == (noisy,)
    assert names(build(["context", noisy])) == ["context", "noisy"]
    assert names(build((noisy, "context"))) == ["noisy", "context"]
    fused = Fuse([noisy])
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
    assert names(build("model", small)) == ["model"]
    assert names(build("fused", small)) == ["context", "model"]
    assert names(build("rapid", small)) == ["rapid"]


FOREIGN = [tiny.model(vocab_size=50), (tiny.model(vocab_size=320), tiny.bpe_tokenizer())]
NO_DRAFTERS = [5, 3.0, object(), b"context", [5], [None], ["context", 7]]


@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        *(((each,), errors.InputError, "as a drafter; expected a name") for each in NO_DRAFTERS),
        (("contxt",), errors.UnknownNameError, "context"),
        (("fuse",), errors.UnknownNameError, "unknown drafter 'fuse'.* Known: auto, context"),
        ((None, 5), errors.InputError, "got int as a draft model"),
        ((None, "no-such-draft-model-here"), errors.MissingModelError, "no-such-draft-model-here"),
        ((None, FOREIGN[0]), errors.TokenizerMismatchError, "50 token ids and the target 97"),
        ((None, FOREIGN[1]), errors.TokenizerMismatchError, "in the draft"),
    ],
)
def test_invalid_drafters_and_draft_models_are_refused(
    inputs: tuple[Any, ...], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        build(*inputs)


@pytest.mark.parametrize("name", NAMES["drafter"])
def test_each_name_builds_a_drafter_or_names_the_missing_source(name: str) -> None:
    needs = {"rest": r"store; .*CorpusIndex\.open", "head": r"head; .*HeadDrafter\(folder\)"}
    needs |= dict.fromkeys(("rapid", "model", "fused"), "draft model; .*draft_model=")
    needs["next-tokens"] = "table; "
    refusal = pytest.raises(errors.InputError, match=f"'{name}' got no {needs.get(name)}")
    with refusal if name in needs else nullcontext():
        assert build(name).drafters


def test_a_target_may_be_the_draft_model() -> None:
    assert names(build(None, CausalTarget(tiny.model("llama", seed=1)))) == ["model"]
    other = CausalTarget(tiny.model("llama", vocab_size=50))
    with pytest.raises(errors.TokenizerMismatchError, match="50 token ids and the target 97"):
        build(None, other)
    with pytest.raises(
        errors.UnsupportedModelError, match="cannot draft: it has no tree attention"
    ):
        build(None, PathTarget(tiny.model("llama")))


DELEGATE_REQUEST = DraftRequest((1, 2), 20)
DELEGATE_PLACE = DraftContext([1, 2], 2, 50)
HOLDERS: dict[str, Callable[[Drafter, Drafter], Drafter]] = {
    "select": lambda one, other: Select([one, other]),
    "hierarchy": lambda one, other: HierarchyDrafter(one, other, lookahead=False),
    "fuse": lambda one, other: Fuse([one, other]),
    "rasd": lambda one, other: Rasd(other, [one]),
    "rasd, drafter": lambda one, other: Rasd(one, [other]),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_other_sources_draft_after_one_fails(holder: str) -> None:
    good = FixedDrafter([7, 8], accept_prob=[0.7, 0.6], matched=1)
    session = HOLDERS[holder](BrokenDrafter(), good).open(DELEGATE_REQUEST)
    with pytest.warns(RuntimeWarning, match="'broken' is switched off"):
        for _ in range(4):
            tree = session.propose(DELEGATE_PLACE, 5)
            assert tree.tokens.tolist() == [7, 8]
            assert holder != "select" or session.matched == 1
            session.observe(Step(tree, (), (7,)))
    assert session.faults == {"broken": 3}
