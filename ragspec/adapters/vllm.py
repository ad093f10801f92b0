"""Drafts for vLLM: the best chain of each row's fused tree, verified by vLLM itself.

    llm = LLM(model, speculative_config={
        "method": "custom_class",
        "model": "ragspec.adapters.vllm.Proposer",
        "num_speculative_tokens": 8,
    }, additional_config={"ragspec": {"drafter": "auto", "store": "folder"}})

Custom proposers are experimental in vLLM. So the constructor reads the arguments of the call from
vLLM's source, and refuses a version that passes others.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ragspec.adapters.host_text import HostInterface, HostOptions, HostText, host_drafter
from ragspec.errors import InputError
from ragspec.types import Tokenizer

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

VLLM = HostInterface("vLLM", "0.32 and 0.33")
RUNNER = "vllm.v1.worker.gpu_model_runner"
METHOD = "custom_class"
PASSED = ("sampled_token_ids", "num_tokens_no_spec", "token_ids_cpu")
OPTIONAL = frozenset({"slot_mappings"})
IDLE_TOKENS = 1_000_000  # most tokens of the texts that are remembered while not decoded
WIDTH = 4  # nodes of the draft tree for each token of the chain that is cut from it


class Proposer:
    """Drafts for the rows of vLLM, which it identifies by their text alone.

    Args:
        vllm_config: vLLM's config, whose `additional_config["ragspec"]` has the `HostOptions`.

    Raises:
        HostError: vLLM is missing, or calls proposers with other arguments.
        InputError: An option is unknown or out of range.
        StoreError: A store is missing, damaged, or of another tokenizer.
    """

    def __init__(self, vllm_config: "VllmConfig") -> None:
        check_host()
        model = vllm_config.model_config
        additional = vllm_config.additional_config
        if additional is not None and not hasattr(additional, "get"):
            raise InputError(f"got additional_config {additional!r}; expected a mapping.")
        options = HostOptions.read((additional or {}).get("ragspec"))
        self._longest: int = vllm_config.speculative_config.num_speculative_tokens
        self._nodes = options.nodes or WIDTH * self._longest
        self._limit: int = model.max_model_len
        vocab_size: int = model.get_vocab_size()
        stores = options.store or options.history
        drafter = host_drafter(options, _tokenizer(model) if stores else None, vocab_size)
        rows: int = vllm_config.scheduler_config.max_num_seqs
        self._texts = KnownTexts(lambda text: HostText(drafter, text.tolist(), vocab_size), rows)

    def load_model(self, *_: object, **__: object) -> None:
        """Do nothing: drafts come from text."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: NDArray[np.int32],
        token_ids_cpu: NDArray[np.int32],
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """Return the draft of every row, at most `num_speculative_tokens` each; [] for none.

        Args:
            sampled_token_ids: New tokens of each row, none if it is not decoding.
            num_tokens_no_spec: Number of tokens of each row, with the new ones [B].
            token_ids_cpu: Texts of the rows [B, length].
            slot_mappings: Ignored.
        """
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        live: dict[int, tuple[NDArray[np.int32], list[int]]] = {}
        for row, sampled in enumerate(sampled_token_ids):
            length = int(num_tokens_no_spec[row])
            if len(sampled) and length < self._limit:
                before = token_ids_cpu[row, : length - len(sampled)]
                live[row] = before, [int(token) for token in sampled]
        for row, text in zip(live, self._texts.refresh(live.values()), strict=True):
            chain = text.draft(self._nodes, self._limit - len(text), self._longest)
            drafts[row] = chain.tokens.tolist()
        return drafts


def check_host() -> None:
    """Raise HostError if vLLM is missing, or calls proposers with other arguments."""
    calls = list(_calls(VLLM.find(RUNNER, "GPUModelRunner")))
    expected = f"propose({', '.join((*PASSED, *sorted(OPTIONAL)))})"
    if not calls:
        raise VLLM.differs(f"does not call proposers of the method {METHOD!r}", expected)
    for arguments in calls:
        if tuple(arguments[:3]) != PASSED or not {*arguments[3:]} <= OPTIONAL:
            raise VLLM.differs(f"calls propose({', '.join(arguments)})", expected)


def _calls(runner: "type[GPUModelRunner]") -> Iterator[list[str]]:
    """Yield the arguments of each call of `propose` for our method, those by position first."""
    try:
        source = textwrap.dedent(inspect.getsource(runner.propose_draft_token_ids))
    except (AttributeError, OSError, TypeError):
        return
    for branch in ast.walk(ast.parse(source)):
        if not isinstance(branch, ast.If) or repr(METHOD) not in ast.unparse(branch.test):
            continue
        for call in (each for line in branch.body for each in ast.walk(line)):
            if isinstance(call, ast.Call) and ast.unparse(call.func).endswith(".propose"):
                names = [ast.unparse(each).rpartition(".")[2] for each in call.args]
                yield [*names, *(keyword.arg or "**" for keyword in call.keywords)]


class KnownTexts:
    """The sessions of a host's texts, identified by their tokens.

    Args:
        open_text: Opens the session of a new text from its tokens [T].
        idle: Most texts that the last call did not use.
    """

    def __init__(self, open_text: Callable[[NDArray[np.int32]], HostText], idle: int) -> None:
        self._open, self._idle = open_text, idle
        self._sessions: list[tuple[bytes, HostText]] = []  # the least recently used first

    def refresh(self, rows: Iterable[tuple[NDArray[np.int32], list[int]]]) -> list[HostText]:
        """Return the session of each text, known or opened by its tokens [T], with its new ones.

        Of the sessions that are not used, the oldest that exceed the limits are dropped.
        """
        live: list[tuple[bytes, HostText]] = []
        for before, new in rows:
            key = before.tobytes()
            numbers = (i for i, (tokens, _) in enumerate(self._sessions) if tokens == key)
            number = next(numbers, None)
            text = self._open(before) if number is None else self._sessions.pop(number)[1]
            text.refresh(new)
            live.append((key + np.array(new, before.dtype).tobytes(), text))
        tokens = sum(len(text) for _, text in self._sessions)
        while self._sessions and (len(self._sessions) > self._idle or tokens > IDLE_TOKENS):
            tokens -= len(self._sessions.pop(0)[1])
        self._sessions += live
        return [text for _, text in live]


def _tokenizer(model: "ModelConfig") -> Tokenizer:
    """Return the host's tokenizer, which the stores must fit."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model.tokenizer, trust_remote_code=False)
