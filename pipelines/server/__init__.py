"""A server that speaks OpenAI's protocol, for one process and its device.

    app = build_app(Serving(engine, "starter"), ServerSettings())

`ragspec serve --model starter` starts it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ragspec.registry import door

if TYPE_CHECKING:
    from ragspec.pipelines.server.app import build_app as build_app
    from ragspec.pipelines.server.serving import Serving as Serving
    from ragspec.pipelines.server.settings import ServerSettings as ServerSettings

_WHERE = {
    "ServerSettings": "ragspec.pipelines.server.settings",
    "Serving": "ragspec.pipelines.server.serving",
    "build_app": "ragspec.pipelines.server.app",
}

__all__ = sorted(_WHERE)

if not TYPE_CHECKING:  # hidden from the checkers, which otherwise accept misspelt names
    __getattr__, __dir__ = door(__name__, _WHERE)
