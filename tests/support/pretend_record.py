"""The events of a pretended accelerator, and the lines of the project that caused them."""

import sys
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("ragspec", "retrievers", "visual", "pipelines")
_CALL = "_call_impl"  # of every torch module


class Cause(StrEnum):
    """The work of an accelerator for the host. The host waits at synchronous copies."""

    KERNEL = "kernel"
    COPY_IN = "copy in"
    COPY_IN_ASYNC = "copy in, asynchronous"
    COPY_OUT = "copy out"
    COPY_OUT_ASYNC = "copy out, asynchronous"
    WAIT = "wait"  # for a size, or for all that was launched


WAITS = frozenset({Cause.COPY_IN, Cause.COPY_OUT, Cause.WAIT})
_IN = frozenset({Cause.COPY_IN, Cause.COPY_IN_ASYNC})
_OUT = frozenset({Cause.COPY_OUT, Cause.COPY_OUT_ASYNC})


@dataclass(frozen=True, slots=True)
class Event:
    """One launch, copy or wait.

    what: the operator. bytes: that crossed. where: "file:line" of the innermost caller in one of
    the project's rooms, else of any caller. in_module: whether a module
    was running, so that it belongs to some model's forward.
    """

    cause: Cause
    what: str
    bytes: int
    where: str
    in_module: bool


@dataclass(slots=True)
class Record:
    """Events in order."""

    events: list[Event] = field(default_factory=list)

    def note(self, cause: Cause, what: str, count: int = 0) -> None:
        """Add an event that the calling code caused; count: bytes that crossed."""
        where, in_module = _caller()
        self.events.append(Event(cause, what, count, where, in_module))

    def of(self, *causes: Cause) -> list[Event]:
        """Return the events of these causes."""
        return [event for event in self.events if event.cause in causes]

    @property
    def waits(self) -> int:
        """How often the host waited."""
        return len(self.of(*WAITS))

    @property
    def kernels(self) -> int:
        """How many kernels were launched."""
        return len(self.of(Cause.KERNEL))

    @property
    def kernels_beside(self) -> int:
        """How many kernels were launched while no module ran: beside the forward."""
        return sum(not event.in_module for event in self.of(Cause.KERNEL))

    @property
    def asynchronous(self) -> int:
        """How many copies to the device the host did not wait for."""
        return len(self.of(Cause.COPY_IN_ASYNC))

    @property
    def bytes_in(self) -> int:
        """Bytes that went to the device."""
        return sum(event.bytes for event in self.of(*_IN))

    @property
    def bytes_out(self) -> int:
        """Bytes that came from the device."""
        return sum(event.bytes for event in self.of(*_OUT))

    def table(self, steps: int = 1) -> str:
        """Return the events per step by cause and line, as text; kernels by line only."""
        result, crossed = Counter[tuple[str, Cause, str]](), Counter[tuple[str, Cause, str]]()
        for event in self.events:
            key = (event.where, event.cause, event.what if event.cause in WAITS else "")
            result[key] += 1
            crossed[key] += event.bytes
        lines = [
            f"{self.waits / steps:.2f} waits, {self.asynchronous / steps:.2f} asynchronous copies, "
            f"{self.bytes_in / steps:.0f} bytes in, {self.bytes_out / steps:.0f} out, "
            f"{self.kernels / steps:.1f} kernels ({self.kernels_beside / steps:.1f} beside modules)"
        ]
        for key, count in sorted(result.items(), key=lambda item: (item[0][1], -item[1])):
            where, cause, what = key
            lines.append(
                f"{count / steps:8.2f} {cause:<22} {crossed[key] / steps:8.0f} B {where} {what}"
            )
        return "\n".join(lines)


def _caller() -> tuple[str, bool]:
    """Return where in the project's rooms the running code was called from, and within a module."""
    frame = sys._getframe(2)
    where = outer = ""
    in_module = False
    while frame is not None:
        code = frame.f_code
        in_module = in_module or code.co_name == _CALL
        if not where:
            place = _place(code.co_filename)
            if place in _LOCAL:
                pass
            elif place.split("/")[0] in ROOMS:
                where = f"{place}:{frame.f_lineno}"
            elif not outer and place:
                outer = f"{place}:{frame.f_lineno}"
        if where and in_module:
            break
        frame = frame.f_back  # type: ignore[assignment]
    return where or outer or "?", in_module


_LOCAL = frozenset({"tests/support/pretend.py", "tests/support/pretend_record.py"})


@cache
def _place(name: str) -> str:
    """Return a file by its path in the repository, "" for one from elsewhere.

    The environment of the tests, which may lie in a hidden folder of it, is elsewhere.
    """
    try:
        result = Path(name).resolve().relative_to(ROOT)
    except ValueError:
        return ""
    return "" if result.parts[0].startswith(".") else result.as_posix()
