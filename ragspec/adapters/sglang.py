"""Drafts for SGLang: whole trees of ragspec's drafters, verified by SGLang's own n-gram worker.

    python -m sglang.launch_server --model-path MODEL --speculative-algorithm RAGSPEC \\
        --speculative-num-draft-tokens 12

SGLang finds `register` by the entry point group `sglang.srt.plugins`. The algorithm is its NGRAM
with another corpus, which returns the draft tree of each row. Your own plugin that calls
`register("NAME", store=folder)` drafts from a ragspec store as well.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from ragspec.adapters.host_text import HostInterface, HostOptions
from ragspec.adapters.tree_corpus import STORES, TreeCorpus
from ragspec.errors import InputError

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.speculative.ngram_worker import NGRAMWorker
    from sglang.srt.speculative.spec_registry import CustomSpecAlgo

SGLANG = HostInterface("SGLang", "0.5.23")
ALGORITHMS = "sglang.srt.speculative.spec_info"
REGISTRY = "sglang.srt.speculative.spec_registry"
WORKER = "sglang.srt.speculative.ngram_worker"
CALLED = {  # parameters of the methods that the worker calls or we override
    "NgramCorpus.batch_get": ("self", "req_ids", "batch_tokens", "total_lens"),
    "NgramCorpus.erase_match_state": ("self", "req_ids"),
    "NGRAMWorker.__init__": ("self", "server_args", "gpu_id", "nccl_port", "target_worker"),
    "NGRAMWorker._prepare_draft_tokens": ("self", "batch"),
}
# Methods of SGLang's corpus that nothing but its own tests call.
UNUSED = frozenset({"leaf_paths_from_mask", "debug_result"})
# SGLang's defaults for NGRAM: nodes of a draft with its root, and running requests.
NODES, REQUESTS = 12, 48


def register(name: str = "RAGSPEC", **options: object) -> None:
    """Register ragspec's drafts in SGLang as a speculative algorithm.

    SGLang calls this in each of its processes.

    Args:
        options: Options of `HostOptions`, without `nodes`.

    Raises:
        InputError: An option is unknown or out of range.
        HostError: SGLang's registry has another interface.
    """
    parsed = HostOptions.read(options)
    if "nodes" in options:
        raise InputError(
            "got the option nodes; expected none. SGLang has --speculative-num-draft-tokens."
        )
    algorithms = SGLANG.find(ALGORITHMS, "SpeculativeAlgorithm")
    algorithm = algorithm_over(SGLANG.find(REGISTRY, "CustomSpecAlgo"))
    expected = ("name", "supports_overlap", "validate_server_args", "spec_class")
    _check("SpeculativeAlgorithm.register", algorithms.register, expected)
    register_worker = algorithms.register(name, supports_overlap=True, spec_class=algorithm)
    register_worker(partial(_worker, parsed))


def algorithm_over(base: type[CustomSpecAlgo]) -> type[CustomSpecAlgo]:
    """Return the description of our algorithm for SGLang, derived from its class for plugins.

    SGLang treats it as NGRAM: the tree is in the mask, and there is no draft model.
    """

    class RagspecAlgorithm(base):  # type: ignore[misc]
        """An n-gram algorithm whose trees come from ragspec."""

        def is_ngram(self) -> bool:
            """Return True: SGLang serves it like NGRAM."""
            return True

        def has_draft_kv(self) -> bool:
            """Return False: drafts have no keys and values."""
            return False

        def handle_server_args(self, server_args: ServerArgs) -> None:
            """Set the server's arguments as SGLang does for NGRAM."""
            settle(server_args)

    return RagspecAlgorithm


