"""A long document that is read once: the answers of reading it anew, kept in memory or on disk."""

import copy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors import SafetensorError

from ragspec import Engine, Sampling
from ragspec.errors import InputError, PromptTooLongError, RagspecError, StoreError
from ragspec.pipelines import LongDocument
from ragspec.pipelines.answering.chunks import room_of
from ragspec.pipelines.cli.show import plain_engine
from ragspec.retrievers import Rapid
from tests.pipelines.answering.test_citations import check
from tests.pipelines.answering.test_modes import SAMPLINGS, parts
from tests.support import tiny
from tests.support.damage import check_damage

TEXT = (
    "The walk keeps a token of the draft tree. The rule is kept by the target, word for word. " * 2
)
QUESTIONS = ("What is kept?", "Who keeps the rule?", "What is a walk?")
INPUTS: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True}


def engine(drafter: Any = "auto", **model: Any) -> Engine:
    return Engine(tiny.model(dtype=torch.float64, **model), tiny.tokenizer(), drafter)


def text_file(folder: Path, text: str = TEXT) -> Path:
    path = folder / "report.txt"
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def selected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("long")
    LongDocument.open(text_file(folder), engine()).save(folder / "prefix_cache")
    return folder / "prefix_cache"


@pytest.mark.parametrize("sampling", [*SAMPLINGS, Sampling(temperature=0.8, top_p=0.9, seed=1)])
@pytest.mark.parametrize("drafter", [None, "context", "auto"])
def test_answers_are_those_of_prefill_it_again(
    selected: Path, drafter: Any, sampling: Sampling, tmp_path: Path
) -> None:
    request, plain = engine(drafter), engine(None)
    opened = LongDocument.open(text_file(tmp_path), request)
    again = LongDocument.open(selected, request)
    for question in (*QUESTIONS, QUESTIONS[0]):
        result = opened.ask(question, sampling, **INPUTS)
        fresh = plain.generate(
            list(result.prompt.token_ids), sampling, stop=opened.template.stop, **INPUTS
        )
        assert result.generation.tokens[: len(fresh.tokens)] == fresh.tokens
        assert result.report.cached_tokens >= opened.tokens
        assert again.ask(question, sampling, **INPUTS).generation.tokens == result.generation.tokens
        assert result.label == "exact" and TEXT.strip()[:20] in result.prompt.text


def test_the_document_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request, message = engine(), list[tuple[int, int]]()
    request.target.piece = 16
    opened = LongDocument.open(
        text_file(tmp_path), request, on_read=lambda done, total: message.append((done, total))
    )
    assert message[0][0] == 0 and message[-1][0] == message[-1][1] >= opened.tokens
    assert opened.bytes > 0
    forward = Mock(wraps=request.target.forward)
    monkeypatch.setattr(request.target, "forward", forward)
    for question in QUESTIONS:
        forward.reset_mock()
        result = opened.ask(question, **INPUTS)
        read = [call.args[0].shape[1] for call in forward.mock_calls]
        assert max(read) < opened.tokens
        assert sum(read[:4]) < opened.tokens
        assert result.passages[0].document.name == "report.txt"


def test_a_document_of_a_tenant_is_read_once_for_it_alone(selected: Path, tmp_path: Path) -> None:
    for path in (text_file(tmp_path), selected):
        request = engine()
        opened = LongDocument.open(path, request, tenant="us")
        assert opened.ask(QUESTIONS[0], **INPUTS).report.cached_tokens >= opened.tokens
        assert request.prefix_cache.export(opened.prefix.token_ids) is None, "another tenant's"
        with pytest.raises(InputError, match=r"tenant=, which LongDocument.open\(\) sets"):
            opened.ask(QUESTIONS[0], tenant="them")


def test_two_questions_at_once_leave_it_untouched(tmp_path: Path) -> None:
    opened = LongDocument.open(text_file(tmp_path), engine("context"))

    def ask(question: str) -> list[str]:
        return [opened.ask(question, **INPUTS).text for _ in range(4)]

    alone = [[opened.ask(question, **INPUTS).text] * 4 for question in QUESTIONS]
    with ThreadPoolExecutor(len(QUESTIONS)) as threads:
        assert list(threads.map(ask, QUESTIONS)) == alone


def test_answers_quote_the_document_and_stream(tmp_path: Path) -> None:
    chunks: list[str] = []
    request = Engine.from_pretrained("starter", "context")
    opened = LongDocument.open(text_file(tmp_path), request, prompt="quote")
    result = opened.ask(QUESTIONS[0], stream=chunks.append, prediction=TEXT, **INPUTS)
    assert "".join(chunks) == result.text
    assert result.text == opened.over(plain_engine(request)).ask(QUESTIONS[0], **INPUTS).text
    check(result.text, result.prompt, result.citations)
    assert len(result.citations) == 1 and result.support == "quoted"


