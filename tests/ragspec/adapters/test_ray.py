"""With real Ray where it is installed and --slow is given; the rest is tested everywhere."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ragspec.adapters.ray import AnswerBatch, answer_questions, replicated_app
from ragspec.engine.engine import Engine
from ragspec.errors import InputError, MissingExtraError, QueueFullError
from ragspec.pipelines import DocQA
from ragspec.sampling.settings import Sampling

QUESTIONS = ["What is a draft tree?", "What does the walk rule do?", "What is a budget?"]
TEXTS = ["Speculative decoding is", "A tree has", "The budget of a step", "Retrieval finds"]


@pytest.fixture(scope="module")
def guide(root: Path) -> str:
    return str(root / "ragspec" / "starter" / "guide")


@pytest.fixture(scope="module")
def ray(root: Path) -> Iterator[Any]:
    result = pytest.importorskip("ray", reason="ray is not installed")
    pytest.importorskip("ray.serve", reason="ray has no serve")
    places = {"PYTHONPATH": os.pathsep.join(str(each) for each in sys.path if each)}
    result.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=200 * 2**20,
        runtime_env={"env_vars": places | {"OMP_NUM_THREADS": "1"}},
    )
    yield result
    result.shutdown()


def maker(guide: str, pids: str) -> Any:
    """Return a function that makes a DocQA and leaves the id of its process."""

    def make() -> DocQA:
        import os
        from pathlib import Path

        import torch

        from ragspec.pipelines import DocQA

        torch.set_num_threads(1)
        Path(pids, str(os.getpid())).touch()
        return DocQA.from_documents(guide)

    return make


def test_a_batch_keeps_its_columns_and_gets_answers(guide: str) -> None:
    qa = DocQA.from_documents(guide)
    batch = {"n": np.arange(2), "request": np.array(QUESTIONS[:2], object)}
    answerer = AnswerBatch(lambda: qa, "request", None, {"max_new_tokens": 20})
    result = answerer(batch)
    assert result["n"].tolist() == [0, 1]
    for question, text, cited in zip(
        QUESTIONS, result["answer"], result["citations"], strict=False
    ):
        answer = qa.ask(question, max_new_tokens=20)
        assert text == answer.text
        assert [each["document"] for each in json.loads(cited)] == [
            each.document for each in answer.citations
        ]
    with pytest.raises(InputError, match="'question'"):
        AnswerBatch(lambda: qa)(batch)


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ray", "ray.data", "ray.serve"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "ray")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"ragspec\[ray\]"):
        answer_questions(None, "manuals")
    with pytest.raises(MissingExtraError, match=r"ragspec\[ray\]"):
        replicated_app()


@pytest.mark.slow
def test_one_of_two_actors_is_killed_and_each_answer_comes_once(
    ray: Any, guide: str, tmp_path: Path
) -> None:
    requests = [{"id": i, "question": QUESTIONS[i % len(QUESTIONS)]} for i in range(18)]
    sampling = Sampling(temperature=0.8, seed=5)
    answered = answer_questions(
        ray.data.from_items(requests), maker(guide, str(tmp_path)), actors=2, batch_size=1,
        sampling=sampling, max_new_tokens=40,
    )  # fmt: skip
    rows = iter(answered.iter_batches(batch_size=1))
    results = [next(rows)]
    first = set(tmp_path.iterdir())
    os.kill(int(next(iter(first)).name), signal.SIGKILL)
    results.extend(rows)
    assert sorted(int(row["id"][0]) for row in results) == list(range(18))
    assert len(list(tmp_path.iterdir())) > len(first), "expected an actor in the place of the lost"
    qa = DocQA.from_documents(guide)
    selection = {each: qa.ask(each, sampling, max_new_tokens=40).text for each in QUESTIONS}
    assert all(row["answer"][0] == selection[row["question"][0]] for row in results)


@pytest.mark.slow
def test_several_replicas_serve_one_address_and_one_may_be_lost(ray: Any, tmp_path: Path) -> None:
    from urllib.error import HTTPError
    from urllib.request import Request, urlopen

    from ray import serve

    pids = str(tmp_path)

    def make() -> Engine:
        import os
        from pathlib import Path

        import torch

        from ragspec.engine.engine import Engine

        torch.set_num_threads(1)
        Path(pids, str(os.getpid())).touch()
        return Engine.from_pretrained("starter", "context")

    engine = Engine.from_pretrained("starter", "context")
    app = replicated_app(make, replicas=2, max_batch_size=2, max_queue_size=4)
    serve.start(http_options={"host": "127.0.0.1", "port": 8123})
    handle = serve.run(app, route_prefix="/generate")
    try:
        sampling = {"temperature": 0.7, "seed": 3}
        requests = [handle.generate.remote(text, sampling, max_new_tokens=12) for text in TEXTS]
        results = [each.result() for each in requests]
        for text, instance in zip(TEXTS, results, strict=True):
            alone = engine.generate(text, Sampling(**sampling), max_new_tokens=12)  # type: ignore[arg-type]
            assert (instance["text"], instance["label"]) == (alone.text, alone.label)
        assert {product["replica"] for product in results} == {0, 1}

        def post(body: bytes) -> tuple[int, Any]:
            try:
                with urlopen(Request("http://127.0.0.1:8123/generate", body)) as answer:
                    return answer.status, json.load(answer)
            except HTTPError as error:
                return error.code, json.load(error)

        status, message = post(json.dumps({"prompt": TEXTS[0], "max_new_tokens": 8}).encode())
        assert status == 200
        assert message["text"] == engine.generate(TEXTS[0], max_new_tokens=8).text
        for body, kind in (
            (b"no json", "JSONDecodeError"),
            (b'{"promt": "A"}', "InputError"),
            (b'{"prompt": "A", "max_new_tokenz": 3}', "InputError"),
            (b'{"prompt": "A", "sampling": {"temperature": -1}}', "SamplingError"),
        ):
            status, message = post(body)
            assert (status, message["error"]["type"]) == (400, kind)

        flood = [handle.generate.remote(TEXTS[0], None, max_new_tokens=60) for _ in range(16)]
        refused = 0
        for each in flood:
            try:
                each.result()
            except QueueFullError:
                refused += 1
        assert 16 - refused >= 12  # both replicas were filled before anybody was refused

        requests = [handle.generate.remote(text, None, max_new_tokens=120) for text in TEXTS]
        os.kill(int(next(tmp_path.iterdir()).name), signal.SIGKILL)
        for text, each in zip(TEXTS, requests, strict=True):
            assert each.result()["text"] == engine.generate(text, max_new_tokens=120).text
    finally:
        serve.shutdown()


@pytest.mark.parametrize("wrong", [{"actors": 0}, {"batch_size": 0}])
def test_numbers_are_checked(wrong: dict[str, int]) -> None:
    pytest.importorskip("ray.serve", reason="ray is not installed")
    with pytest.raises(InputError):
        answer_questions(None, "manuals", **wrong)  # type: ignore[arg-type]
    with pytest.raises(InputError):
        replicated_app(replicas=0)
    with pytest.raises(InputError):
        replicated_app(lambda: None, drafter="context")  # type: ignore[arg-type, return-value]
