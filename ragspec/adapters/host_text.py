"""Drafting inside another engine, the host: options, the drafter, and one text of the host.

The host owns the model and the decoding loop. It passes the tokens of a text and receives drafts.
The top logits, hidden states and random noise of its target are not available.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Self

from ragspec.drafters.base import DraftContext, Drafter, DraftRequest
from ragspec.drafters.fuse import Fuse, match_drafter
from ragspec.drafters.method import GLOBAL
from ragspec.errors import HostError, InputError
from ragspec.needs import Capabilities
from ragspec.pipelines.methods import compose, open_sources
from ragspec.registry import expect_known
from ragspec.rules.base import Step
from ragspec.trees.draft_tree import DraftKind, DraftTree
from ragspec.trees.operations import follow, keep_path, limit_depth
from ragspec.types import Tokenizer

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
    """

    drafter: str | Sequence[str] = "auto"
    store: str | Path | None = None
    history: str | Path | None = None
    tenant: str = GLOBAL
    nodes: int | None = None

    def __post_init__(self) -> None:
        names = [self.drafter] if isinstance(self.drafter, str) else self.drafter
        listed = isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)
        if not names or not listed or "none" in names:
            raise InputError(f"got drafter {self.drafter!r}; expected a name, or a list of names.")
        for name, path in (("store", self.store), ("history", self.history)):
            if not isinstance(path, str | Path | None):
                raise InputError(f"got {name} {path!r}; expected a path.")
        if not isinstance(self.tenant, str):
            raise InputError(f"got tenant {self.tenant!r}; expected 'global' or a tenant's name.")
        if self.nodes is not None and (type(self.nodes) is not int or self.nodes < 1):
            raise InputError(f"got nodes {self.nodes!r}; expected a whole number from 1 on.")

    @classmethod
    def read(cls, options: object) -> Self:
        """Return the options of a mapping of JSON types or None; raise InputError for a bad one."""
        if not isinstance(options, Mapping | None):
            raise InputError(f"got the options {options!r}; expected a mapping of names to values.")
        expect_known("option", map(str, options or {}), cls.__dataclass_fields__)
        return cls(**(options or {}))


@dataclass(frozen=True, slots=True)
class HostInterface:
    """The requirement on a host: the name of its package, and the versions that fit."""

    name: str
    versions: str

    def find(self, module: str, name: str) -> Any:
        """Return a name of one of the host's modules; raise HostError if it is missing."""
        try:
            return getattr(import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise HostError(
                f"got no {module}.{name} ({error}); expected {self.name} {self.versions}. Install "
                "that beside ragspec."
            ) from error

    def differs(self, strange: str, expected: str) -> HostError:
        """Return the error that the installed host has or does something strange."""
        version = getattr(import_module(self.name.lower()), "__version__", "unknown")
        return HostError(
            f"{self.name} {version} {strange}; expected {expected}, as in {self.name} "
            f"{self.versions}. Install that, or another ragspec."
        )


def host_drafter(
    options: HostOptions, tokenizer: "Tokenizer | None" = None, vocab_size: int = 2
) -> Drafter:
    """Return the drafter of the options, which shields the host from errors of drafting.

    A warm-up compiles and opens everything before the first text.

    Args:
        tokenizer: The host's tokenizer, which the stores must fit.

    Raises:
        InputError: A drafter cannot work from text alone.
        UnknownNameError: There is no such drafter.
        StoreError: A store is missing, damaged, or of another tokenizer.
    """
    folders = [None if path is None else Path(path) for path in (options.store, options.history)]
    opened = open_sources(*folders, tokenizer=tokenizer, scope=options.tenant)
    parts = compose(options.drafter, replace(opened, top_k_feedback=False))
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

    def __len__(self) -> int:
        return len(self.tokens)

    def draft(self, nodes: int, remaining: int, longest: int | None = None) -> DraftTree:
        """Return what the host verifies below the last token: a tree, or its best chain.

        Args:
            nodes: Most nodes of the tree.
            remaining: Most further tokens of the text.
            longest: Most nodes of the chain; None for the whole tree.
        """
        context = DraftContext(self.tokens, self._prompt_length, remaining)
        tree = self._session.propose(context, nodes)
        self._offered = tree if longest is None else keep_path(limit_depth(tree, longest))
        return self._offered

    def refresh(self, tokens: Sequence[int]) -> None:
        """Append the tokens that the host wrote, and pass the outcome to the drafter."""
        offered, self._offered = self._offered, None
        self.tokens.extend(tokens)
        if offered is not None and tokens:
            self._session.observe(Step(offered, follow(offered, tokens[:-1]), tuple(tokens)))
