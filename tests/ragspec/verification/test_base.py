"""Both kinds of session offer what the loop asks for."""

from __future__ import annotations

import inspect

import pytest

from ragspec.verification.base import TargetSession
from ragspec.verification.causal import TreeSession
from ragspec.verification.path_rows import PathSession


@pytest.mark.parametrize("session", [TreeSession, PathSession])
def test_sessions_have_every_part_under_its_name(session: type) -> None:
    selection = {n: f for n, f in vars(TargetSession).items() if inspect.isfunction(f)}
    names = {n for n in selection if not n.startswith("_") or n in ("__enter__", "__exit__")}
    assert names >= {
        "admit",
        "verify",
        "commit",
        "join",
        "fork",
        "leave",
        "line_up",
        "abandon",
        "shrink",
        "__enter__",
        "__exit__",
    }
    for name in names:
        requests = list(inspect.signature(selection[name]).parameters)
        assert list(inspect.signature(getattr(session, name)).parameters) == requests
