"""Tables of next tokens, and `auto` with a model whose folder has a table."""

import copy
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ragspec import Engine, Sampling
from ragspec.drafters.base import DraftRequest
from ragspec.errors import InputError, StoreError
from ragspec.models import resolve
from ragspec.retrievers import NextTokenDrafter
from tests.support import tiny
from tests.support.identities import PROMPTS
from tests.support.next_tokens import write
from tests.support.spelling import at

ROWS = {
    (5,): {1: 200, 2: 30},
    (9,): {8: 90},
    (4, 5): {3: 150, 6: 100, 7: 5},
    (3, 4, 5): {9: 128, 1: 64},
}


def drafted(drafter: NextTokenDrafter, text: Sequence[int], nodes: int, chains: bool) -> list[int]:
    session = drafter.open(DraftRequest(tuple(text), 10, chains=chains))
    tree = session.propose(at(text), nodes)
    assert (np.diff(tree.accept_prob) <= 0).all()
    assert not chains or tree.parents.tolist() == list(range(-1, len(tree) - 1))
    return [*map(int, tree.tokens)]


@pytest.mark.parametrize("size", ["<u2", "<u4"])
def test_the_longest_known_key_drafts_the_likeliest_first(tmp_path: Path, size: str) -> None:
    drafter = NextTokenDrafter(write(tmp_path / "table.npy", ROWS, size))
    assert drafted(drafter, [0, 3, 4, 5], 4, False) == [9, 1, 8]  # 8 follows 9
    assert drafted(drafter, [0, 3, 4, 5], 4, True) == [9, 8]
    for text, key in (([4, 5], (4, 5)), ([7, 4, 5], (4, 5)), ([5], (5,)), ([3, 7, 5], (5,))):
        assert drafted(drafter, text, 9, False) == [*ROWS[key]]
        session = drafter.open(DraftRequest((), 10))
        assert session.expected_acceptance(at(text)) == max(ROWS[key].values()) / 255
    assert drafted(drafter, [4, 5, 0], 9, False) == drafted(drafter, [5], 0, False) == []


def change(field: str, new: Callable[[Any], Any]) -> Callable[[Path], object]:
    """Return a function that writes a table with a changed field."""

    def save(path: Path) -> None:
        rows = np.load(write(path, ROWS))
        fields = {name: rows[name] for name in rows.dtype.names}
        fields[field] = new(fields[field])
        kinds = [(name, each.dtype, each.shape[1:]) for name, each in fields.items()]
        table = np.zeros(len(rows), kinds)
        for name, each in fields.items():
            table[name] = each
        np.save(path, table)

    return save


BROKEN: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: None,
    "text": lambda path: path.write_text("not a table"),
    "numbers": lambda path: np.save(path, np.zeros(3)),
    "objects": lambda path: np.save(path, np.array([{}], object), allow_pickle=True),
    "several": lambda path: np.savez(path.open("wb"), key=np.zeros(3)),
    "empty": lambda path: write(path, {}),
    "cut": lambda path: path.write_bytes(write(path, ROWS).read_bytes()[:-9]),
    "header": lambda path: path.write_bytes(
        write(path, ROWS).read_bytes()[:20] + b"\xff" * 40 + path.read_bytes()[60:]
    ),
    "rows of rows": lambda path: np.save(path, np.load(write(path, ROWS))[None]),
    "falling keys": change("key", lambda keys: keys[::-1]),
    "keys as floats": change("key", lambda keys: keys.astype(float)),
    "tokens as floats": change("tokens", lambda tokens: tokens.astype(float)),
    "one token": change("tokens", lambda tokens: tokens[:, 0]),
    "fewer tokens": change("tokens", lambda tokens: tokens[:, :2]),
    "large chances": change("chances", lambda chances: chances.astype("<u2")),
    "rising chances": change("chances", lambda chances: chances[:, ::-1]),
    "no chances": change("chances", np.zeros_like),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_damaged_table_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "table.npy"
    BROKEN[kind](path)
    with pytest.raises(StoreError, match=r"table.npy is .*again"):
        NextTokenDrafter(path)


def test_only_a_table_in_the_folder_of_its_model_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    engine = Engine.from_pretrained(tiny.save(Path("model")), dtype="float32")
    assert engine.target.next_tokens is None
    write(Path("model/next_tokens.npy"), ROWS)
    Path("starter").mkdir()
    write(Path("starter/next_tokens.npy"), ROWS)
    assert resolve.next_tokens_file("starter") is None
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve.next_tokens_file("~/model") == tmp_path / "model" / "next_tokens.npy"
    drafter = NextTokenDrafter("model/next_tokens.npy")
    monkeypatch.chdir(tmp_path / "starter")
    for each in (drafter, copy.deepcopy(drafter), pickle.loads(pickle.dumps(drafter))):
        assert drafted(each, [0, 3, 4, 5], 4, True) == [9, 8]
    write(tmp_path / "model" / "next_tokens.npy", {(1,): {5000: 9}})
    with pytest.raises(StoreError, match="has 5001 token ids; expected the model's 97"):
        Engine.from_pretrained(tmp_path / "model", dtype="float32")
    with pytest.raises(InputError, match="got None as a table of next tokens; expected a path"):
        NextTokenDrafter(None)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_auto_drafts_from_the_table_of_a_model(tmp_path: Path, dtype: str) -> None:
    folder = tmp_path / "model"
    plain = Engine.from_pretrained(tiny.save(folder), drafter=None, dtype=dtype)
    settings = [Sampling(seed=1), Sampling(temperature=0.7, seed=2)]
    expected = [plain.generate(PROMPTS, each, max_new_tokens=20) for each in settings]
    rows: dict[tuple[int, ...], dict[int, int]] = {}
    for prompt, result in zip(PROMPTS, expected[0], strict=True):
        text = [*prompt, *result.tokens]
        for end in range(len(prompt), len(text)):
            rows.setdefault(tuple(text[end - 3 : end]), {text[end]: 250})
    write(folder / "next_tokens.npy", rows)
    engine = Engine.from_pretrained(folder, dtype=dtype, budget=4)
    same, wider = engine.with_drafter(engine.drafter), engine.with_drafter(["auto", "match"])
    for other, more in ((engine, []), (same, []), (wider, ["match"])):
        assert other.drafter is not None
        names = [each.name for each in other.drafter.drafters]
        assert names == ["context", "next-tokens", *more]
    for each, texts in zip(settings, expected, strict=True):
        engine.prefix_cache.clear()
        results = engine.generate(PROMPTS, each, max_new_tokens=20)
        assert [result.tokens for result in results] == [text.tokens for text in texts]
    alone = engine.generate(PROMPTS[0], settings[0], max_new_tokens=20)
    assert alone.tokens == expected[0][0].tokens
    assert len(alone.steps) < 10
    sources = {step.tree.sources[i] for step in alone.steps for i in step.tree.source}
    assert "next-tokens" in sources
