"""Functions that do their work, and note their calls or fail at some of them."""

from collections.abc import Callable
from itertools import count
from typing import Any


def noted(
    function: Callable[..., Any], notes: list[Any], note: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """Return a function that appends what `note` makes of its arguments, or else its result."""

    def noting(*arguments: Any, **options: Any) -> Any:
        if note is not None:
            notes.append(note(*arguments, **options))
        result = function(*arguments, **options)
        if note is None:
            notes.append(result)
        return result

    return noting


def failing(
    error: BaseException | type[BaseException],
    calls: range | tuple[int, ...],
    function: Callable[..., Any] = lambda *arguments, **options: None,
) -> Callable[..., Any]:
    """Return a function that raises the error at the calls of these numbers, the first being 1."""
    numbers = count(1)

    def tried(*arguments: Any, **options: Any) -> Any:
        if next(numbers) in calls:
            raise error
        return function(*arguments, **options)

    return tried
