"""Engines over one target, one for each tenant and choice of drafters."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ragspec.drafters.method import Sources, listed
from ragspec.errors import InputError, UnknownNameError
from ragspec.pipelines.methods import compose
from ragspec.registry import unknown

if TYPE_CHECKING:
    from ragspec.engine.engine import Engine
    from ragspec.retrievers.corpus.index import CorpusIndex

MOST = 64  # engines in memory; the least recently used one is dropped with its statistics
Names = str | Sequence[str] | None


class TenantDrafting:
    """The engines of a server, one for each tenant and choice of drafters.

    Drafters and budgets learn from the texts that they serve. Separate engines keep the texts of
    one tenant out of the drafts of another. The constructor measures the cost of forwards if `base`
    has not, so that no request waits for it.

    Args:
        base: The engine of the model.
        drafter, budget: Default for requests that name none.
        draft_model: Drafter that joins every drafter but "none".
    """

    def __init__(
        self,
        base: Engine,
        drafter: Names = "auto",
        budget: str | int = "auto",
        draft_model: Any = None,
    ) -> None:
        if base.cost is None:
            base = copy.copy(base)
            base.measure()
        self.base = base
        self.stores: dict[str, CorpusIndex] = {}
        self.default = (_as_key(drafter), budget)
        self._draft_model = draft_model
        self._engines = lru_cache(MOST)(self._create)
        self._lock = threading.Lock()

    def engine(
        self,
        tenant: str,
        drafter: Names = None,
        budget: str | int | None = None,
        store: str | bool | None = True,
    ) -> Engine:
        """Return the engine that serves a request.

        Args:
            tenant: Owner of the request, see `tenant_of`.
            drafter: Method names, "none" for plain decoding, None for the server's default.
            budget: Draft nodes per step or "auto"; None for the server's default.
            store: Name of a store, None for none, a boolean for all of them.

        Raises:
            UnknownNameError, InputError: There is no such drafter or store, or it does not fit.
        """
        names = self.default[0] if drafter is None else _as_key(drafter)
        nodes = self.default[1] if budget is None else budget
        stores = () if store is None else (store,) if isinstance(store, str) else (*self.stores,)
        for name in stores:
            if name not in self.stores:
                raise UnknownNameError(unknown("store", name, self.stores))
        return self._engines(tenant, names, nodes, stores)

    def add(self, name: str, store: CorpusIndex) -> None:
        """Add a store to draft from; running requests do not use it.

        Raises:
            InputError: The name is taken.
        """
        with self._lock:
            if name in self.stores:
                raise InputError(f"there is a store {name} already; expected another name.")
            self.stores = {**self.stores, name: store}

    def close(self) -> None:
        """Close the stores."""
        for store in self.stores.values():
            store.close()

    def _create(
        self, tenant: str, names: Any, budget: str | int, stores: tuple[str, ...]
    ) -> Engine:
        if names in (None, "none"):
            return self.base.with_drafter(None, budget)
        requests = [names] if isinstance(names, str) else list(names)
        methods = {name for name, method in listed().items() if not method.needs}
        if self._draft_model is not None:
            methods.add("model")
        for name in requests:
            # The server's default may be a folder.
            if name not in methods and names != self.default[0]:
                raise UnknownNameError(unknown("drafter", name, ["none", *sorted(methods)]))
        chosen = [name for name in requests if name != "model"]
        composed: Any = compose(chosen, Sources(), self.base.model) if chosen else []
        drafters = [*composed] if isinstance(composed, list) else [composed]
        drafters += [self.stores[name].drafter(tenant or "global", name=name) for name in stores]
        if self._draft_model is not None:
            drafters.append(self._draft_model)
        return self.base.with_drafter(drafters, budget)


def _as_key(names: Names) -> str | tuple[str, ...] | None:
    return names if isinstance(names, str | None) else tuple(names)
