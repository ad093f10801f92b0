"""lm-eval over an engine: generations of plain decoding, likelihoods of transformers' forward."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ragspec.engine.engine import Engine
from ragspec.errors import InputError
from tests.support import chatting, tiny
from tests.support.served import NAME, served

pytest.importorskip("lm_eval", reason="lm-eval is not installed")
import lm_eval
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.openai_completions import LocalCompletionsAPI

from ragspec.adapters.lm_eval import RagspecLM

CONTEXTS = ["Name three rivers. ", "A tree of drafts", "x" * 40, "The Rhine, the"]
GREEDY: dict[str, Any] = {"until": ["\n\n"], "max_gen_toks": 20}
SAMPLED = {**GREEDY, "do_sample": True, "temperature": 0.8, "top_k": 30}


def requests(kind: str, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=each, idx=0) for each in arguments]


def model(drafter: Any = "context", **inputs: Any) -> RagspecLM:
    inputs.setdefault("batch_size", 3)
    return RagspecLM(Engine(tiny.model(), tiny.tokenizer(chat=True), drafter, budget=4), **inputs)


def theirs(**inputs: Any) -> HFLM:
    current = tiny.model()
    return HFLM(pretrained=current, tokenizer=tiny.tokenizer(chat=True), batch_size=2, **inputs)


def test_greedy_generations_equal_those_of_hflm() -> None:
    stops = {**GREEDY, "until": ["e", "\n"]}
    request = requests("generate_until", *((text, s) for text in CONTEXTS for s in (GREEDY, stops)))
    result = model().generate_until(request, disable_tqdm=True)
    assert result == theirs().generate_until(request, disable_tqdm=True)
    assert not any("e" in text for text in result[1::2])


def test_samples_depend_on_no_drafts_and_repeats_get_different_texts() -> None:
    texts = [*CONTEXTS, *CONTEXTS[:1] * 3]
    request = requests("generate_until", *((text, SAMPLED) for text in texts))
    result = model().generate_until(request, disable_tqdm=True)
    assert result == model(None, batch_size=1).generate_until(request, disable_tqdm=True)
    assert len({result[0], *result[4:]}) == 4


def test_a_context_that_is_too_long_keeps_its_end() -> None:
    long = "abc " * 200
    request = requests("generate_until", (long, GREEDY), (long[-492:], GREEDY))
    first, second = model().generate_until(request, disable_tqdm=True)
    assert first == second
    empty = requests("generate_until", ("", GREEDY), ("abc", GREEDY))
    assert all(model().generate_until(empty, disable_tqdm=True))


def test_likelihoods_are_those_of_a_forward() -> None:
    request = requests("loglikelihood", ("The Rhine, the", " Po"))
    ((ours, greedy),), ((other, expected),) = (
        lm.loglikelihood(request, disable_tqdm=True) for lm in (model(), theirs())
    )
    assert (ours, greedy) == (pytest.approx(other, abs=1e-4), expected)


def test_the_harness_builds_a_model_from_an_argument_string() -> None:
    instance = get_model("ragspec").create_from_arg_string(
        "model=starter,drafter=context,budget=auto", {"batch_size": "auto", "device": None}
    )
    assert isinstance(instance, RagspecLM)
    assert instance.engine.drafter is not None
    # The harness's command names this device by itself, on every machine.
    there = "cuda:0" if torch.cuda.is_available() else "cpu"
    plain = get_model("ragspec").create_from_arg_string("drafter=None", {"device": "cuda:0"})
    assert plain.engine.drafter is None
    assert plain.device == torch.device(there)
    with pytest.raises(InputError, match="device 'abacus'"):
        get_model("ragspec").create_from_arg_string("device=abacus")


def test_the_harness_gets_the_chat_template_and_a_name() -> None:
    lm, turn = model(), {"role": "user", "content": "Hi"}
    assert lm.apply_chat_template([turn]) == "<user> Hi\n<assistant> "
    assert lm.chat_template(True) == tiny.tokenizer(chat=True).chat_template
    assert "/" not in lm.tokenizer_name


def test_a_harness_task_gives_the_same_scores_with_and_without_drafts(tmp_path: Path) -> None:
    rows = [{"q": f"Name {n} rivers.", "a": "Rhine"} for n in range(6)]
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    task = {
        "task": "rivers",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(tmp_path)},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{q}}",
        "doc_to_target": "{{a}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 12},
        "metric_list": [{"metric": "exact_match"}],
    }
    texts = []
    for drafter in ("context", None):
        result = lm_eval.simple_evaluate(
            model=model(drafter), tasks=[task], apply_chat_template=True, bootstrap_iters=0
        )
        texts.append([sample["resps"] for sample in result["samples"]["rivers"]])
        assert result["results"]["rivers"]["exact_match,none"] == 0.0
    assert texts[0] == texts[1]
    expected = chatting.alone(("user", rows[0]["q"]), max_new_tokens=12, stop=["\n"]).text
    assert texts[0][0] == [[expected]]


@pytest.mark.parametrize(
    ("inputs", "error"),
    [
        ({"max_length": 1}, "max_length is 1"),
        ({"max_length": 9999}, "max_length is 9999"),
        ({"batch_size": "many"}, "batch_size is 'many'"),
        ({"drafters": "context"}, "unknown model argument 'drafters'"),
        ({"peft": "folder"}, "'peft'.* Name a model that loads without it"),
        ({"dtype": "float32"}, "Engine and settings"),
    ],
)
def test_bad_arguments_are_reported_by_our_errors(inputs: dict[str, Any], error: str) -> None:
    with pytest.raises(InputError, match=error):
        model(**inputs)


def test_generation_arguments_that_are_unknown_are_refused() -> None:
    request = requests("generate_until", ("x", {"num_beams": 4}))
    with pytest.raises(InputError, match="num_beams"):
        model().generate_until(request, disable_tqdm=True)


def test_our_server_scores_and_writes_for_the_harness_over_http(tmp_path: Path) -> None:
    tiny.tokenizer(chat=True).save_pretrained(tmp_path)
    request = requests("loglikelihood", *((text, " and the Po") for text in CONTEXTS))
    prompts = requests("generate_until", *((text, GREEDY) for text in CONTEXTS))
    with served(Engine(tiny.model(), tiny.tokenizer(chat=True), "context")) as (client, _):
        url, options = f"{client.base_url}/v1/completions", {"max_length": 512, "batch_size": 2}
        remote = LocalCompletionsAPI(
            url, "huggingface", model=NAME, tokenizer=str(tmp_path), **options
        )
        scores, texts = remote.loglikelihood(request), remote.generate_until(prompts)
    assert texts == theirs().generate_until(prompts, disable_tqdm=True)
    for ours, other in zip(scores, theirs().loglikelihood(request), strict=True):
        assert ours == (pytest.approx(other[0], abs=1e-4), other[1])