def settle(args: ServerArgs) -> None:
    """Set the server's arguments as SGLang does for NGRAM.

    Raises:
        InputError: An argument does not fit drafts from text.
    """
    if getattr(args, "enable_dp_attention", False):
        raise InputError("got --enable-dp-attention; expected none with drafts from text.")
    if getattr(args, "speculative_ngram_external_corpus_path", None):
        raise InputError(f"got --speculative-ngram-external-corpus-path; expected none. {STORES}")
    if args.device == "cpu":
        args.disable_overlap_schedule = True
    if args.max_running_requests is None:
        args.max_running_requests = REQUESTS
    args.enable_mixed_chunk = False
    if args.speculative_num_draft_tokens is None:
        args.speculative_num_draft_tokens = NODES
    if args.speculative_num_draft_tokens < 2:
        raise InputError(
            f"got {args.speculative_num_draft_tokens} draft tokens; expected 2 or more, as the "
            "first of them is the text's last token."
        )
    breadth = args.speculative_ngram_max_bfs_breadth
    args.speculative_eagle_topk = breadth
    if args.speculative_num_steps is None:
        args.speculative_num_steps = max(args.speculative_num_draft_tokens // breadth, 1)
    paged = (args.page_size or 1) > 1 and args.attention_backend != "flashinfer"
    if breadth > 1 and paged:
        raise InputError(
            f"got --page-size {args.page_size} with {args.attention_backend}; expected 1, or the "
            "attention backend flashinfer, which alone verifies trees over pages. Or ask for "
            "chains: --speculative-ngram-max-bfs-breadth 1."
        )


def _worker(options: HostOptions, server_args: ServerArgs) -> type[NGRAMWorker]:
    """Return the worker class after a check of SGLang's own."""
    module = import_module(WORKER)
    check_worker(module)
    return worker_over(module.NGRAMWorker, options)


def check_worker(module: ModuleType) -> None:
    """Raise HostError if SGLang's n-gram worker or its corpus has another interface."""
    for name, expected in CALLED.items():
        owner, _, method = name.partition(".")
        _check(name, getattr(getattr(module, owner, None), method, None), expected)
    public = {each for each in vars(module.NgramCorpus) if not each.startswith("_")} - UNUSED
    if strange := sorted(public - set(dir(TreeCorpus))):
        raise SGLANG.differs(f"has NgramCorpus.{', '.join(strange)}", "none of these")


def worker_over(base: type[NGRAMWorker], options: HostOptions) -> type[NGRAMWorker]:
    """Return SGLang's n-gram worker with our corpus in place of its own."""

    class RagspecWorker(base):  # type: ignore[misc]
        """An n-gram worker that drafts whole trees from the text of each request."""

        @property
        def ngram_corpus(self) -> TreeCorpus:
            """The corpus of drafts: ours, which replaces the one that SGLang assigns."""
            return self._trees

        @ngram_corpus.setter
        def ngram_corpus(self, replaced: object) -> None:
            config = self.model_runner.model_config
            tokenizer = getattr(self._target_worker, "tokenizer", None)
            self._trees = TreeCorpus(
                options,
                nodes=self.draft_token_num,
                vocab_size=config.vocab_size,
                limit=config.context_len,
                tokenizer=tokenizer,
                chains=self.topk == 1,
            )

        def _prepare_draft_tokens(self, batch: ScheduleBatch) -> object:
            """Lend the corpus the whole texts, as SGLang passes only their last tokens."""
            self._trees.lend({request.rid: _text(request) for request in batch.reqs})
            return super()._prepare_draft_tokens(batch)

    return RagspecWorker


def _text(request: Req) -> Callable[[], Sequence[int]]:
    return lambda: [*request.origin_input_ids_unpadded, *request.output_ids]


def _check(name: str, method: Callable[..., object] | None, expected: tuple[str, ...]) -> None:
    """Raise HostError unless a method has the expected parameters."""
    parameters = () if method is None else tuple(inspect.signature(method).parameters)
    if parameters != expected:
        form = f"{name}({', '.join(expected)})"
        raise SGLANG.differs(f"has {name}({', '.join(parameters)})", form)
