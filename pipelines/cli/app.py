"""The command line. Commands import models and documents only when they need them."""

import os
import sys
import warnings
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Exit, Option, Typer
from typer.core import TyperGroup

from ragspec import __version__
from ragspec.errors import InputError, RagspecError
from ragspec.pipelines.bench.cli import app as bench_app
from ragspec.pipelines.cli import datastore, index, models, store
from ragspec.pipelines.cli.ask import ask, ask_iterative, ask_long
from ragspec.pipelines.cli.chat import chat
from ragspec.pipelines.cli.draw import draw
from ragspec.pipelines.cli.generate import generate
from ragspec.pipelines.cli.serve import serve
from ragspec.pipelines.cli.show import INTERRUPTED
from ragspec.pipelines.cli.train_head import train_head
from ragspec.pipelines.console import checks
from ragspec.pipelines.console import options as o
from ragspec.pipelines.console.records import add_command
from ragspec.pipelines.console.terminal import Terminal
from ragspec.registry import for_extra


class Commands(TyperGroup):
    """Turns errors of the project into a message and an exit code, and Ctrl-C into code 130."""

    def invoke(self, ctx: Any) -> Any:
        """Run the selected command."""
        try:
            return super().invoke(ctx)
        except (RagspecError, ModuleNotFoundError) as error:
            known = for_extra(error) if isinstance(error, ModuleNotFoundError) else error
            if ctx.params.get("debug") or not isinstance(known, RagspecError):
                raise
            Terminal().error(str(known))
            raise Exit(known.exit_code) from error
        except KeyboardInterrupt:
            Terminal().note("\ninterrupted")
            raise Exit(INTERRUPTED) from None


app = Typer(
    name="ragspec",
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},  # also of commands below
    help="Ask your documents and get the same answer sooner: speculation from text that exists.",
)

app.add_typer(index.app, name="index")
app.add_typer(store.app, name="store")
app.add_typer(datastore.app, name="datastore")
app.add_typer(models.app, name="models")
app.add_typer(bench_app, name="bench")
for command in (ask, ask_long, ask_iterative, generate, chat, draw, serve, train_head):
    add_command(app, command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; `--debug` may stand anywhere."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    end = [*words, "--"].index("--")  # the words after it are texts
    if "--debug" in words[:end]:
        words = ["--debug", *(word for word in words[:end] if word != "--debug"), *words[end:]]
    sys.stdin = sys.stdin or StringIO()  # None if the caller closed it
    sys.stdout = sys.stdout or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    sys.stderr = sys.stderr or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal that lacks a character shows "?"
            stream.reconfigure(errors="surrogateescape" if stream is sys.stdin else "replace")
    warnings.showwarning = lambda text, *_, **__: Terminal().note(f"warning: {text}")
    try:
        app(args=words, prog_name="ragspec")
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except OSError as error:  # a full disk; typer ends quietly if a pipe is closed
        if words[:1] == ["--debug"]:
            raise
        path = isinstance(error, PermissionError) and error.filename
        denied = f"Expected a path that this user may use, got {path}. Change its permissions."
        Terminal().error(denied if path else f"the system refused: {error}; --debug shows where.")
        return InputError.exit_code if path else 1
    return 0


def _show_version(selection: bool) -> None:
    if selection:
        Terminal().line(f"ragspec {__version__}")
        raise Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        Option("--version", callback=_show_version, is_eager=True, help="Print version and exit."),
    ] = False,
    debug: Annotated[bool, Option("--debug", help="Show where an error came from.")] = False,
) -> None:
    """Ask your documents and get the same answer sooner."""


@app.command()
def drafters() -> None:
    """List the methods that `--drafter` takes, and the needs of each."""
    terminal = Terminal()
    terminal.note("looking for drafters ...")

    from ragspec.pipelines.methods import method_rows

    terminal.table("Drafters", ("name", "drafts from", "method", "needs"), method_rows())


@app.command()
def report(
    trace: Annotated[Path, Argument(help="A trace that --trace wrote.")],
    out: Annotated[Path, Option("--out", "-o", help="HTML page to write.")] = Path("report.html"),
) -> None:
    """Turn a trace into a page: the text coloured by source, and the time of each stage."""
    checks.check_output(out, checks.PAGE)
    terminal = Terminal()
    terminal.note("reading the trace ...")

    from ragspec.pipelines.page.page import write_page

    write_page(trace, out)
    terminal.note(f"wrote {out}")


@app.command()
def doctor(json: o.JsonOption = False) -> None:
    """Show the installed packages and the device; exit with code 1 if a required one is missing."""
    from ragspec.pipelines.cli.doctor import examine, show

    terminal = Terminal(quiet=json)
    with terminal.working("looking at packages and devices"):
        findings = examine()
    terminal.json(findings)
    show(findings, terminal)
    if findings["missing"]:
        raise Exit(1)
