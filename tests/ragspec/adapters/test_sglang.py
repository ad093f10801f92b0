import sys
import tomllib
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ragspec.adapters import sglang
from ragspec.adapters.sglang import ALGORITHMS, REGISTRY, WORKER, TreeCorpus, register, settle
from ragspec.errors import HostError, InputError, UnknownNameError


class CustomSpecAlgo:
    """The base class of a plugin's algorithm in SGLang 0.5.23, as far as tests need it."""

    def __init__(
        self, name: str, factory: Any, *, supports_overlap: bool = False,
        validate_server_args: Any = None,
    ) -> None:  # fmt: skip
        self.name, self.factory, self.supports_overlap = name, factory, supports_overlap

    def is_ngram(self) -> bool:
        return False

    def has_draft_kv(self) -> bool:
        return True

    def handle_server_args(self, server_args: Any) -> None:
        raise AssertionError("not ours")


class SpeculativeAlgorithm:
    """Its registry."""

    known: dict[str, CustomSpecAlgo]

    @classmethod
    def register(
        cls, name: str, *, supports_overlap: bool = False, validate_server_args: Any = None,
        spec_class: type[CustomSpecAlgo] = CustomSpecAlgo,
    ) -> Callable[[Any], Any]:  # fmt: skip
        def take(factory: Any) -> Any:
            cls.known[name] = spec_class(name, factory, supports_overlap=supports_overlap)
            return factory

        return take


class NgramCorpus:
    """The methods of its corpus."""

    def batch_get(self, req_ids: Any, batch_tokens: Any, total_lens: Any) -> Any: ...
    def batch_put(self, batch_tokens: Any) -> None: ...
    def synchronize(self) -> None: ...
    def erase_match_state(self, req_ids: Any) -> None: ...
    def reset(self) -> None: ...
    def load_external_corpus_named(self, corpus_id: Any, chunks: Any) -> Any: ...
    def commit_external_corpus_load(self, corpus_id: Any, loaded_token_count: Any) -> None: ...
    def remove_external_corpus(self, corpus_id: Any) -> None: ...
    def list_external_corpora(self) -> Any: ...
    def leaf_paths_from_mask(self) -> None: ...
    def debug_result(self) -> None: ...
    @property
    def remaining_token_budget(self) -> int: ...  # type: ignore[empty-body]


class NGRAMWorker:
    """Its worker: makes a corpus, and asks it with the last tokens of each text."""

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
        self._target_worker = target_worker
        self.model_runner = target_worker.model_runner
        self.draft_token_num = server_args.speculative_num_draft_tokens
        self.topk = server_args.speculative_eagle_topk
        self.ngram_corpus = NgramCorpus()

    def _prepare_draft_tokens(self, batch: Any) -> Any:
        texts = [[*each.origin_input_ids_unpadded, *each.output_ids] for each in batch.reqs]
        self.ngram_corpus.synchronize()
        return self.ngram_corpus.batch_get(
            [each.rid for each in batch.reqs],
            [text[-4:] for text in texts],
            [len(text) for text in texts],
        )


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    instance = {}
    names = {"sglang", *(".".join(each.split(".")[:n]) for each in (ALGORITHMS, REGISTRY, WORKER)
                         for n in range(1, 5))}  # fmt: skip
    for name in names:
        instance[name] = ModuleType(name)
        instance[name].__path__ = []
        monkeypatch.setitem(sys.modules, name, instance[name])
    instance["sglang"].__version__ = "0.0.test"  # type: ignore[attr-defined]
    SpeculativeAlgorithm.known = {}
    for name, thing in (
        (ALGORITHMS, SpeculativeAlgorithm), (REGISTRY, CustomSpecAlgo),
        (WORKER, NGRAMWorker), (WORKER, NgramCorpus),
    ):  # fmt: skip
        monkeypatch.setattr(instance[name], thing.__name__, thing, raising=False)
    yield instance[WORKER]


def arguments(**changed: Any) -> SimpleNamespace:
    record = {
        "device": "cuda", "enable_dp_attention": False, "disable_overlap_schedule": False,
        "max_running_requests": None, "enable_mixed_chunk": True, "page_size": 1,
        "speculative_num_draft_tokens": None, "speculative_num_steps": None,
        "speculative_eagle_topk": None, "speculative_ngram_max_bfs_breadth": 10,
        "attention_backend": "triton",
    }  # fmt: skip
    return SimpleNamespace(**record | changed)


def worker_of(args: SimpleNamespace) -> Any:
    """Return the worker of the only algorithm that is registered."""
    (algorithm,) = SpeculativeAlgorithm.known.values()
    config = SimpleNamespace(vocab_size=200, context_len=512)
    target = SimpleNamespace(model_runner=SimpleNamespace(model_config=config), tokenizer=None)
    return algorithm.factory(args)(args, 0, 0, target)


