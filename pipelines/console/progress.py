"""How far long work is: a bar with counts and the time that is left, on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ragspec.pipelines.console.terminal import Terminal


@contextmanager
def progress(terminal: Terminal, what: str) -> Iterator[Callable[[str, int, int], None]]:
    """Yield what is called with (what is done, how much, out of how much); shown on a terminal."""
    if terminal.quiet or not terminal.err.is_terminal:
        yield lambda what, done, total: None
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn())
    figures = (MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, *figures, console=terminal.err, transient=True) as text:
        task = text.add_task(what, total=None)
        doing = what

        def on_progress(what: str, done: int, total: int) -> None:
            nonlocal doing
            if what != doing:  # the time left is told from this kind of work alone
                text.reset(task, description=what)
                doing = what
            text.update(task, completed=done, total=total or None)

        yield on_progress
