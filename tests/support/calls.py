"""Wrappers that record calls or fail at some, and callables that depend on all their calls."""

import threading
from collections.abc import Callable
from itertools import count
from typing import Any

import torch


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


class StatefulProcessor:
    """A processor whose favourite token depends on the number of calls and on their ids."""

    def __init__(self) -> None:
        self.calls: list[list[list[int]]] = []

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls.append(ids.tolist())
        both = zip(self.calls[0], self.calls[-1], strict=True)
        favourites = [[(sum(first + last) + 7 * len(self.calls)) % 90] for first, last in both]
        return scores.scatter_add(1, torch.tensor(favourites), torch.full_like(scores, 9.0))


class CountingCriterion:
    """Ends a text after some calls, or once `stopped` is set; cannot be copied whole."""

    def __init__(self, most: int) -> None:
        self.most, self.count, self.ids, self.inner = most, 0, list[Any](), StatefulProcessor()
        self.stopped, self.lock = False, threading.Lock()

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.ids.append(ids)
        self.inner.calls.append([])
        most = max(self.count, len(self.ids), len(self.inner.calls))
        return torch.tensor([self.stopped or most >= self.most] * len(ids))
