"""`ragspec serve`: a model behind OpenAI's protocol."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ragspec.errors import InputError
from ragspec.pipelines.cli.chat import read
from ragspec.pipelines.console import options as o
from ragspec.pipelines.console.terminal import Terminal

if TYPE_CHECKING:
    from ragspec.pipelines.server.settings import ServerSettings


def serve(
    docs: Annotated[
        list[Path] | None, typer.Option("--docs", "-d", help="Searched for chats; repeatable.")
    ] = None,
    index: Annotated[
        Path | None, typer.Option("--index", help="An index that `ragspec index` built.")
    ] = None,
    embedder: o.EmbedderOption = None,
    store: Annotated[
        list[str] | None,
        typer.Option(help="NAME=FOLDER: a corpus to draft from; repeatable."),
    ] = None,
    images: Annotated[
        list[str] | None, typer.Option(help="An image model to serve beside; repeatable.")
    ] = None,
    model: o.ModelOption = "starter",
    name: Annotated[
        str | None, typer.Option(help="As callers name the model; without it as --model.")
    ] = None,
    draft_model: o.DraftModelOption = None,
    drafter: o.DrafterOption = None,
    budget: o.BudgetOption = "auto",
    host: Annotated[str, typer.Option(help="Beyond this machine only with keys.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    key: Annotated[
        list[str] | None,
        typer.Option(
            help="A key that callers send; repeatable, each a tenant.", envvar="RAGSPEC_API_KEY"
        ),
    ] = None,
    admin_key: Annotated[
        str | None,
        typer.Option(help="The key for /admin.", envvar="RAGSPEC_ADMIN_KEY"),
    ] = None,
    slots: Annotated[int, typer.Option(min=1, help="Texts decoded at once.")] = 8,
    queue: Annotated[int, typer.Option(min=0, help="Requests that may wait; more get 429.")] = 32,
    drain: Annotated[
        float, typer.Option(min=0, help="Seconds that texts have to end in at a stop.")
    ] = 20.0,
    device: o.DeviceOption = "auto",
    dtype: o.DtypeOption = "auto",
    device_map: o.DeviceMapOption = None,
    adapter: o.AdapterOption = None,
    quantize: o.QuantizeOption = None,
    static: o.StaticOption = "auto",
) -> None:
    """Serve a model: /v1/chat/completions, /v1/completions, /v1/images/generations, /metrics."""
    from ragspec.pipelines.server.run import Served
    from ragspec.pipelines.server.run import serve as listen
    from ragspec.pipelines.server.settings import ServerSettings

    if docs and index:
        raise InputError("got both of --docs and --index; expected one of them, or neither.")
    settings = ServerSettings(
        host=host,
        port=port,
        keys=tuple(key or ()),
        admin_key=admin_key,
        slots=slots,
        queue=queue,
        drain=drain,
    )
    terminal = Terminal()
    chosen = o.EngineOptions(
        *(model, draft_model, drafter, budget, device, dtype),
        device_map=device_map,
        adapter=adapter,
        quantize=quantize,
        static=static,
    )
    served = Served(
        name=name or Path(model).name,
        engine=chosen.engine,
        drafter=o.drafter_of(drafter or "auto"),
        budget=o.budget_of(budget),
        documents=lambda: read(docs or [], index, embedder, terminal),
        stores=stores_of(store or ()),
        images=tuple(images or ()),
    )
    listen(served, settings, on_progress=lambda line: said(line, settings, terminal))


def stores_of(inputs: Sequence[str]) -> dict[str, Path]:
    """Return folders by name; raises InputError."""
    record: dict[str, Path] = {}
    for each in inputs:
        name, result_sign, path = each.partition("=")
        if not result_sign or not name or not path or name in record:
            raise InputError(f"got --store {each}; expected NAME=FOLDER, each name once.")
        record[name] = Path(path)
    return record


def said(line: str, settings: ServerSettings, terminal: Terminal) -> None:
    """Say where the server listens, and who may ask it."""
    terminal.note(line, "")
    if not settings.keys:
        terminal.note("no key is asked for: everybody on this machine may ask")
