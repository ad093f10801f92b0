"""Drafting methods by name: each is built from its sources and does not change the text."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from ragspec.drafters.base import DraftContext, DraftRequest
from ragspec.drafters.build import build_drafter
from ragspec.drafters.heads.files import save_head
from ragspec.drafters.method import Sources, build, listed
from ragspec.engine.engine import Engine
from ragspec.errors import InputError, MissingModelError, StoreError, UnknownNameError
from ragspec.pipelines.console.checks import NEEDS, STORED, UNLISTED
from ragspec.pipelines.methods import compose, open_sources
from ragspec.registry import NAMES
from ragspec.retrievers.corpus.index import CorpusIndex
from ragspec.verification.causal import CausalTarget
from tests.support import heads, tiny
from tests.support.next_tokens import write

PROMPT = [5, 6, 7, 8, 9, 5, 6, 7]
METHODS = listed()


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sources]:
    folder, texts = tmp_path_factory.mktemp("stores"), [[5, 6, 7, 8, 40, 41, 42]]
    names = ("corpus", "history")
    instance = [CorpusIndex.build(texts, tiny.VOCAB, folder / name) for name in names]
    corpus, history = instance
    yield Sources(corpus, history, tiny.model("llama", num_hidden_layers=1))
    for store in instance:
        store.close()


def test_the_tables_of_the_command_line_are_those_of_the_methods() -> None:
    assert set(STORED) == {n for n, m in METHODS.items() if "store" in m.needs | m.uses}
    assert set(UNLISTED) == NAMES["drafter"].keys() - METHODS.keys()
    needs = {name for name in METHODS if METHODS[name].needs}
    assert needs == {*NEEDS["store"], *NEEDS["draft model"]}


def test_each_build_is_a_fresh_drafter(sources: Sources) -> None:
    first, second = (build("suffix", sources) for _ in range(2))
    assert first[0] is not second[0]


def test_stores_are_opened_by_path(sources: Sources, tmp_path: Path) -> None:
    assert open_sources(None) == Sources()
    assert sources.corpus is not None
    opened = open_sources(sources.corpus.path)
    assert opened.corpus is not None
    assert opened.history is None
    assert len(opened.past()) == 1
    opened.corpus.close()
    with pytest.raises(StoreError):
        open_sources(None, tmp_path / "nothing")


def test_only_drafters_of_a_scope_draft_its_text(tmp_path: Path) -> None:
    with CorpusIndex.build([], tiny.VOCAB, tmp_path / "c") as store:
        store.append([5, 6, 7, 60, 61, 62], scope="tenant")
        record = {}
        for scope, name in product(("tenant", "other", "global"), ("rest", "hierarchy", "auto")):
            built = build(name, Sources(store, store, scope=scope))
            drafter = build_drafter(built, None, None, CausalTarget(tiny.model("llama")))
            assert drafter is not None
            session = drafter.open(DraftRequest((1, 2, 6, 7), tiny.VOCAB))
            tree = session.propose(DraftContext([1, 2, 6, 7], 4, 20), 6)
            record[scope, name] = 60 in tree.tokens
        assert {scope for (scope, _), there in record.items() if there} == {"tenant"}
        assert sum(record.values()) == 3
    with pytest.raises(InputError, match="'tenant' and no store"):
        open_sources(None, scope="tenant")
    assert open_sources(tmp_path / "c", scope="tenant").scope == "tenant"


def test_compose_returns_a_drafter_for_each_source(sources: Sources, tmp_path: Path) -> None:
    assert compose(None, Sources()) == compose("none", Sources()) == []
    assert [each.name for each in compose("context", Sources())] == ["context"]
    names = [each.name for each in compose(["lookup", "rest"], sources)]
    assert names == ["lookup", "history", "corpus", "model"]
    model = Sources(draft_model=sources.draft_model)
    names = [each.name for name in (None, "rasd") for each in compose(name, model)]
    assert names == ["model", "rasd"]
    names = [each.name for each in compose(["auto", "lookup"], model)]
    assert names == ["auto", "model", "lookup"], "the model drafts once"
    target = CausalTarget(tiny.model("llama"))
    target.next_tokens = write(tmp_path / "table.npy", {(1,): {2: 9}})
    (auto,) = compose("auto", Sources(), target)
    assert [each.name for each in auto.drafters] == ["context", "next-tokens"]


def test_an_unused_store_and_an_unknown_name_are_refused(sources: Sources) -> None:
    with pytest.raises(InputError, match="context does not draft from stores"):
        compose("context", sources)
    with pytest.raises(InputError, match="a store and --drafter none"):
        compose(None, sources)
    for name in ("nope", *UNLISTED):
        with pytest.raises(UnknownNameError, match=f"unknown drafter '{name}'") as caught:
            compose(name, sources)
        known = str(caught.value).partition("Known: ")[2].rstrip(".").split(", ")
        assert known == sorted(["none", *METHODS])
    with pytest.raises(InputError, match="'rest' got no store; expected one"):
        compose("rest", Sources())


def test_a_folder_drafts_with_its_head(tmp_path: Path) -> None:
    model, options = CausalTarget(tiny.model("llama")), {"max_new_tokens": 16, "ignore_eos": True}
    plain = Engine(model, drafter=None).generate(PROMPT, **options).tokens  # type: ignore[arg-type]
    save_head(heads.fresh(model), tmp_path / "head")
    for name in (str(tmp_path / "head"), ["context", str(tmp_path / "head")]):
        engine = Engine(model, drafter=compose(name, Sources(), model), budget=6)
        result = engine.generate(PROMPT, **options)  # type: ignore[arg-type]
        assert result.tokens == plain
        assert result.report.faults == {}
        assert "head" in result.report.drafted_by_source
    with pytest.raises(MissingModelError):
        compose(str(tmp_path), Sources(), model)


def test_a_foreign_corpus_is_refused_when_the_engine_is_built(tmp_path: Path) -> None:
    with CorpusIndex.build(["some text"], tiny.tokenizer(), tmp_path / "c") as store:
        model = tiny.model("llama", vocab_size=320)
        with pytest.raises(StoreError, match="another tokenizer"):
            Engine(model, tiny.bpe_tokenizer(), drafter=store.drafter())
        Engine(tiny.model("llama"), tiny.tokenizer(), drafter=store.drafter())
