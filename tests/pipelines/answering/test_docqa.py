"""Questions over documents: answers, prompts, refusals and invalid arguments."""

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from ragspec import Engine, Sampling
from ragspec.errors import DocumentError, InputError, PromptTooLongError, StoreError
from ragspec.models.resolve import STARTER
from ragspec.pipelines import DocQA, IterativeRag
from ragspec.pipelines.answering.template import TEMPLATES
from ragspec.reports.generation import Generation, count_sources, report_of
from ragspec.retrievers import Document, PassageIndex
from ragspec.rules.base import Step
from ragspec.trees.draft_tree import DraftTree
from tests.pipelines.answering.test_citations import check
from tests.support import tiny
from tests.support.toy_pdf import pdf_of

SENTENCE = "The draft model proposes a tree of tokens for the target."


class Chunks(list[str]):
    """A stream of a text that is complete."""

    def __init__(self, chunks: Sequence[str], result: Generation) -> None:
        super().__init__(chunks)
        self.result = result

    def close(self) -> None:
        self.clear()


class ScriptedEngine:
    """Writes a fixed text, without drafts."""

    def __init__(self, script: str) -> None:
        self.script = script
        self.tokenizer = tiny.bpe_tokenizer()
        self.target = SimpleNamespace(max_length=None)
        self.calls: list[dict[str, Any]] = []

    def generate(self, prompt: list[int], sampling: Any = None, **options: Any) -> Generation:
        self.calls.append({"prompt": prompt, "sampling": sampling, **options})
        tokens = self.tokenizer(self.script)["input_ids"]
        steps = [Step(DraftTree.empty(), (), tuple(tokens))]
        report = report_of(steps, tokens, 0.1, "stop", prompt_tokens=len(prompt))
        return Generation(self.script, tokens, "stop", "exact", report, prompt, steps=steps)

    def stream(self, prompt: list[int], sampling: Any = None, **options: Any) -> Any:
        generation = self.generate(prompt, sampling, **options)
        return Chunks([self.script[:5], self.script[5:]], generation)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    instance = tmp_path / "docs"
    instance.mkdir()
    (instance / "draft.md").write_text(f"# Drafting\n\nAn opening line. {SENTENCE} More follows.\n")
    (instance / "pets.txt").write_text("The cat is a pet. The dog is an animal.\n")
    (instance / "photo.png").write_bytes(b"x")
    return instance


def scripted(folder: Any, embedder: Path | None, script: str = "x", **settings: Any) -> Any:
    engine: Any = ScriptedEngine(script)
    return DocQA.from_documents(folder, engine=engine, embedder=embedder, **settings)


def ask(folder: Path, embedder: Path, script: str, **options: Any) -> Any:
    return scripted(folder, embedder, script).ask("What does the draft model propose?", **options)


def test_answer_with_citations_parts_and_report(folder: Path, embedder: Path) -> None:
    answer = ask(folder, embedder, f" [1] {SENTENCE}\nAnswer: a tree of tokens")
    assert answer.evidence == SENTENCE
    assert answer.short == "a tree of tokens"
    check(answer.text, answer.prompt, answer.citations)
    text = (folder / "draft.md").read_text()
    (first,) = answer.citations
    assert text[first.start : first.end] in (SENTENCE, SENTENCE[:-1])
    assert answer.support == "supported" and answer.supporting is not None
    assert SENTENCE in answer.supporting.text
    assert answer.label == "exact"
    assert answer.report.milliseconds["retrieve"] > 0
    assert answer.passages[0].document.name == "draft.md"


def test_the_engine_receives_ids_spans_and_options(folder: Path, embedder: Path) -> None:
    qa = scripted([folder], embedder, top_k=1)
    engine = qa.engine
    sampling = Sampling(temperature=0.5, seed=3)
    qa.ask("draft?", sampling, max_new_tokens=7, stop_token_ids=(4,))
    (call,) = engine.calls
    assert call["sampling"] is sampling
    assert call["max_new_tokens"] == 7
    assert call["stop_token_ids"] == (4,)
    assert len(call["spans"]) == 1
    assert "\nAnswer:" in [engine.tokenizer.decode(list(text.tokens)) for text in call["texts"]]
    assert engine.tokenizer.decode(call["prompt"]).endswith("Question: draft?\nEvidence:")
    DocQA(qa.retriever, engine=engine, prompt="quote").ask("draft?")
    stops = [each["stop"] for each in engine.calls]
    assert stops == [TEMPLATES[name].stop for name in ("evidence", "quote")]


