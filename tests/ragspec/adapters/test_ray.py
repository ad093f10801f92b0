"""Ray: the tests marked slow need it installed, the others run everywhere."""

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ragspec.adapters.ray import AnswerBatch, answer_questions
from ragspec.errors import InputError, MissingExtraError
from ragspec.pipelines import DocQA
from ragspec.sampling.settings import Sampling

QUESTIONS = ["What is a draft tree?", "What does the walk rule do?", "What is a budget?"]


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
    result = AnswerBatch(lambda: qa, "request", None, {"max_new_tokens": 20})(batch)
    assert result["n"].tolist() == [0, 1]
    rows = zip(QUESTIONS, result["answer"], result["citations"], strict=False)
    for question, text, cited in rows:
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
    with pytest.raises(MissingExtraError, match=r"ragspec\[ray\]"):
        answer_questions(None, "manuals")


@pytest.mark.slow
def test_an_actor_is_killed_and_answers_come_once(ray: Any, guide: str, tmp_path: Path) -> None:
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


@pytest.mark.parametrize("wrong", [{"actors": 0}, {"batch_size": 0}])
def test_numbers_are_checked(wrong: dict[str, int]) -> None:
    pytest.importorskip("ray.data", reason="ray is not installed")
    with pytest.raises(InputError):
        answer_questions(None, "manuals", **wrong)  # type: ignore[arg-type]
