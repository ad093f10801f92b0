"""The script that makes the table of next tokens of a model."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ragspec import Engine
from ragspec.drafters.base import DraftContext, DraftRequest
from ragspec.drafters.heads.head import default_taps
from ragspec.retrievers import NextTokenDrafter
from ragspec.verification.causal import CausalTarget
from tests.support import tiny

module = importlib.import_module
pytestmark = pytest.mark.usefixtures("training_path")


def mean(places: Any, key: tuple[int, ...], mixed: float) -> tuple[Any, int]:
    """Return the chances of all tokens after a key, mixed with those of the shorter one."""
    at = (places.keys[:, 3 - len(key) :] == key).all(1)
    chances = np.zeros((at.sum(), 8))
    np.put_along_axis(chances, places.tokens[at], places.chances[at], 1)
    weight = len(chances) / (len(chances) + mixed)
    below = mean(places, key[1:], mixed)[0] if len(key) > 1 else 0.0
    return weight * chances.mean(0) + (1.0 - weight) * below, len(chances)


def test_rows_are_means_that_mix_in_those_of_shorter_keys(tmp_path: Path) -> None:
    script, random = module("next_tokens"), np.random.default_rng(3)
    ids = np.concatenate([[-1, -1], random.integers(4, size=300)])
    tokens = np.argsort(random.random((300, 8)), 1)  # all of 8, so that nothing is cut
    keys = np.lib.stride_tricks.sliding_window_view(ids, 3)
    places = script.Places(keys, tokens, random.dirichlet(np.ones(8), 300))
    np.save(tmp_path / "table.npy", script.table_of(places, 5))
    drafter, rows = NextTokenDrafter(tmp_path / "table.npy"), 0
    for key in {tuple(ids[end - n : end].tolist()) for n in (1, 2, 3) for end in range(5, 303)}:
        expected, count = mean(places, key, script.MIXED)
        if len(key) == 1 or count >= 5:
            row, rows = drafter.find((*[-1] * (3 - len(key)), *key)), rows + 1
            best = np.argsort(-expected)[: script.WIDTH]
            assert row is not None and row.tokens == best.tolist()
            assert row.chances == pytest.approx(expected[best], abs=0.51 / 255)
    assert 20 < rows == len(np.load(tmp_path / "table.npy")) < 84


def test_texts_of_a_model_are_drafted_again(
    places: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, table = module("chat_answers"), tmp_path / "table.npy"
    target = CausalTarget(tiny.model(max_position_embeddings=1 << 14))
    recorder = writer.StateRecorder(default_taps(target))
    engine = Engine(target, tiny.tokenizer(chat=True), recorder, budget=1)
    prompts = [tiny.prompt(9, seed=seed) for seed in range(8)]
    texts = engine.generate(prompts, max_new_tokens=30, ignore_eos=True)
    writer.append_chats(tmp_path / "chats.jsonl", recorder.sessions, 0)
    options = f"--model {places[1]} --chats {tmp_path}/chats.jsonl --out {table} --least 1"
    monkeypatch.setattr("sys.argv", ["next_tokens.py", *options.split()])
    module("next_tokens").main()
    session, hits = NextTokenDrafter(table).open(DraftRequest((), tiny.VOCAB)), 0
    for prompt, text in zip(prompts, texts, strict=True):
        for end in range(20):
            context = DraftContext([*prompt, *text.tokens[:end]], 9, 50)
            hits += session.propose(context, 1).tokens.tolist() == [text.tokens[end]]
    assert hits > 120  # of 160
