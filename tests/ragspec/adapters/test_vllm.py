"""The proposer in a driver like vLLM's, and with --slow in vLLM itself (its CPU build will do)."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from ragspec.adapters import host_text
from ragspec.adapters.host_text import HostOptions, HostText
from ragspec.adapters.vllm import RUNNER, KnownTexts, Proposer, check_host
from ragspec.errors import HostError, InputError, StoreError, UnknownNameError
from ragspec.retrievers import CorpusIndex
from ragspec.retrievers.methods.context import ContextSession
from ragspec.rules.base import Step
from tests.support import tiny, vllm_driver
from tests.support.calls import noted
from tests.support.vllm_driver import LIMIT, VOCAB, config, drive, requests


def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runner: str) -> None:
    """Put a package vllm on the path whose model runner is this source."""
    for name in [each for each in sys.modules if each.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    folder = tmp_path
    for part in RUNNER.split(".")[:-1]:
        folder = folder / part
        folder.mkdir()
        (folder / "__init__.py").write_text("__version__ = '0.0.test'\n")
    (folder / "gpu_model_runner.py").write_text(runner)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.fixture(autouse=True)
def host(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Any:
    installed(tmp_path_factory.mktemp("vllm"), monkeypatch, vllm_driver.RUNNER)
    yield
    for name in [each for each in sys.modules if each.partition(".")[0] == "vllm"]:
        del sys.modules[name]


@pytest.mark.parametrize("drafter", ["auto", "context", "hierarchy", "suffix", "lookup"])
def test_drafts_save_steps_when_rows_move_and_share_prompts(
    drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    proposer, request = Proposer(config(drafter=drafter)), requests(6)
    opened, steps = texts_of(proposer, monkeypatch), list[Step]()
    monkeypatch.setattr(host_text, "Step", noted(Step, steps))
    drive(proposer, request)
    assert len(opened) == 6  # every step recognizes each text
    accepted = sum(len(step.path) for step in steps)
    assert accepted == sum(80 - each.steps for each in request)
    assert accepted / sum(len(step.tree) > 0 for step in steps) > {"lookup": 0.7}.get(drafter, 1.0)


def texts_of(proposer: Proposer, monkeypatch: pytest.MonkeyPatch) -> list[HostText]:
    """Return the texts that a proposer opens from now on."""
    opened = list[HostText]()
    monkeypatch.setattr(proposer._texts, "_open", noted(proposer._texts._open, opened))
    return opened


def test_preempted_texts_keep_their_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    proposer, request = Proposer(config()), requests(8)
    opened = texts_of(proposer, monkeypatch)
    drive(proposer, request, rows=4, preempt=0.4)
    assert len(opened) == 8


def test_a_text_that_was_forgotten_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    proposer, request = Proposer(config(rows=1)), requests(6)
    opened = texts_of(proposer, monkeypatch)
    drive(proposer, request, rows=2)
    assert len(proposer._texts._sessions) <= 3
    assert len(opened) > 6
    assert all(each.finished for each in request)


def test_texts_end_at_the_models_length() -> None:
    proposer = Proposer(config())
    table = np.tile(np.arange(5, dtype=np.int32), LIMIT // 5 + 1)[None, :LIMIT]
    for length in (LIMIT - 3, LIMIT - 1, LIMIT):
        (draft,) = proposer.propose([[int(table[0, length - 1])]], np.array([length]), table)
        assert len(draft) == max(LIMIT - length - 1, 0)


def test_drafts_are_chains_of_the_best_nodes() -> None:
    proposer = Proposer(config(longest=3))
    text = [1, 2, 3, 4, 5, 1, 2, 3, 9, 9, 1, 2, 3]
    table = np.zeros((1, LIMIT), dtype=np.int32)
    table[0, : len(text)] = text
    (draft,) = proposer.propose([[3]], np.array([len(text)]), table)
    assert draft in ([4, 5, 1], [9, 9, 1])


def test_stores_must_fit_the_hosts_tokenizer(tmp_path: Path) -> None:
    one, other = tiny.tokenizer(), tiny.bpe_tokenizer()
    CorpusIndex.build(["a text"], one, tmp_path / "store").close()
    other.save_pretrained(tmp_path / "model")
    request = config(store=str(tmp_path / "store"))
    request.model_config.tokenizer = str(tmp_path / "model")
    with pytest.raises(StoreError, match="tokenizer"):
        Proposer(request)


def test_a_failing_drafter_never_reaches_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    proposer, request = Proposer(config(drafter="context")), requests(2)
    monkeypatch.setattr(ContextSession, "propose", Mock(side_effect=RuntimeError("broken")))
    with pytest.warns(RuntimeWarning, match="switched off"):
        drive(proposer, request)
    assert [each.steps for each in request] == [80, 80]


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"draftr": "auto"}, InputError, "Did you mean 'drafter'"),
        ({"drafter": "contxt"}, UnknownNameError, "context"),
        ({"drafter": []}, InputError, "list of names"),
        ({"drafter": "none"}, InputError, "list of names"),
        ({"drafter": "recycling"}, InputError, "best tokens"),
        ({"drafter": "model"}, InputError, "draft model"),
        ({"nodes": 0}, InputError, "nodes"),
        ({"nodes": True}, InputError, "nodes"),
        ({"store": 3}, InputError, "path"),
        ({"store": "nowhere"}, StoreError, "nowhere"),
        ({"tenant": "one"}, InputError, "no store"),
    ],
)
def test_start_checks_options(
    options: dict[str, Any], error: type[Exception], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ragspec.adapters.vllm._tokenizer", lambda model: None)
    with pytest.raises(error, match=said):
        Proposer(config(**options))


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("slot_mappings=slot_mappings", "hidden_states=slot_mappings", "hidden_states"),
        ("self.input_batch.token_ids_cpu,", "", "sampled_token_ids, num_tokens_no_spec, slot"),
        ("num_tokens_no_spec", "seq_lens", "seq_lens"),
        ('"custom_class"', '"plugin"', "does not call"),
        ("propose_draft_token_ids", "draft", "does not call"),
        ("GPUModelRunner", "Runner", "GPUModelRunner"),
    ],
)
def test_another_interface_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, after: str, said: str
) -> None:
    assert before in vllm_driver.RUNNER
    installed(tmp_path, monkeypatch, vllm_driver.RUNNER.replace(before, after))
    with pytest.raises(HostError, match=said):
        Proposer(config())


def test_a_call_by_keywords_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passed = ("sampled_token_ids,", "self.input_batch.num_tokens_no_spec,",
              "self.input_batch.token_ids_cpu,")  # fmt: skip
    runner = vllm_driver.RUNNER
    for each in passed:
        name = each.rpartition(".")[2].rstrip(",")
        runner = runner.replace(f"                {each}", f"                {name}={each}")
    installed(tmp_path, monkeypatch, runner)
    check_host()


def test_no_vllm_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(HostError, match="Install"):
        Proposer(config())


def test_a_text_learns_from_the_accepted_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = host_text.host_drafter(HostOptions(drafter="context"))
    text = HostText(drafter, [1, 2, 3, 4, 1, 2], VOCAB)
    tree = text.draft(4, 50)
    assert tree.tokens.tolist()[0] == 3
    steps = list[Step]()
    monkeypatch.setattr(host_text, "Step", noted(Step, steps))
    text.refresh([3, 4, 8])
    assert [(step.tree is tree, len(step.path)) for step in steps] == [(True, 2)]
    text.refresh([9])
    assert len(steps) == 1  # nothing had been drafted
    assert text.tokens == [1, 2, 3, 4, 1, 2, 3, 4, 8, 9]


ENDING = list(range(40))


def texts() -> KnownTexts:
    drafter = host_text.host_drafter(HostOptions(drafter="lookup"))
    return KnownTexts(lambda text: HostText(drafter, text.tolist(), 100), idle=8)


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int64)


def take(known: KnownTexts, *texts: np.ndarray) -> list[HostText]:
    return known.refresh((text, []) for text in texts)


def test_texts_with_equal_endings_have_different_sessions() -> None:
    known = texts()
    one, other = take(known, ids(7, *ENDING), ids(8, *ENDING))
    again = take(known, ids(8, *ENDING), ids(7, *ENDING))
    assert again[0] is other and again[1] is one


def test_the_tokens_of_idle_texts_count_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ragspec.adapters.vllm.IDLE_TOKENS", 50)
    known = texts()
    for start in (1, 2, 3):
        take(known, ids(start, *ENDING[:20]))
    take(known)
    assert len(known._sessions) == 2
    take(known, ids(9, *ENDING))
    take(known)
    assert len(known._sessions) == 1


@pytest.mark.slow
@pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed")
def test_text_is_that_of_plain_vllm_and_chains_are_accepted(root: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(root / "benchmarks" / "vllm_chains.py"), "--items", "4"],
        capture_output=True, encoding="utf-8", check=False,
        env=os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "equal to plain vLLM: 4" in done.stdout
