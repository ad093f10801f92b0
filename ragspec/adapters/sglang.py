"""Drafts for SGLang: whole trees of ragspec's drafters, verified by SGLang's n-gram worker.

    python -m sglang.launch_server --model-path MODEL --speculative-algorithm RAGSPEC \\
        --speculative-num-draft-tokens 12

SGLang finds `register` by the entry point group `sglang.srt.plugins`. The algorithm is its NGRAM
with another corpus, which returns the draft tree of each row. Your own plugin that calls
`register("NAME", store=folder)` drafts from a ragspec store as well.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

import numpy as np

from ragspec.adapters.host_text import HostInterface, HostOptions, HostText, host_drafter
from ragspec.errors import InputError
from ragspec.trees.draft_tree import Ints
from ragspec.trees.operations import ancestors
from ragspec.types import Tokenizer

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.speculative.ngram_worker import NGRAMWorker

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
PAD = 0
WholeText = Callable[[], Sequence[int]]
STORES = (
    'Build a store of the texts (`ragspec store build`), and name it: register("NAME", store=...).'
)


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
    base = SGLANG.find(REGISTRY, "CustomSpecAlgo")
    expected = ("name", "supports_overlap", "validate_server_args", "spec_class")
    _check("SpeculativeAlgorithm.register", algorithms.register, expected)

    class RagspecAlgorithm(base):  # type: ignore[misc, valid-type]
        """An n-gram algorithm whose trees come from ragspec, in the mask; no model drafts."""

        def is_ngram(self) -> bool:
            """Return True: SGLang serves it like NGRAM."""
            return True

        def has_draft_kv(self) -> bool:
            """Return False: drafts have no keys and values."""
            return False

        def handle_server_args(self, server_args: "ServerArgs") -> None:
            """Set the server's arguments as SGLang does for NGRAM."""
            settle(server_args)

    register_worker = algorithms.register(name, supports_overlap=True, spec_class=RagspecAlgorithm)
    register_worker(partial(worker_of, parsed))


def settle(args: "ServerArgs") -> None:
    """Set the arguments as for NGRAM; raise InputError for one that does not fit drafts of text."""
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
    if breadth > 1 and (args.page_size or 1) > 1 and args.attention_backend != "flashinfer":
        raise InputError(
            f"got --page-size {args.page_size} with {args.attention_backend}; expected 1, or the "
            "attention backend flashinfer, which alone verifies trees over pages. Or ask for "
            "chains: --speculative-ngram-max-bfs-breadth 1."
        )


def worker_of(options: HostOptions, server_args: "ServerArgs") -> "type[NGRAMWorker]":
    """Return SGLang's worker with our corpus; raise HostError if it has another interface."""
    module = import_module(WORKER)
    for name, expected in CALLED.items():
        owner, _, method = name.partition(".")
        _check(name, getattr(getattr(module, owner, None), method, None), expected)
    public = {each for each in vars(module.NgramCorpus) if not each.startswith("_")} - UNUSED
    if strange := sorted(public - set(dir(TreeCorpus))):
        raise SGLANG.differs(f"has NgramCorpus.{', '.join(strange)}", "none of these")

    class RagspecWorker(module.NGRAMWorker):  # type: ignore[misc, name-defined]
        """An n-gram worker that drafts whole trees from the text of each request."""

        @property
        def ngram_corpus(self) -> "TreeCorpus":
            """The corpus of drafts: ours, which replaces the one that SGLang assigns."""
            return self._trees

        @ngram_corpus.setter
        def ngram_corpus(self, replaced: object) -> None:
            config = self.model_runner.model_config
            self._trees = TreeCorpus(
                options,
                nodes=self.draft_token_num,
                vocab_size=config.vocab_size,
                limit=config.context_len,
                tokenizer=getattr(self._target_worker, "tokenizer", None),
                chains=self.topk == 1,
            )

        def _prepare_draft_tokens(self, batch: "ScheduleBatch") -> object:
            """Lend the corpus the whole texts, as SGLang passes only their last tokens."""
            self._trees.lend({request.rid: _text(request) for request in batch.reqs})
            return super()._prepare_draft_tokens(batch)

    return RagspecWorker


def _text(request: "Req") -> Callable[[], Sequence[int]]:
    return lambda: [*request.origin_input_ids_unpadded, *request.output_ids]