def test_a_part_is_read_where_all_does_not_fit(tmp_path: Path) -> None:
    small = engine(max_position_embeddings=512)
    long = text_file(tmp_path, "a walk of the tree and so on. " * 60)
    message = r"fit: read a part of it \(token_range=\(0, "
    with pytest.raises(PromptTooLongError, match=message) as error:
        LongDocument.open(long, small)
    fits = int(str(error.value).split("token_range=(0, ")[1].split(")")[0])
    opened = LongDocument.open(long, small, token_range=(0, fits))
    assert opened.ask("What?", max_new_tokens=8).report.cached_tokens >= opened.tokens > fits
    assert opened.hit.passage.text == long.read_text()[: opened.hit.passage.end]
    with pytest.raises(PromptTooLongError):
        opened.ask("What? " * 60, max_new_tokens=200)
    middle = LongDocument.open(long, small, token_range=(20, 60))
    assert middle.hit.passage.start > 0 and middle.tokens < opened.tokens
    middle.save(tmp_path / "prefix_cache")
    assert LongDocument.open(tmp_path / "prefix_cache", small).token_range == (20, 60)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"token_range": (5, 5)}, "Expected token_range"),
        ({"token_range": (-1, 5)}, "Expected token_range"),
        ({"token_range": "0:5"}, "Expected token_range"),
        ({"engine": "starter"}, "expected an Engine"),
        ({"token_range": (9000, 9001)}, "begins behind the"),
        ({"prompt": "nothing"}, "nothing"),
        ({"tenant": 5}, "tenant is 5; expected a text"),
        *(({"path": path}, f"got {path} as the document; expected a path") for path in (5, None)),
    ],
)
def test_refuses_what_cannot_be_read(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        LongDocument.open(**{"path": text_file(tmp_path), "engine": engine(), **options})


def test_an_engine_over_another_model_is_refused(selected: Path) -> None:
    opened = LongDocument.open(selected, engine())
    with pytest.raises(InputError, match="another model"):
        opened.over(engine())
    doors: dict[Any, str] = {opened.over: "an Engine", opened.save: "a path"}
    for door, expected in (doors | {opened.search: "no text", opened.prompt: "no text"}).items():
        with pytest.raises(InputError, match=expected):
            door(5)
    assert "\ufffd" in opened.prompt("\ud83d?").text and opened.search("\ud83d?").sentences


def test_a_preserved_document_of_something_else_is_refused(selected: Path, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="another model"):
        LongDocument.open(selected, engine(seed=3))
    other = copy.deepcopy(tiny.model(dtype=torch.float64)).to(torch.float32)
    with pytest.raises(StoreError, match=r"holds numbers of torch.float64.*float32"):
        LongDocument.open(selected, Engine(other, tiny.tokenizer(), None))
    with pytest.raises(InputError, match="saved with its own"):
        LongDocument.open(selected, engine(), token_range=(0, 3))
    with pytest.raises(RagspecError, match="not a regular file; name one"):
        LongDocument.open(tmp_path, engine())


def test_a_model_whose_cache_cannot_be_saved_is_refused(tmp_path: Path) -> None:
    request = Engine(tiny.model("qwen3_next"), tiny.tokenizer(), None)
    with pytest.raises(RagspecError, match="cannot be kept"):
        LongDocument.open(text_file(tmp_path), request)
    with pytest.raises(InputError, match=r"has 1\d tokens .* at least 16"):
        LongDocument.open(text_file(tmp_path, "Hi."), Engine.from_pretrained("starter"))


def test_a_full_disk_is_a_typed_error(
    selected: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = SafetensorError("No space left on device (os error 28)")
    monkeypatch.setattr("safetensors.torch.save_file", Mock(side_effect=error))
    with pytest.raises(StoreError, match=r"No space left .* free some room"):
        LongDocument.open(selected, engine()).save(tmp_path / "full")


def test_damage_to_any_file_is_a_typed_error(selected: Path, tmp_path: Path) -> None:
    assert len({path.stat().st_mode for path in selected.glob("gen-*/*")}) == 1, "for all users"
    request = engine(None)
    check_damage(selected, lambda twin: LongDocument.open(twin, request), tmp_path, 200)


def test_a_drafter_with_a_separate_context_reads_what_the_question_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny.model(dtype=torch.float64, max_position_embeddings=2048)
    request = Engine(target, tiny.tokenizer(), Rapid(target), budget=4)
    opened = LongDocument.open(parts(), request)
    generate = Mock(wraps=request.generate)
    monkeypatch.setattr(request, "generate", generate)
    result = opened.ask("Who keeps the rule?", **INPUTS)
    read = generate.call_args.kwargs["draft_prompt"]
    assert 10 < len(read) < opened.tokens // 2
    assert "The rule is kept" in request.tokenizer.decode(list(read))
    assert result.to_dict()["chunks"][0]["start"] == result.chunks[0].passage.start
    starts = [chunk.passage.start for chunk in result.chunks]
    assert starts == sorted(starts)
    for chunk in result.chunks:
        assert chunk.passage.text in opened.document.text[chunk.passage.start :]
    over = opened.over(Engine(request.target, tiny.tokenizer(), None))
    plain = over.ask("Who keeps the rule?", **INPUTS)
    assert result.generation.tokens == plain.generation.tokens
    assert result.report.drafted_by_source["rapid"] > 0


def test_what_a_drafter_reads_is_bounded() -> None:
    assert room_of(7000) == 875 and room_of(1_000_000) == 41_666 and room_of(40_000) == 4096
    assert room_of(3) == 1
