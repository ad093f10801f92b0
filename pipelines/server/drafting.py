"""Engines over one target: the ways in which requests may be drafted for, a tenant's own each."""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ragspec.budget.policy import make_budget
from ragspec.drafters.method import Sources, listed
from ragspec.engine.rows import read_cost
from ragspec.errors import InputError, UnknownNameError
from ragspec.pipelines.methods import compose
from ragspec.registry import unknown

if TYPE_CHECKING:
    from ragspec.engine.engine import Engine
    from ragspec.retrievers.corpus.index import CorpusIndex

MOST = 64  # engines that are kept: what the least recent tenant's drafters learnt is let go
ALL = object()  # every store there is
Names = str | Sequence[str] | None


class TenantDrafting:
    """The engines of a server, one for each tenant and way of drafting.

    Drafters and budgets learn from the texts that they serve: with one for each tenant nobody
    drafts from another's. base: the engine of the model; its drafter serves requests that name
    none; what forwards cost is measured here where it does not tell, as its own drafter never asked
    or there is none: no request waits for that. drafter: the names that made it. draft_model: a
    source beside methods that are named.
    """

    def __init__(
        self,
        base: Engine,
        drafter: Names = "auto",
        budget: str | int = "auto",
        draft_model: Any = None,
    ) -> None:
        self.base = _measured(base)
        self.stores: dict[str, CorpusIndex] = {}
        self._default: tuple[Names, str | int] = (_as_key(drafter), budget)
        self._draft_model = draft_model
        self._selection: OrderedDict[tuple[Any, ...], Engine] = OrderedDict()
        self._lock = threading.Lock()

    def engine(
        self, tenant: str, drafter: Names = None, budget: str | int | None = None, store: Any = ALL
    ) -> Engine:
        """Return the engine that serves a request.

        drafter: method names, "none" for plain decoding, None for the server's. store: the name of
        one, None for none. Raises UnknownNameError and InputError.
        """
        names, nodes = self._default
        names = names if drafter is None else _as_key(drafter)
        nodes = nodes if budget is None else budget
        stores = self._named(store)
        key = (tenant, names, nodes, tuple(stores))
        with self._lock:
            if key in self._selection:
                self._selection.move_to_end(key)
                return self._selection[key]
        engine = self._create(tenant, names, nodes, stores)
        with self._lock:
            self._selection[key] = engine
            if len(self._selection) > MOST:
                self._selection.popitem(last=False)
        return engine

    def add(self, name: str, store: CorpusIndex) -> None:
        """Let requests draft from a store from now on; raises InputError for a name that is taken.

        Requests running go on as they were.
        """
        with self._lock:
            if name in self.stores:
                raise InputError(f"there is a store {name} already; expected another name.")
            self.stores = {**self.stores, name: store}

    def close(self) -> None:
        """Let the stores go."""
        for store in self.stores.values():
            store.close()

    def _named(self, store: Any) -> list[str]:
        known = self.stores
        if store is ALL:
            return list(known)
        if store is not None and store not in known:
            raise UnknownNameError(unknown("store", store, known))
        return [] if store is None else [store]

    def _create(
        self, tenant: str, names: Names, budget: str | int, stores: Sequence[str]
    ) -> Engine:
        if names in (None, "none"):
            return self.base.drafting(None, budget)
        requests = [names] if isinstance(names, str) else list(names or ())
        known = {name for name, method in listed().items() if not method.needs}
        if self._draft_model is not None:
            known.add("model")
        for name in (
            requests if names != self._default[0] else ()
        ):  # the server's own may be a folder
            if name not in known:
                raise UnknownNameError(unknown("drafter", name, ["none", *sorted(known)]))
        methods = [name for name in requests if name != "model"]
        composed: Any = compose(methods, Sources(), self.base.model) if methods else []
        drafters = [*composed] if isinstance(composed, list) else [composed]
        drafters += [self.stores[name].drafter(tenant or "global", name=name) for name in stores]
        if self._draft_model is not None:
            drafters.append(self._draft_model)
        return self.base.drafting(drafters, budget)


def _measured(engine: Engine) -> Engine:
    """Return an engine whose others over its target need not measure what forwards cost."""
    if engine.cost is not None:
        return engine
    result = copy.copy(engine)
    result.cost = read_cost(engine.target, make_budget("auto"))
    return result


def _as_key(names: Names) -> str | tuple[str, ...] | None:
    return names if isinstance(names, str | None) else tuple(names)
