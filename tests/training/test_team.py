"""Training by a team of processes, and passages in the order of a retriever."""

import importlib
import random
import signal
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from tests.training.test_text import SENTENCES

module = importlib.import_module
pytestmark = pytest.mark.usefixtures("training_path")


@pytest.fixture(autouse=True)
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def work(rank: int, folder: Path) -> None:
    """Learn from the row of this rank and save the gradients."""
    team = module("team")
    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 2)
    row = torch.tensor([[1.0, 2.0, 3.0], [-4.0, 5.0, 0.5]])[rank : rank + 1]
    layer(row).square().sum().backward()
    before = layer.weight.grad.clone() if layer.weight.grad is not None else None
    team.average_gradients(layer.parameters())
    record = {
        "local": before,
        "mean": layer.weight.grad,
        "size": team.team_size(),
        "agreed": team.agreed(10.0 + rank),
    }
    torch.save(record, folder / f"{rank}.pt")


def test_a_team_averages_the_gradients_of_all_rows(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    module("team").run_team(partial(work, folder=tmp_path), 2)
    assert signal.getsignal(signal.SIGTERM) is before, "this process can be ended as before"
    one, two = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    assert not torch.equal(one["local"], two["local"])
    torch.testing.assert_close(one["mean"], (one["local"] + two["local"]) / 2)
    assert torch.equal(one["mean"], two["mean"])
    assert (one["size"], one["agreed"], two["agreed"]) == (2, 10.0, 10.0)


def test_one_process_trains_without_a_team(tmp_path: Path) -> None:
    module("team").run_team(partial(work, folder=tmp_path), 1)
    alone = torch.load(tmp_path / "0.pt", weights_only=True)
    assert torch.equal(alone["local"], alone["mean"]) and alone["size"] == 1


def test_timed_steps_end_by_time_or_signal_and_save() -> None:
    steps, save, before = module("masters").timed_steps, Mock(), signal.getsignal(signal.SIGTERM)
    assert list(steps(0.0, save)) == [] and save.call_count == 1
    for left in steps(600.0, save, every=0.0):
        assert 0.0 < left < 600.0
        signal.raise_signal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, before)
    assert save.call_count == 3  # after the step, and at the end


def test_bm25_finds_the_passage_with_the_rare_words() -> None:
    assert module("text_passages").rank("Which wooden clock is on the bridge?", SENTENCES)[0] == 4


def answering() -> Any:
    data = module("text_data")
    before = [f"Boat number {number} lay at anchor there on the same day." for number in range(9)]
    article = data.Document("Almen", "article", " ".join([*before, *SENTENCES]))
    gold = [
        data.GoldQuestion(
            "Almen", SENTENCES[4], "What does the middle bridge carry?", SENTENCES[4], "x"
        ),
        data.GoldQuestion("Almen", SENTENCES[3], "Why do they burn peat?", SENTENCES[3], "y"),
        data.GoldQuestion("Orte", SENTENCES[3], "Of no article that is here?", SENTENCES[3], "z"),
    ]
    return module("text_answering").Answering([article], gold, None)


def test_human_questions_come_with_passages_as_a_retriever_ranks_them() -> None:
    instance, rng, first = answering(), random.Random(3), 0
    assert len(instance.questions) == 2
    for _ in range(30):
        request, passages = instance.human(12, 3, rng)
        assert len(passages) == 3 and request.passage in passages
        assert request.evidence in request.passage.text
        first += passages[0] == request.passage
    assert first == 30, "the words of these questions stand nowhere else"


def test_more_human_questions_are_requested_about_the_same_passages() -> None:
    instance, rng = answering(), random.Random(5)
    request, passages = instance.human(200, 1, rng)
    rest = instance.rest(request, passages, 1.0, rng)
    others = {question.question for question in instance.questions} - {request.question}
    assert rest[0].question in others
    assert all(each.evidence != request.evidence for each in rest)