def test_streams_join_to_the_text_even_if_interrupted(folder: Path, embedder: Path) -> None:
    chunks: list[str] = []
    answer = ask(folder, embedder, " [1] one two three", stream=chunks.append)
    assert "".join(chunks) == answer.text == " [1] one two three"
    interrupt = Mock(side_effect=KeyboardInterrupt)
    assert ask(folder, embedder, "some text", stream=interrupt).text == "some text"


def test_passages_that_do_not_fit_are_left_out(folder: Path, embedder: Path) -> None:
    qa = scripted(folder, embedder)
    whole = qa.prompt("the cat and the draft")
    assert len(whole.hits) == 2
    qa.engine.target.max_length = len(whole.token_ids) + 160 - 1
    assert len(qa.ask("the cat and the draft").passages) == 1


def test_index_is_saved_and_reopened(folder: Path, embedder: Path, tmp_path: Path) -> None:
    qa = scripted(folder, embedder, f" [1] {SENTENCE}")
    assert [Path(skipped.path).name for skipped in qa.skipped] == ["photo.png"]
    qa.save(tmp_path / "idx")
    again = DocQA.from_index(tmp_path / "idx", engine=qa.engine)
    assert [document.name for document in again.documents] == ["draft.md", "pets.txt"]
    assert again.ask("draft?").citations == qa.ask("draft?").citations
    with pytest.raises(StoreError):
        DocQA.from_index(tmp_path / "nowhere", engine=qa.engine)


def test_a_function_serves_as_retriever(tmp_path: Path) -> None:
    engine: Any = ScriptedEngine(f" [1] {SENTENCE}\nAnswer: tokens")
    qa = DocQA(lambda query: [(SENTENCE, 1.0, {"name": "memo"})], engine=engine)
    assert [citation.document for citation in qa.ask("q").citations] == ["memo"]
    assert qa.documents == ()
    with pytest.raises(InputError, match="cannot be saved"):
        qa.save(tmp_path / "idx")


def test_bad_requests_are_refused(folder: Path, embedder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="gives one text, got n=2"):
        ask(folder, embedder, "x", sampling=Sampling(n=2))
    with pytest.raises(InputError, match="top_k is 0"):
        DocQA(lambda question: [], top_k=0)
    with pytest.raises(DocumentError):
        DocQA.from_documents(tmp_path / "missing")
    qa = scripted(folder, None)
    with pytest.raises(InputError, match="found no passage"):
        qa.ask("quantum?", refuse=False)
    with pytest.raises(InputError, match="found no passage"):
        DocQA(lambda question: [(" ", 1.0, {})], engine=qa.engine).ask("quantum?")


def test_labels_of_the_layout_are_drafted() -> None:
    engine = Engine.from_pretrained("starter", budget=6)
    qa = DocQA.from_documents(STARTER / "guide", engine=engine)
    answer = qa.ask("What is a draft tree?")
    check(answer.text, answer.prompt, answer.citations)
    options: Any = {"spans": answer.prompt.spans, "max_new_tokens": 160}
    options["tenant"] = "another"  # whose drafter has not learned the answer
    for other in (engine, engine.with_drafter(None)):
        without = other.generate(list(answer.prompt.token_ids), **options)
        assert answer.generation.tokens == without.tokens
        assert answer.report.forwards < without.report.forwards
    report, (_, accepted) = answer.report, count_sources(answer.generation.steps)
    assert accepted["layout"] > 0 and "prediction" not in accepted
    assert report.accepted_prediction_tokens == report.rejected_prediction_tokens == 0
    with pytest.raises(PromptTooLongError):
        qa.ask(" ".join(["word"] * 3000), refuse=False)


