from __future__ import annotations

import pytest

from ragspec.adapters import prefix_routes
from ragspec.adapters.prefix_routes import BLOCK, PrefixRoutes

LONG = "x" * (3 * BLOCK)


def test_a_beginning_goes_to_the_replica_that_read_most_of_it() -> None:
    routes = PrefixRoutes(2, uneven=8)
    first = routes.choose(LONG + "a" * BLOCK)
    assert routes.choose("something else") != first
    assert routes.choose(LONG + "b") == first
    assert routes.choose(LONG[: BLOCK + 1]) == first
    assert routes.busy[first] == 3


def test_token_ids_are_reported_separately_as_text_is() -> None:
    routes = PrefixRoutes(2, uneven=8)
    first = routes.choose(list(range(200)))
    assert routes.choose(list(range(100, 300))) != first
    assert routes.choose([*range(128), 7, 7]) == first


def test_no_tenant_draws_anothers_prompts() -> None:
    routes = PrefixRoutes(2, uneven=8)
    first = routes.choose(LONG, "a")
    assert routes.choose(LONG, "b") != first
    assert routes.choose(LONG, "a") == first


def test_a_busy_replica_hands_on_what_it_knows() -> None:
    routes = PrefixRoutes(2, uneven=1)
    first = routes.choose(LONG)
    assert routes.choose(LONG) == first
    assert routes.choose(LONG) == 1 - first
    routes.done(first)
    routes.done(first)
    assert routes.busy == ([0, 1] if first == 0 else [1, 0])


def test_replicas_that_were_tried_are_left_out() -> None:
    routes = PrefixRoutes(3, uneven=8)
    first = routes.choose(LONG)
    second = routes.choose(LONG, but={first})
    assert {first, second, routes.choose(LONG, but={first, second})} == {0, 1, 2}


def test_what_is_remembered_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_routes, "REMEMBERED_PROMPTS", 4)
    routes = PrefixRoutes(2, uneven=100)
    for number in range(20):
        routes.choose(f"{number}")
    assert len(routes._replicas) == 4
