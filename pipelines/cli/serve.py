"""`ragspec serve`: a model behind OpenAI's protocol."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ragspec.errors import InputError
from ragspec.pipelines.console import options as o
from ragspec.pipelines.console.checks import check_store
from ragspec.pipelines.console.records import option, setting, split, takes_records
from ragspec.pipelines.console.terminal import Terminal
from ragspec.pipelines.server.settings import ServerSettings
from ragspec.visual.loading import find_folder, read_kind

if TYPE_CHECKING:
    from ragspec.pipelines.server.serving import Serving


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """The model to serve, and the address, API keys and limits of the server."""

    documents: o.SearchOptions
    engine: o.EngineOptions
    settings: ServerSettings
    store: list[str] = option([], "NAME=FOLDER, a corpus to draft from; repeatable.")
    images: list[str] = option([], "Image model to serve too; repeatable.")
    name: str | None = setting(None, "Model name in the API. Default: that of --model.")

    def __post_init__(self) -> None:
        for path in stores_of(self.store).values():
            check_store(path, "corpus")
        for image in self.images:
            read_kind(find_folder(image).target)
        if len({Path(image).name for image in self.images}) < len(self.images):
            got = ", ".join(self.images)
            raise InputError(f"got --images {got}; expected each name once. Rename a folder.")
        self.engine.check_needs(self.store, "Give it with --store NAME=FOLDER.")
        if "rapid" in split(self.engine.drafter):
            raise InputError("got drafter rapid; expected another, as requests have one prompt.")


@takes_records
def serve(options: ServeOptions) -> None:
    """Serve a model: /v1/chat/completions, /v1/completions, /v1/images/generations, /metrics."""
    terminal = Terminal()
    with options.settings.listen() as listening:
        host, port = listening.getsockname()[:2]
        terminal.note(f"listening on http://{host}:{port}, ready when /health says so", "")
        if not options.settings.keys:
            terminal.note("no API key is required: anyone on this machine may send requests")

        from ragspec.pipelines.server.run import serve as run

        run(lambda: load(options, terminal), options.settings, listening)


def load(options: ServeOptions, terminal: Terminal) -> "Serving":
    """Load the documents, which may be unreadable, then models and stores."""
    documents = options.documents.open(terminal) if options.documents.docs else None

    from ragspec import visual
    from ragspec.pipelines.server.serving import Serving

    with terminal.working("loading the model"):
        names = [name for name in split(options.engine.drafter) if name != "rest"]  # see `Serving`
        loaded = replace(options.engine, drafter=",".join(names) or "none").load_engine()
    images = {Path(n).name: visual.ImagePipeline.from_pretrained(n) for n in options.images}
    for each in images.values():
        each.set_progress_bar_config(disable=True)  # the log has a line for each request
    serving = Serving(
        loaded,
        options.name or Path(options.engine.model).name,
        default=(split(options.engine.drafter), o.number_or_name(options.engine.budget)),
        documents=documents,
        images=images,
        settings=options.settings,
    )
    for name, path in stores_of(options.store).items():
        serving.add_store(name, str(path))
    return serving


def stores_of(pairs: Sequence[str]) -> dict[str, Path]:
    """Return the folders of NAME=FOLDER texts by name; raise InputError for other texts."""
    record: dict[str, Path] = {}
    for each in pairs:
        name, sign, path = each.partition("=")
        if not sign or not name or not path or name in record:
            raise InputError(f"got --store {each}; expected NAME=FOLDER, each name once.")
        record[name] = Path(path)
    return record