def _check(name: str, method: Callable[..., object] | None, expected: tuple[str, ...]) -> None:
    """Raise HostError unless a method has the expected parameters."""
    parameters = () if method is None else tuple(inspect.signature(method).parameters)
    if parameters != expected:
        form = f"{name}({', '.join(expected)})"
        raise SGLANG.differs(f"has {name}({', '.join(parameters)})", form)


class TreeCorpus:
    """Drafts a tree for each request of a batch, behind the interface of SGLang's corpus.

    The text of one request is never drafted for another.

    Args:
        nodes: Nodes of a tree with its root, the text's last token; smaller trees are padded with
            token 0.
        limit: Most tokens of a text.
        tokenizer: The host's tokenizer, which stores must fit.
        chains: Whether to draft chains only.
    """

    def __init__(
        self,
        options: HostOptions,
        *,
        nodes: int,
        vocab_size: int,
        limit: int,
        tokenizer: "Tokenizer | None" = None,
        chains: bool = False,
    ) -> None:
        self._nodes, self._vocab_size, self._limit = nodes, vocab_size, limit
        self._longest = nodes - 1 if chains else None
        self._drafter = host_drafter(options, tokenizer, vocab_size)
        self._texts: dict[str, HostText] = {}
        self._lent: Mapping[str, WholeText] = {}

    def lend(self, texts: Mapping[str, WholeText]) -> None:
        """Set, for the next `batch_get`, functions that return the whole texts by request id."""
        self._lent = texts

    def batch_get(
        self,
        req_ids: Sequence[str],
        batch_tokens: Sequence[Sequence[int]],
        total_lens: Sequence[int],
    ) -> tuple[Ints, Ints]:
        """Return tokens i64 [B * N] and masks i64 [B * N * N] of the trees, row after row.

        Mask [i, j] is 1 if node j is node i or above it; node 0 is the text's last token.

        Args:
            batch_tokens: The last tokens of each text.
            total_lens: The number of tokens of each text.
        """
        size = self._nodes
        tokens = np.full((len(req_ids), size), PAD, dtype=np.int64)
        masks = np.tile(np.eye(size, dtype=np.int64), (len(req_ids), 1, 1))
        masks[:, :, 0] = 1  # all nodes are below the root, pads too
        requests = zip(req_ids, batch_tokens, total_lens, strict=True)
        for row, (name, tail, length) in enumerate(requests):
            tokens[row, 0] = tail[-1]
            text = self._text(name, tail, length)
            tree = text.draft(size - 1, self._limit - len(text), self._longest)
            count = len(tree)
            tokens[row, 1 : count + 1] = tree.tokens
            masks[row, 1 : count + 1, 1 : count + 1] = ancestors(tree.parents)
        self._lent = {}
        return tokens.reshape(-1), masks.reshape(-1)

    def _text(self, name: str, tail: Sequence[int], length: int) -> HostText:
        """Return the session of a request, updated to its text."""
        if (text := self._texts.get(name)) is not None:
            new = length - len(text)
            before = len(tail) - new
            if 0 <= new <= len(tail) and [*tail[:before]] == text.tokens[len(text) - before :]:
                text.refresh(list(tail[before:]))
                return text
        tokens = self._whole(name, tail, length)
        text = self._texts[name] = HostText(self._drafter, tokens, self._vocab_size)
        return text

    def _whole(self, name: str, tail: Sequence[int], length: int) -> list[int]:
        """Return a request's whole text, completed by its last tokens, or these alone."""
        if (whole := self._lent.get(name)) is None:
            return list(tail)
        text = list(whole())
        behind = length - len(text)
        return [*text, *tail[len(tail) - behind :]] if 0 < behind <= len(tail) else text[:length]

    def erase_match_state(self, req_ids: Iterable[str]) -> None:
        """Forget requests."""
        for name in req_ids:
            self._texts.pop(name, None)

    def reset(self) -> None:
        """Forget all requests."""
        self._texts.clear()

    def _ignore(self, *_: object) -> None:
        """Do nothing: texts of requests are not shared, and no corpus is loaded."""

    batch_put = synchronize = commit_external_corpus_load = remove_external_corpus = _ignore

    # SGLang's interface for texts of the operator, which a store of ragspec replaces; see `settle`.
    remaining_token_budget = 0

    def load_external_corpus_named(self, corpus_id: str, chunks: Iterable[Sequence[int]]) -> int:
        """Raise InputError: a store replaces the texts that a server loads."""
        raise InputError(f"got the corpus {corpus_id!r}; expected none. {STORES}")

    def list_external_corpora(self) -> dict[str, int]:
        """Return no corpora."""
        return {}
