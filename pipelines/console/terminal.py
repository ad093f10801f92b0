"""Output of the command line: results on standard output, everything else on standard error."""

import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

# Control characters, marks of text direction, and lone surrogates.
UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
WIDEST = 10_000  # columns of a table in a pipe or a log, where nothing is cut
LOG_SECONDS = 10.0  # between two lines about one work where no terminal shows a spinner


def printable(text: str) -> str:
    """Replace characters by which a text could control the terminal."""
    return UNPRINTABLE.sub("\ufffd", text)


class Terminal:
    """The two consoles of a command; with `quiet` they show errors and one JSON object only."""

    def __init__(self, *, quiet: bool = False) -> None:
        from rich.console import Console

        self.quiet, self.skipped = quiet, list[dict[str, str]]()  # files that were left out
        self.out, self.err = (
            Console(file=file, highlight=False, markup=False, emoji=False)
            for file in (sys.stdout, sys.stderr)
        )

    @contextmanager
    def working(self, what: str, *, announce: bool = True) -> Iterator[Callable[[str], None]]:
        """Show what is done until it is: a spinner on a terminal, elsewhere a line now and then.

        Yields a function that changes the text; with `announce` the first line appears at once.
        """
        if self.quiet:
            yield lambda what: None
        elif self.err.is_terminal:
            with self.err.status(what, spinner="dots") as status:
                yield status.update
        else:
            if announce:
                self.note(f"{what} ...")
            due = time.monotonic() + LOG_SECONDS

            def log(what: str) -> None:
                nonlocal due
                if time.monotonic() >= due:
                    self.note(what)
                    due = time.monotonic() + LOG_SECONDS

            yield log

    @contextmanager
    def prefill_progress(self) -> Iterator[Callable[[int, int], None]]:
        """Yield a callback that takes the tokens read of a prompt and their total.

        A terminal shows them until the prompt is read, a log every few seconds.
        """
        with ExitStack() as stack:
            show: Callable[[str], None] | None = None

            def on_progress(done: int, total: int) -> None:
                nonlocal show
                what = f"reading {done:,} of {total:,} tokens"
                if done >= total:
                    stack.close()
                    show = None
                else:
                    show = show or stack.enter_context(self.working(what, announce=False))
                    show(what)

            yield on_progress

    def note(self, text: str, style: str = "dim") -> None:
        """Show a remark, on standard error."""
        if not self.quiet:
            self.err.print(printable(text), style=style, soft_wrap=True)

    def marked(self, before: str, text: str, after: str) -> None:
        """Show a piece of a document on standard error, on a terminal between what is around it."""
        from rich.text import Text

        parts = [(before, "dim"), (text, "bold"), (after, "dim")]
        parts = parts if self.err.is_terminal else parts[1:2]
        if not self.quiet:
            line = [Text(" ".join(printable(part).split()), style) for part, style in parts]
            self.err.print(Text("   ").append(Text(" ").join(line)), soft_wrap=True)

    def note_skipped(self, path: str, reason: str) -> None:
        """Note a file that was left out, and the reason."""
        self.skipped.append({"path": path, "reason": reason})
        self.note(f"not read: {path} {reason}")

    def error(self, text: str) -> None:
        """Show an error, on standard error, even when quiet."""
        self.err.print("error:", style="bold red", end=" ")
        self.err.print(printable(text), soft_wrap=True)

    def piece(self, text: str) -> None:
        """Show the next piece of a text as it comes."""
        self.out.file.write(printable(text))
        self.out.file.flush()

    def line(self, text: str = "", style: str = "") -> None:
        """Show a line of the result, unless quiet."""
        if not self.quiet:
            self.out.print(printable(text), style=style, soft_wrap=True)

    def json(self, data: Mapping[str, object]) -> None:
        """Write one JSON object to standard output, on one line, if quiet."""
        if self.quiet:
            self.out.file.write(json.dumps(data, ensure_ascii=False) + "\n")
            self.out.file.flush()

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Show a table, unless quiet; columns whose name begins with > are right-aligned."""
        if self.quiet:
            return
        from rich import box
        from rich.table import Table

        table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
        for name in columns:
            table.add_column(name.lstrip(">"), justify="right" if name.startswith(">") else "left")
        for row in rows:
            table.add_row(*(printable(cell) for cell in row))
        if not self.out.is_terminal:  # rich assumes 80 columns for a pipe or a log
            self.out.width = max(self.out.width, WIDEST)
        self.out.print(table)


@contextmanager
def progress(terminal: Terminal, what: str) -> Iterator[Callable[[str, int, int], None]]:
    """Yield a callback (work, done, total) that shows how far a work is."""
    with terminal.working(what) as show:
        yield lambda what, done, total: show(f"{what}: {done:,} of {total:,}")
