"""`ragspec serve`: a model behind OpenAI's protocol."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from ragspec.errors import InputError
from ragspec.pipelines.console import options as o
from ragspec.pipelines.console.checks import check_store
from ragspec.pipelines.console.records import Setting, takes_records
from ragspec.pipelines.console.terminal import Terminal


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """The model to serve, and the address, API keys and limits of the server."""

    documents: o.SearchOptions
    engine: o.EngineOptions
    host: Annotated[
        str, typer.Option(help="Address to listen on; beyond this machine only with --key.")
    ] = "127.0.0.1"
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")
    ] = 8000
    key: Annotated[
        list[str] | None,
        typer.Option(help="API key, one for each tenant; repeatable.", envvar="RAGSPEC_API_KEY"),
    ] = None
    admin_key: Annotated[
        str | None,
        typer.Option(help="API key for /admin and /metrics.", envvar="RAGSPEC_ADMIN_KEY"),
    ] = None
    store: Annotated[
        list[str] | None, typer.Option(help="NAME=FOLDER, a corpus to draft from; repeatable.")
    ] = None
    images: Annotated[
        list[str] | None, typer.Option(help="Image model to serve too; repeatable.")
    ] = None
    name: Annotated[str | None, Setting("Model name in the API. Default: that of --model.")] = None
    max_batch_size: Annotated[int, Setting("Texts decoded in one batch.", least=1)] = 8
    max_queue_size: Annotated[
        int, Setting("Requests that may wait; more get status 429.", least=0)
    ] = 32
    max_connections: Annotated[
        int, Setting("Open connections, half of them from one address.", least=2)
    ] = 512
    keep_alive: Annotated[
        float, Setting("Seconds that an idle connection stays open.", least=0)
    ] = 60.0
    drain: Annotated[float, Setting("Seconds that running texts have at a stop.", least=0)] = 20.0
    access_log: Annotated[bool, Setting("Log a line for each request, without texts.")] = True
    hosts: Annotated[
        str, Setting("Names of the server that requests may use, comma-separated; * for all.")
    ] = ""

    def __post_init__(self) -> None:
        for path in stores_of(self.store or ()).values():
            check_store(path)


@takes_records
def serve(options: ServeOptions) -> None:
    """Serve a model: /v1/chat/completions, /v1/completions, /v1/images/generations, /metrics."""
    from ragspec.pipelines.server.run import Served
    from ragspec.pipelines.server.run import serve as listen
    from ragspec.pipelines.server.settings import ServerSettings

    engine = options.engine
    settings = ServerSettings(
        host=options.host,
        port=options.port,
        keys=tuple(options.key or ()),
        admin_key=options.admin_key,
        max_batch_size=options.max_batch_size,
        max_queue_size=options.max_queue_size,
        max_connections=options.max_connections,
        keep_alive=options.keep_alive,
        drain=options.drain,
        access_log=options.access_log,
        hosts=tuple(each.strip() for each in options.hosts.split(",") if each.strip()),
    )
    terminal = Terminal()
    served = Served(
        name=options.name or Path(engine.model).name,
        engine=engine.load_engine,
        drafter=o.parse_drafter(engine.drafter or "auto"),
        budget=o.number_or_name(engine.budget),
        documents=lambda: options.documents.open(terminal),
        stores=stores_of(options.store or ()),
        images=tuple(options.images or ()),
    )

    def on_progress(line: str) -> None:
        terminal.note(line, "")
        if not settings.keys:
            terminal.note("no API key is required: anyone on this machine may send requests")

    listen(served, settings, on_progress)


def stores_of(pairs: Sequence[str]) -> dict[str, Path]:
    """Return the folders of NAME=FOLDER texts by name; raise InputError for other texts."""
    record: dict[str, Path] = {}
    for each in pairs:
        name, sign, path = each.partition("=")
        if not sign or not name or not path or name in record:
            raise InputError(f"got --store {each}; expected NAME=FOLDER, each name once.")
        record[name] = Path(path)
    return record
