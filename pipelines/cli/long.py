"""What `ragspec ask --long` does once its options are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragspec.errors import InputError
from ragspec.pipelines.cli.ask import (
    Asking,
    answered,
    compared_with_plain,
    show_result,
    unseen,
)
from ragspec.pipelines.console.options import EngineOptions, be_quiet, drafter_of
from ragspec.pipelines.console.terminal import Terminal
from ragspec.retrievers.rapid.distribution import eta_of

if TYPE_CHECKING:
    from ragspec.engine.engine import Engine
    from ragspec.pipelines.docqa.docqa import Answer
    from ragspec.pipelines.long.document import LongDocument
    from ragspec.sampling.settings import Sampling


@dataclass(frozen=True, slots=True)
class Long:
    """One document that is read as a whole: a part of its tokens, and where it is kept.

    mode, eta: how what the question finds bears on the answer, see `LongDocument.open`.
    """

    part: tuple[int, int] | None = None
    keep: Path | None = None
    mode: str = "exact"
    eta: float | None = None


def part_of(text: str | None) -> tuple[int, int] | None:
    """Return what `--token-range` names, FROM:TO in tokens of the document; raises InputError."""
    if text is None:
        return None
    first, colon, last = text.partition(":")
    if not (colon and first.isdecimal() and last.isdecimal()):
        raise InputError(
            f"--token-range is {text!r}; expected FROM:TO, two tokens, such as 0:7000."
        )
    return int(first), int(last)


def answer_long(question: str, docs: Sequence[Path], long: Long, asking: Asking) -> bool:
    """Answer a question over one document and show the result; return whether it was interrupted.

    Where `keep` is a kept document it is not read again, else it is read and kept there.
    """
    from ragspec.pipelines.docqa.docqa import NEW_TOKENS
    from ragspec.storage.store import check_writable, is_store

    be_quiet()
    eta_of(long.mode, long.eta)  # before anything is loaded
    terminal = Terminal(quiet=asking.json)
    known = long.keep is not None and long.keep.is_dir() and is_store(long.keep)
    if known and (docs or long.part or asking.prompt or asking.system):
        raise InputError(
            f"{long.keep} holds a kept document; expected it alone, without --docs, --token-range, "
            "--prompt and --system, or another folder to keep this one in."
        )
    if not known and (len(docs) != 1 or docs[0].is_dir()):
        got = f"the folder {docs[0]}" if len(docs) == 1 else f"{len(docs)} of --docs"
        raise InputError(
            f"got --long with {got}; expected one file, or a kept document (--save-cache FOLDER)."
        )
    if long.keep is not None and long.keep.exists():
        check_writable(long.keep)  # before the document is read, which takes long
    with terminal.working("loading the model"):
        engine, modes = _loaded(asking.engine, long)
    asking = replace(asking, sampling=asking.chosen(engine))
    document = _opened(engine, docs, long, asking, known, terminal, modes)
    engine = document.engine

    def run(engine: Engine, sampling: Sampling, stream: Any) -> Answer:
        current = document if engine is document.engine else document.over(engine)
        return current.ask(
            question,
            sampling,
            max_new_tokens=asking.max_new_tokens or NEW_TOKENS,
            stream=stream,
            **asking.options,
        )

    if asking.compare:  # so that neither run has the keys to copy for the first time
        document.ask(question, max_new_tokens=1)
    answer = run(engine, asking.sampling, terminal.piece if asking.streams else unseen)
    result = answered(question, answer)
    compared, interrupted = compared_with_plain(
        engine, result, asking, lambda e, s: run(e, s, unseen).generation, terminal
    )
    show_result(result, compared, engine, asking, terminal)
    return interrupted


def _loaded(options: EngineOptions, long: Long) -> tuple[Engine, dict[str, Any]]:
    """Return the engine, and what a document is opened with beside it.

    A draft model reads the chunks where a mode or the drafter asks for that, else the whole prompt.
    """
    from ragspec.models.load import load_model
    from ragspec.pipelines.long.modes import RAPID

    modes: dict[str, Any] = {"mode": long.mode, "eta": long.eta}
    request = drafter_of(options.drafter or "auto")
    names = [request] if isinstance(request, str) else list(request or ())
    if long.mode == "exact" and RAPID not in names:
        return options.engine(), modes
    model, rest = options.draft_model, [name for name in names if name != RAPID]
    current = replace(options, draft_model=None, drafter=",".join(rest) or "none")
    if long.mode == "paper":
        current = replace(current, drafter="none")
        modes["drafter"] = rest if options.drafter else None
    elif RAPID in names:
        modes["drafter"] = RAPID
    engine = current.engine()
    if modes.get("drafter") == RAPID and engine.drafter is not None:
        modes["drafter"] = [engine.drafter, RAPID]
    if model is not None:
        modes["draft_model"] = load_model(model, options.device, options.dtype)
    return engine, modes


def _opened(
    engine: Engine,
    docs: Sequence[Path],
    long: Long,
    asking: Asking,
    known: bool,
    terminal: Terminal,
    modes: dict[str, Any],
) -> LongDocument:
    """Open a kept document, or read one and keep it where that is wanted."""
    from ragspec.pipelines.long.document import LongDocument as AnyDocument

    if known:
        assert long.keep is not None
        with terminal.working("opening the kept document"):
            return AnyDocument.open(long.keep, engine, **modes)
    with terminal.prefill_progress() as on_progress:
        result = AnyDocument.open(
            docs[0],
            engine,
            part=long.part,
            prompt=asking.prompt,
            system=asking.system,
            on_read=on_progress,
            **modes,
        )
    if long.keep is not None:
        with terminal.working("keeping it"):
            result.save(long.keep)
        terminal.note(
            f"kept in {long.keep}: {result.tokens:,} tokens, {result.bytes / 1e6:,.0f} MB"
        )
    return result
