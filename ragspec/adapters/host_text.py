"""What drafting inside another engine has in common: options, the drafter, one text of the host.

A host owns the loop and the model. It tells what was written and takes what may come next; best
tokens, hidden states and random noise of its target are not to be had.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ragspec.drafters.base import (
    DraftContext,
    Drafter,
    DraftRequest,
    needs_hidden,
    top_logits_needed,
)
from ragspec.drafters.combined import check_fits, within
from ragspec.drafters.fuse import Fuse
from ragspec.drafters.method import GLOBAL, Sources
from ragspec.errors import InputError
from ragspec.pipelines.methods import compose, open_sources
from ragspec.registry import did_you_mean
from ragspec.rules.base import Step
from ragspec.trees.draft_tree import ROOT, DraftKind, DraftTree
from ragspec.trees.operations import children

_WARM_UP = (0, 1, 0, 1, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOptions:
    """What to draft with inside a host.

    drafter: a name, or several that are fused, see `ragspec drafters`. store, history: folders of
    stores, other text and the model's own answers. scope: whose text in them is drafted from,
    beside everybody's. nodes: of the tree that is drafted for each text, None for what suits the
    host. stats: a file that is written after every step with what was drafted and accepted. idle:
    texts that are remembered while they are not decoded, None for as many as the host decodes at
    once. idle_tokens: and their tokens in sum. Raises InputError for values out of range.
    """

    drafter: str | tuple[str, ...] = "auto"
    store: Path | None = None
    history: Path | None = None
    scope: str = GLOBAL
    nodes: int | None = None
    stats: Path | None = None
    idle: int | None = None
    idle_tokens: int = 1_000_000

    def __post_init__(self) -> None:
        names = (self.drafter,) if isinstance(self.drafter, str) else self.drafter
        if not names or not all(isinstance(name, str) for name in names):
            raise InputError(f"got drafter {self.drafter!r}; expected a name, or a list of names.")
        for name, least in (("nodes", 1), ("idle", 0), ("idle_tokens", 0)):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < least):
                raise InputError(f"got {name} {value!r}; expected a whole number from {least} on.")

    @classmethod
    def read(cls, options: object) -> Self:
        """Return the options in a mapping of JSON types; None is none. Raises InputError."""
        if options is None:
            return cls()
        if not isinstance(options, Mapping):
            raise InputError(f"got the options {options!r}; expected a mapping of names to values.")
        known = [field.name for field in fields(cls)]
        for name in options:
            if name not in known:
                raise InputError(
                    f"got the option {name!r}.{did_you_mean(str(name), known)} Known: "
                    f"{', '.join(known)}."
                )
        return cls(**{name: _read(name, value) for name, value in options.items()})


def _read(name: str, value: Any) -> Any:
    """Return an option as its field holds it."""
    if name == "drafter" and isinstance(value, list):
        return tuple(value)
    if name in ("store", "history", "stats") and value is not None:
        if not isinstance(value, str):
            raise InputError(f"got {name} {value!r}; expected a path.")
        return Path(value)
    if name == "scope" and not isinstance(value, str):
        raise InputError(f"got scope {value!r}; expected 'global' or the name of a tenant.")
    return value


def host_drafter(options: HostOptions, tokenizer: Any = None, vocab_size: int = 2) -> Drafter:
    """Return the drafter that the options name, guarded so that no fault of it reaches the host.

    tokenizer: the host's, which the stores must fit. vocab_size: that of the warm-up, by which what
    is compiled or opened on first use is there before the first text. Raises InputError for a
    drafter that cannot work from text alone, UnknownNameError, StoreError.
    """
    opened = open_sources(options.store, options.history, tokenizer=tokenizer, scope=options.scope)
    sources = Sources(opened.corpus, opened.history, None, opened.scope, top_k_feedback=False)
    composed = compose(
        options.drafter if isinstance(options.drafter, str) else list(options.drafter), sources
    )
    parts: list[Drafter] = composed if isinstance(composed, list) else [composed]
    for part in parts:
        _check_by_text(part)
    check_fits(parts, tokenizer=tokenizer)
    drafter = Fuse(parts)
    HostText(drafter, _WARM_UP, max(vocab_size, 2)).draft(1, 2)
    return drafter


def _check_by_text(drafter: Drafter) -> None:
    """Raise InputError for a drafter that cannot draft from text alone."""
    leaves = [part for part in within(drafter) if not getattr(part, "drafters", ())]
    if all(top_logits_needed([leaf]) for leaf in leaves) and drafter.name != "ngrams":
        lacks = "the target's best tokens"
    elif needs_hidden([drafter]):
        lacks = "the target's hidden states"
    elif drafter.kind is not DraftKind.DETERMINISTIC:
        lacks = "the target's noise, or a model of its own"
    else:
        return
    raise InputError(
        f"drafter {drafter.name!r} needs {lacks}, which another engine does not lend; expected one "
        "that drafts from text: auto, context, hierarchy, suffix, lookup, match, rest."
    )


class HostText:
    """One text that a host decodes, and the session that drafts for it.

    tokens: all that is known of it [T]. drafted: draft tokens that were offered, accepted: those
    that the host took, steps: drafts that it judged.
    """

    def __init__(self, drafter: Drafter, prompt: Iterable[int], vocab_size: int) -> None:
        self.tokens = [int(token) for token in prompt]
        self._prompt_length = len(self.tokens)
        self._session = drafter.open(DraftRequest(tuple(self.tokens), vocab_size))
        self._offered: DraftTree | None = None
        self._known = np.empty(0, dtype=np.int64)
        self._filled = 0

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def ids(self) -> NDArray[np.int64]:
        """The tokens as an array, which grows in place [T]."""
        count = len(self.tokens)
        if count > len(self._known):
            grown = np.empty(max(2 * count, 256), dtype=np.int64)
            grown[: self._filled] = self._known[: self._filled]
            self._known = grown
        self._known[self._filled : count] = self.tokens[self._filled :]
        self._filled = count
        return self._known[:count]

    def draft(self, nodes: int, remaining: int) -> DraftTree:
        """Return a tree of at most `nodes` nodes below the last token.

        remaining: tokens that the text may still take.
        """
        context = DraftContext(self.tokens, self._prompt_length, remaining)
        tree = self._session.propose(context, nodes)
        self._offered = tree
        return tree

    def offer(self, tree: DraftTree) -> None:
        """Say which part of the drafted tree the host is given to judge."""
        self._offered = tree

    def refresh(self, tokens: Sequence[int]) -> tuple[int, int] | None:
        """Go on with what the host wrote, and learn from it.

        Returns how many draft tokens it was offered and took; None where nothing was offered.
        """
        offered, self._offered = self._offered, None
        self.tokens.extend(tokens)
        if offered is None or not tokens:
            return None
        path = followed(offered, tokens[:-1])
        self._session.observe(Step(offered, path, tuple(tokens)))
        return (len(offered), len(path)) if len(offered) else None


def followed(tree: DraftTree, tokens: Sequence[int]) -> tuple[int, ...]:
    """Return the nodes along which tokens run from the root down, as far as they do."""
    below, at, path = children(tree.parents), ROOT, []
    for token in tokens:
        step = next((node for node in below.get(at, ()) if tree.tokens[node] == token), None)
        if step is None:
            break
        path.append(at := step)
    return tuple(path)