def test_a_question_outside_the_documents_is_refused(folder: Path, embedder: Path) -> None:
    qa = scripted(folder, embedder)
    engine = qa.engine
    answer = qa.ask("Which mountain did Hannibal cross?")
    assert answer.text == "The documents do not speak of this."
    assert answer.refused is not None and "no sentence speaks of the question" in answer.refused
    assert not engine.calls and answer.support == "unsupported" and not answer.cut
    assert answer.passages and answer.report.tokens == 0
    assert json.loads(json.dumps(answer.to_dict()))["refused"] == answer.refused
    assert qa.ask("Which mountain did Hannibal cross?", refuse=False).text == "x"
    assert len(engine.calls) == 1
    triples = [("Nothing of it.", 1.0, {}), ("Nothing of it.", 0.9, {"name": "copy"})]
    bare = DocQA(lambda question: triples, engine=engine)
    assert len(bare.search("Nothing of what?").hits) == 1  # a copy takes no other's place
    assert bare.ask("Which mountain did Hannibal cross?").refused is None


def test_a_quotation_from_a_pdf_names_its_page(folder: Path, embedder: Path) -> None:
    (folder / "draft.md").unlink()
    (folder / "draft.pdf").write_bytes(pdf_of("Of other things.", f"An opening line. {SENTENCE}"))
    answer = ask(folder, embedder, f" [1] {SENTENCE}\nAnswer: a tree of tokens")
    assert [citation.page for citation in answer.citations] == [2]
    assert answer.citations[0].place == "page 2"
    cited = answer.to_dict()["citations"][0]
    assert (cited["page"], cited["place"]) == (2, "page 2")


def test_arguments_of_wrong_types_are_refused(folder: Path, embedder: Path) -> None:
    qa = scripted(folder, embedder)
    calls: Any = (qa.ask, qa.search, qa.prompt, IterativeRag(qa.engine, lambda query: []).search)
    for question, call in product((None, 5, "", " "), calls):
        with pytest.raises(InputError, match="empty or no text"):
            call(question)
    assert qa.ask("Which \ud83d is it?").question == "Which \ufffd is it?"
    assert qa.search("\ud83d draft?") == qa.search("\ufffd draft?")
    assert "\ufffd draft?" in qa.prompt("\ud83d draft?").text
    with pytest.raises(InputError, match="max_new_tokens is 'x'"):
        qa.prompt("draft?", max_new_tokens="x")
    with pytest.raises(InputError, match="got 5 as the index; expected a path"):
        qa.save(5)
    wrong: Any
    wrong = {"sampling": "hot", "max_new_tokens": None, "foo": 1, "stream": 5, "on_search": 5}
    for name, value in (wrong | {"refuse": "no", "texts": 5, "spans": [(0, 1, 0, 0)]}).items():
        with pytest.raises(InputError, match=f"{value}.*expected|option 'foo'|got spans="):
            qa.ask("Which mountain did Hannibal cross?", **{name: value})
    with pytest.raises(InputError, match=r"pass Sampling\(temperature=\.\.\.\)"):
        qa.ask("Which mountain did Hannibal cross?", temperature=1.0)
    with pytest.raises(InputError, match="expected a path"):
        DocQA.from_documents(5)  # type: ignore[arg-type]
    for wrong in ({"prompt": 5}, {"prompt": b"x"}, {"embedder": 5}):
        with pytest.raises(InputError, match=r"got .* as .*; expected a name"):
            DocQA.from_documents(folder, **{"embedder": embedder, **wrong})
    with pytest.raises(InputError, match="got None as the index; expected a path"):
        DocQA.from_index(None)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"Engine\.from_pretrained\('starter'\)"):
        DocQA.from_documents(folder, engine="starter", embedder=embedder)  # type: ignore[arg-type]


def test_copies_of_a_passage_count_once_and_are_named() -> None:
    texts = {"a": SENTENCE, "b": SENTENCE, "c": "Rivers run to the sea."}
    results = [(texts[name], 1.0, {"name": name}) for name in "aabc"]
    engine: Any = ScriptedEngine("It does.")
    qa = DocQA(lambda query: results, engine=engine, top_k=2)
    result = qa.ask("What does it propose?").to_dict()
    copies = [(each["document"], each["copies"]) for each in result["passages"]]
    assert copies == [("a", ["b"]), ("c", [])]
    assert result["sentences"][0]["copies"] == ["b"]
    other = [f"What {each} propose." for each in ("rivers", "seas")]
    documents = [Document(f"{n}", "", text) for n, text in enumerate([*[SENTENCE] * 700, *other])]
    index = PassageIndex.build(documents, embedder=None)
    hits = DocQA(index, engine=engine).search("What does it propose?").hits
    assert sorted(len(hit.copies) for hit in hits) == [0, 0, 699]
