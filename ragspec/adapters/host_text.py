"""Drafting inside another engine, the host: options, the drafter, and one text of the host.

The host owns the model and the decoding loop. It passes the tokens of a text and receives drafts.
The top logits, hidden states and random noise of its target are not available.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ragspec.drafters.base import DraftContext, Drafter, DraftRequest
from ragspec.drafters.fuse import Fuse, match_drafter
from ragspec.drafters.method import GLOBAL, Sources
from ragspec.errors import InputError
from ragspec.needs import Capabilities
from ragspec.pipelines.methods import compose, open_sources
from ragspec.registry import did_you_mean
from ragspec.rules.base import Step
from ragspec.trees.draft_tree import ROOT, DraftKind, DraftTree
from ragspec.trees.operations import children

_WARM_UP = (0, 1, 0, 1, 0)
_OFFERED = Capabilities(
    top_tokens=False,
    hidden_states=False,
    owner="another engine, which passes tokens alone",
    kinds=frozenset({DraftKind.DETERMINISTIC}),
    judge="another engine",
    error=InputError,
    remedy="Use a drafter of text: auto, context, hierarchy, suffix, lookup, match, rest.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOptions:
    """Options of drafting inside a host.

    Attributes:
        drafter: A name, or several that are fused; see `ragspec drafters`.
        store, history: Folders of stores: of text, and of the model's own answers.
        tenant: Tenant whose text in the stores is used, in addition to shared text.
        nodes: Nodes of each draft tree; None for the host's default.

    Raises:
        InputError: A value is out of range.
    """

    drafter: str | tuple[str, ...] = "auto"
    store: Path | None = None
    history: Path | None = None
    tenant: str = GLOBAL
    nodes: int | None = None

    def __post_init__(self) -> None:
        names = (self.drafter,) if isinstance(self.drafter, str) else self.drafter
        if not names or not all(isinstance(name, str) for name in names):
            raise InputError(f"got drafter {self.drafter!r}; expected a name, or a list of names.")
        if self.nodes is not None and (type(self.nodes) is not int or self.nodes < 1):
            raise InputError(f"got nodes {self.nodes!r}; expected a whole number from 1 on.")

    @classmethod
    def read(cls, options: object) -> Self:
        """Return the options of a mapping of JSON types; None stands for an empty one.

        Raises:
            InputError: A name is unknown or a value is out of range.
        """
        if options is None:
            return cls()
        if not isinstance(options, Mapping):
            raise InputError(f"got the options {options!r}; expected a mapping of names to values.")
        names = [field.name for field in fields(cls)]
        for name in options:
            if name not in names:
                raise InputError(
                    f"got the option {name!r}.{did_you_mean(str(name), names)} Known: "
                    f"{', '.join(names)}."
                )
        return cls(**{name: _read(name, value) for name, value in options.items()})


def _read(name: str, value: Any) -> Any:
    """Return the value of an option with the type of its field."""
    if name == "drafter" and isinstance(value, list):
        return tuple(value)
    if name in ("store", "history") and value is not None:
        if not isinstance(value, str):
            raise InputError(f"got {name} {value!r}; expected a path.")
        return Path(value)
    if name == "tenant" and not isinstance(value, str):
        raise InputError(f"got tenant {value!r}; expected 'global' or the name of a tenant.")
    return value


def host_drafter(options: HostOptions, tokenizer: Any = None, vocab_size: int = 2) -> Drafter:
    """Return the drafter of the options, which shields the host from errors of drafting.

    A warm-up compiles and opens everything before the first text.

    Args:
        tokenizer: The host's tokenizer, which the stores must fit.
        vocab_size: Size of the host's vocabulary.

    Raises:
        InputError: A drafter cannot work from text alone.
        UnknownNameError: There is no such drafter.
        StoreError: A store is missing, damaged, or of another tokenizer.
    """
    opened = open_sources(options.store, options.history, tokenizer=tokenizer, scope=options.tenant)
    sources = Sources(opened.corpus, opened.history, None, opened.scope, top_k_feedback=False)
    composed = compose(
        options.drafter if isinstance(options.drafter, str) else list(options.drafter), sources
    )
    parts: list[Drafter] = composed if isinstance(composed, list) else [composed]
    for part in parts:
        match_drafter(part, _OFFERED)
        part.fits(tokenizer=tokenizer)
    drafter = Fuse(parts)
    HostText(drafter, _WARM_UP, max(vocab_size, 2)).draft(1, 2)
    return drafter


class HostText:
    """One text that a host decodes: its tokens so far [T], and its draft session."""

    def __init__(self, drafter: Drafter, prompt: Iterable[int], vocab_size: int) -> None:
        self.tokens = [int(token) for token in prompt]
        self._prompt_length = len(self.tokens)
        self._session = drafter.open(DraftRequest(tuple(self.tokens), vocab_size))
        self._offered: DraftTree | None = None
        self._buffer = np.empty(0, dtype=np.int64)
        self._filled = 0

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def ids(self) -> NDArray[np.int64]:
        """The tokens as an i64 array, a view of a buffer that grows [T]."""
        count = len(self.tokens)
        if count > len(self._buffer):
            grown = np.empty(max(2 * count, 256), dtype=np.int64)
            grown[: self._filled] = self._buffer[: self._filled]
            self._buffer = grown
        self._buffer[self._filled : count] = self.tokens[self._filled :]
        self._filled = count
        return self._buffer[:count]

    def draft(self, nodes: int, remaining: int) -> DraftTree:
        """Return a tree of at most `nodes` nodes below the last token.

        Args:
            remaining: Most further tokens of the text.
        """
        context = DraftContext(self.tokens, self._prompt_length, remaining)
        self._offered = tree = self._session.propose(context, nodes)
        return tree

    def offer(self, tree: DraftTree) -> None:
        """Record the part of the draft tree that the host verifies."""
        self._offered = tree

    def refresh(self, tokens: Sequence[int]) -> None:
        """Append the tokens that the host wrote, and pass the outcome to the drafter."""
        offered, self._offered = self._offered, None
        self.tokens.extend(tokens)
        if offered is not None and tokens:
            path = followed(offered, tokens[:-1])
            self._session.observe(Step(offered, path, tuple(tokens)))


def followed(tree: DraftTree, tokens: Sequence[int]) -> tuple[int, ...]:
    """Return the nodes that tokens follow from the root down, up to the first mismatch."""
    below, at, path = children(tree.parents), ROOT, []
    for token in tokens:
        step = next((node for node in below.get(at, ()) if tree.tokens[node] == token), None)
        if step is None:
            break
        path.append(at := step)
    return tuple(path)
