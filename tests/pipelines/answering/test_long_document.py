"""Long documents: prefilled once in memory or on disk, with the answers of a fresh prefill."""

import copy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors import SafetensorError

from ragspec import Engine, Sampling
from ragspec.drafters.heads.drafter import HeadDrafter
from ragspec.errors import InputError, PromptTooLongError, RagspecError, StoreError
from ragspec.pipelines import LongDocument
from ragspec.verification.causal import CausalTarget
from tests.pipelines.answering.test_chunks import SAMPLINGS
from tests.pipelines.answering.test_citations import check
from tests.support import heads, tiny
from tests.support.damage import check_damage

TEXT = (
    "The walk keeps a token of the draft tree. The rule is kept by the target, word for word. " * 2
)
QUESTIONS = ("What is kept?", "Who keeps the rule?", "What is a walk?")
INPUTS: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True}


def engine(drafter: Any = "auto", **model: Any) -> Engine:
    target = CausalTarget(tiny.model(dtype=torch.float64, **model))
    if isinstance(drafter, list):
        head = HeadDrafter(heads.fresh(target), target, min_expected_gain=0.0)
        drafter = [head if each == "head" else each for each in drafter]
        return Engine(target, tiny.tokenizer(), drafter, budget=5)
    return Engine(target, tiny.tokenizer(), drafter)


def text_file(folder: Path, text: str = TEXT) -> Path:
    path = folder / "report.txt"
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("long")
    LongDocument.open(text_file(folder), engine()).save(folder / "prefix_cache")
    return folder / "prefix_cache"


HEADS: list[Any] = [["head"], ["head", "context"]]


@pytest.mark.parametrize("sampling", [*SAMPLINGS, Sampling(temperature=0.8, top_p=0.9, seed=1)])
@pytest.mark.parametrize("drafter", [None, "context", "auto", *HEADS])
def test_answers_equal_those_of_a_fresh_prefill(
    saved: Path, drafter: Any, sampling: Sampling, tmp_path: Path
) -> None:
    request, plain = engine(drafter), engine(None)
    opened = LongDocument.open(text_file(tmp_path), request)
    again = LongDocument.open(saved, engine(drafter))
    over = opened.over(Engine(request.target, request.tokenizer, request.drafter, budget=5))
    for question in (*QUESTIONS, QUESTIONS[0]):
        result = opened.ask(question, sampling, **INPUTS)
        fresh = plain.generate(
            list(result.prompt.token_ids), sampling, stop=opened.template.stop, **INPUTS
        )
        assert result.generation.tokens[: len(fresh.tokens)] == fresh.tokens
        assert result.report.cached_tokens >= opened.tokens
        for document in (again, over):
            other = document.ask(question, sampling, **INPUTS)
            assert other.generation.tokens == result.generation.tokens
            assert drafter not in HEADS or other.report.drafted_by_source["head"] > 0
            assert not other.report.faults
        assert result.label == "exact" and TEXT.strip()[:20] in result.prompt.text


def test_the_document_is_prefilled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_tenants_do_not_share_a_document(saved: Path, tmp_path: Path) -> None:
    for path in (text_file(tmp_path), saved):
        request = engine()
        opened = LongDocument.open(path, request, tenant="us")
        assert opened.ask(QUESTIONS[0], **INPUTS).report.cached_tokens >= opened.tokens
        assert request.prefix_cache.export(opened.prefix.token_ids) is None, "another tenant's"
        with pytest.raises(InputError, match=r"tenant=, which LongDocument.open\(\) sets"):
            opened.ask(QUESTIONS[0], tenant="them")


def test_concurrent_questions_equal_each_alone(tmp_path: Path) -> None:
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
    plainly = opened.over(request.with_drafter(None).with_limits(1))
    assert result.text == plainly.ask(QUESTIONS[0], **INPUTS).text
    check(result.text, result.prompt, result.citations)
    assert len(result.citations) == 1 and result.support == "quoted"


def test_a_part_is_read_if_the_document_does_not_fit(tmp_path: Path) -> None:
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
        ({"token_range": "0:5"}, "Expected token_range.*got '0:5'"),
        ({"engine": "starter"}, "expected an Engine"),
        ({"token_range": (9000, 9001)}, "begins behind the"),
        ({"prompt": "nothing"}, "nothing"),
        ({"tenant": 5}, "tenant is 5; expected a text"),
        *(({"path": path}, f"got {path} as the document; expected a path") for path in (5, None)),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        LongDocument.open(**{"path": text_file(tmp_path), "engine": engine(), **options})


def test_an_engine_over_another_model_is_refused(saved: Path) -> None:
    opened = LongDocument.open(saved, engine())
    with pytest.raises(InputError, match="another model"):
        opened.over(engine())
    calls: dict[Any, str] = {opened.over: "an Engine", opened.save: "a path"}
    for call, expected in (calls | {opened.search: "no text", opened.prompt: "no text"}).items():
        with pytest.raises(InputError, match=expected):
            call(5)
    assert "\ufffd" in opened.prompt("\ud83d?").text and opened.search("\ud83d?").sentences


def test_a_saved_document_of_another_model_is_refused(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="another model"):
        LongDocument.open(saved, engine(seed=3))
    with pytest.raises(StoreError, match="another config"):
        LongDocument.open(saved, engine(rms_norm_eps=0.5))
    other = copy.deepcopy(tiny.model(dtype=torch.float64)).to(torch.float32)
    with pytest.raises(StoreError, match=r"holds numbers of torch.float64.*float32"):
        LongDocument.open(saved, Engine(other, tiny.tokenizer(), None))
    with pytest.raises(InputError, match="saved with its own"):
        LongDocument.open(saved, engine(), token_range=(0, 3))
    with pytest.raises(RagspecError, match="not a regular file; name one"):
        LongDocument.open(tmp_path, engine())


def test_a_model_whose_cache_cannot_be_saved_is_refused(tmp_path: Path) -> None:
    request = Engine(tiny.model("qwen3_next"), tiny.tokenizer(), None)
    with pytest.raises(RagspecError, match="cannot be kept"):
        LongDocument.open(text_file(tmp_path), request)
    with pytest.raises(InputError, match=r"has 1\d tokens .* at least 16"):
        LongDocument.open(text_file(tmp_path, "Hi."), Engine.from_pretrained("starter"))


def test_a_full_disk_is_a_typed_error(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = SafetensorError("No space left on device (os error 28)")
    monkeypatch.setattr("safetensors.torch.save_file", Mock(side_effect=error))
    with pytest.raises(StoreError, match=r"No space left .* free some room"):
        LongDocument.open(saved, engine()).save(tmp_path / "full")


def test_damage_to_any_file_is_a_typed_error(saved: Path, tmp_path: Path) -> None:
    assert len({path.stat().st_mode for path in saved.glob("gen-*/*")}) == 1, "for all users"
    request = engine(None)
    check_damage(saved, lambda twin: LongDocument.open(twin, request), tmp_path, 200)
