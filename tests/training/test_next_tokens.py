"""The script that makes the table of next tokens of a model."""

import importlib
from collections import defaultdict
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


def naive(places: Any, least: int, mixed: float) -> dict[tuple[int, ...], dict[int, float]]:
    """Return the mean chances by key, mixed with those of the shorter key, place by place."""
    sums: dict[tuple[int, ...], dict[int, float]] = defaultdict(lambda: defaultdict(float))
    counts: dict[tuple[int, ...], int] = defaultdict(int)
    for key, tokens, chances in zip(*(each.tolist() for each in places), strict=True):
        for order in (1, 2, 3):
            if -1 not in (end := tuple(key[-order:])):
                counts[end] += 1
                for token, chance in zip(tokens, chances, strict=True):
                    sums[end][token] += chance
    results: dict[tuple[int, ...], dict[int, float]] = {}
    for key in sorted(counts, key=len):
        if len(key) == 1 or counts[key] >= least:
            weight = counts[key] / (counts[key] + mixed)
            mean = {token: weight * total / counts[key] for token, total in sums[key].items()}
            for token, chance in results.get(key[1:], {}).items():
                mean[token] = mean.get(token, 0.0) + (1.0 - weight) * chance
            results[key] = mean
    return results


def test_rows_are_means_that_mix_in_those_of_shorter_keys(tmp_path: Path) -> None:
    script, random = module("next_tokens"), np.random.default_rng(3)
    ids = np.concatenate([[-1, -1], random.integers(4, size=300)])
    tokens = np.argsort(random.random((300, 8)), 1)  # all of 8, so that nothing is cut
    chances = random.dirichlet(np.ones(8), 300)
    keys = np.lib.stride_tricks.sliding_window_view(ids, 3)
    places = script.Places(keys, tokens, chances)
    path = tmp_path / "table.npy"
    np.save(path, script.table_of(places, 5))
    drafter = NextTokenDrafter(path)
    expected = naive(places, 5, script.MIXED)
    assert {len(key) for key in expected} == {1, 2, 3}
    assert len(np.load(path)) == len(expected) < len(naive(places, 1, 1.0))
    for key, mean in expected.items():
        row = drafter.find((*[-1] * (3 - len(key)), *key))
        assert row is not None
        best = sorted(mean.items(), key=lambda each: -each[1])[: script.WIDTH]
        assert row.chances == pytest.approx([chance for _, chance in best], abs=0.51 / 255)
        assert row.tokens == [token for token, _ in best]


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