def test_the_plugin_is_detected_by_its_entry_point() -> None:
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    (line,) = project["entry-points"]["sglang.srt.plugins"].values()
    module, _, name = line.partition(":")
    assert getattr(import_module(module), name) is register


def test_the_algorithm_is_served_as_ngram_with_our_trees() -> None:
    register()
    (algorithm,) = SpeculativeAlgorithm.known.values()
    assert (algorithm.name, algorithm.supports_overlap) == ("RAGSPEC", True)
    assert algorithm.is_ngram() and not algorithm.has_draft_kv()
    args = arguments()
    algorithm.handle_server_args(args)
    worker = worker_of(args)
    assert isinstance(worker, NGRAMWorker)
    assert isinstance(worker.ngram_corpus, TreeCorpus)
    # More than the last four tokens count: the text before them is lent.
    request = SimpleNamespace(
        rid="a", origin_input_ids_unpadded=[1, 2, 3, 4, 5, 6, 7], output_ids=[9, 9, 1, 2, 3]
    )
    tokens, masks = worker._prepare_draft_tokens(SimpleNamespace(reqs=[request]))
    assert tokens[:5].tolist() == [3, 4, 5, 6, 7]
    assert masks.shape == (12 * 12,)
    request.output_ids += [4, 5]
    tokens, _ = worker._prepare_draft_tokens(SimpleNamespace(reqs=[request]))
    assert tokens[:3].tolist() == [5, 6, 7]


def test_a_breadth_of_one_drafts_chains() -> None:
    register()
    args = arguments(speculative_ngram_max_bfs_breadth=1, page_size=16)
    SpeculativeAlgorithm.known["RAGSPEC"].handle_server_args(args)
    worker = worker_of(args)
    text = [1, 2, 3, 4, 5, 1, 2, 3, 9, 9, 1, 2, 3]
    _, masks = worker.ngram_corpus.batch_get(["a"], [text], [len(text)])
    depth = masks.reshape(12, 12).sum(axis=1)
    drafted = int(depth.max())
    assert depth[:drafted].tolist() == list(np.arange(1, drafted + 1)) and drafted > 2


def test_arguments_are_settled_as_for_ngram() -> None:
    args = arguments(device="cpu")
    settle(args)
    assert args.disable_overlap_schedule and not args.enable_mixed_chunk
    assert (args.max_running_requests, args.speculative_num_draft_tokens) == (48, 12)
    assert (args.speculative_eagle_topk, args.speculative_num_steps) == (10, 1)
    args = arguments(max_running_requests=3, speculative_num_draft_tokens=8)
    settle(args)
    assert (args.max_running_requests, args.speculative_num_draft_tokens) == (3, 8)
    assert not args.disable_overlap_schedule
    settle(arguments(page_size=16, attention_backend="flashinfer"))  # which takes trees over pages


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"enable_dp_attention": True}, "dp-attention"),
        ({"speculative_num_draft_tokens": 1}, "2 or more"),
        ({"page_size": 16}, "page-size"),
        ({"speculative_ngram_external_corpus_path": "a.jsonl"}, "store build"),
    ],
)
def test_arguments_that_cannot_be_served_are_refused(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        settle(arguments(**changed))


@pytest.mark.parametrize(("option", "said"), [("nodes", "the option nodes"), ("sotre", "'store'")])
def test_options_are_checked(option: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        register("OTHER", **{option: 3})


def test_an_unknown_drafter_is_reported_when_the_worker_starts() -> None:
    register("OTHER", drafter="contxt")
    with pytest.raises(UnknownNameError):
        worker_of(arguments(speculative_num_draft_tokens=8, speculative_eagle_topk=1))


def test_another_registry_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SpeculativeAlgorithm, "register", classmethod(lambda cls, name, what: None))
    said = r"0\.0\.test has SpeculativeAlgorithm\.register\(name, what"
    with pytest.raises(HostError, match=said):
        register()
    monkeypatch.delattr(sys.modules[REGISTRY], "CustomSpecAlgo")
    with pytest.raises(HostError, match="CustomSpecAlgo"):
        register()


def test_refuses_another_worker_by_name(host: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    register()
    factory = SpeculativeAlgorithm.known["RAGSPEC"].factory
    for owner, method in [each.split(".") for each in sglang.CALLED]:
        with monkeypatch.context() as patched:
            patched.setattr(getattr(host, owner), method, lambda self, other: None)
            with pytest.raises(HostError, match=f"{owner}.{method}\\(self, other"):
                factory(arguments())
    with monkeypatch.context() as patched:
        patched.setattr(NgramCorpus, "batch_get_async", lambda self: None, raising=False)
        with pytest.raises(HostError, match="batch_get_async"):
            factory(arguments())
    factory(arguments())


def test_no_sglang_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, ALGORITHMS, None)
    with pytest.raises(HostError, match="Install"):
        register()
