"""Hidden states of a model's chats, stored during generation and read by many trainings.

Beside `NAME.jsonl`, a chat per line, `NAME.bin` has the states of its tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ragspec.drafters.base import DraftContext, Drafter, DraftRequest, DraftSession, Prefill
from ragspec.needs import LAST, HiddenStates, Needs
from ragspec.rules.base import Step
from ragspec.training.batches import StateRead
from ragspec.trees.draft_tree import DraftTree
from ragspec.verification.causal import CausalTarget


class StateRecorder(Drafter):
    """Drafts nothing and records the states of all texts.

    Args:
        taps: What a head reads; the last states are kept before them.

    Attributes:
        sessions: Those of all texts since the list was cleared.
    """

    name, looks_up = "recorder", False

    def __init__(self, taps: Sequence[int]) -> None:
        self.order = (LAST, *taps)
        self.needs = Needs(hidden_states=tuple(set(self.order)))
        self.sessions: list[Recording] = []

    def open(self, request: DraftRequest) -> Recording:
        """Return a session that keeps the states of one text."""
        self.sessions.append(Recording(request.prompt, self.order))
        return self.sessions[-1]


class Recording(DraftSession):
    """The tokens and states of one text; see `StateRecorder`.

    Attributes:
        start: The first token to learn.
    """

    def __init__(self, prompt: Sequence[int], order: Sequence[int]) -> None:
        self.tokens: Sequence[int] = prompt
        self.start, self._order = len(prompt), order
        self._parts: list[torch.Tensor] = []

    @property
    def answer(self) -> Sequence[int]:
        """The tokens after the prompt."""
        return self.tokens[self.start :]

    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        """Return no draft; the context goes on to tell all tokens."""
        self.tokens = context.tokens
        return DraftTree.empty()

    def observe_prefill(self, prefill: Prefill) -> None:
        """Keep the states of the prompt."""
        if prefill.hidden is not None:
            self._keep(prefill.hidden)

    def observe(self, step: Step) -> None:
        """Keep the root's states."""
        if step.hidden is not None:
            self._keep(step.hidden)

    def _keep(self, hidden: HiddenStates) -> None:
        self._parts.append(hidden.of(self._order)[0].to("cpu", torch.bfloat16))

    def row(self) -> tuple[dict[str, Any], torch.Tensor]:
        """Return ids and the start among them, and their states, bf16 [T, H times states].

        What the prefix cache had is missing at the beginning. So are the last two tokens: the last
        one is not read, and a text that ends is not observed.
        """
        states = torch.cat(self._parts)
        first = len(self.tokens) - 2 - len(states)
        return {"ids": list(self.tokens[first:-2]), "start": max(1, self.start - first)}, states


def append_chats(path: Path, sessions: Sequence[Recording], number: int) -> None:
    """Append the chats of a round; a line without states cannot remain."""
    rows = [session.row() for session in sessions]
    with path.with_suffix(".bin").open("ab") as stream:
        for _, states in rows:
            stream.write(states.contiguous().view(torch.int16).numpy().tobytes())
    with path.open("a", encoding="utf-8") as stream:
        stream.writelines(json.dumps(row | {"round": number}) + "\n" for row, _ in rows)


def next_round(path: Path, width: int) -> int:
    """Return the number of the round to go on with; what a kill tore is cut off.

    Args:
        width: Numbers of the states of a token.
    """
    path.touch()
    rows = _rows(path)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    with path.with_suffix(".bin").open("ab") as stream:
        size = 2 * width * sum(len(row["ids"]) for row in rows)
        if stream.tell() < size:
            raise SystemExit(f"{stream.name} lacks states of {path}; expected both as written.")
        stream.truncate(size)
    return rows[-1]["round"] + 1 if rows else 0


def _rows(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a file."""
    whole = path.read_text(encoding="utf-8").rpartition("\n")[0]
    return [json.loads(line) for line in whole.splitlines()]


class Chat(NamedTuple):
    """Token ids with states, of which those from `start` on are learned from.

    Attributes:
        group: File and round.
        states: Those of all ids, bf16 as i16 [T, H times states].
    """

    group: tuple[Path, int]
    ids: list[int]
    start: int
    states: np.ndarray[Any, np.dtype[np.int16]]


def read_chats(path: Path, width: int, longest: int) -> list[Chat]:
    """Return the chats of a file, cut to so many tokens; see `append_chats`."""
    flat = np.memmap(path.with_suffix(".bin"), np.int16, "r")
    states = flat[: len(flat) // width * width].reshape(-1, width)
    chats, done = list[Chat](), 0
    for row in _rows(path):
        size = len(row["ids"])
        kept = min(size, longest)
        if row["start"] < kept:
            group, held = (path, row["round"]), states[done : done + kept]
            chats.append(Chat(group, row["ids"][:kept], row["start"], held))
        done += size
    return chats


class StoredStates:
    """Reads batches of chats for a `HeadTrainer`."""

    def __init__(self, target: CausalTarget, chats: Sequence[Chat]) -> None:
        self.target, self.chats = target, chats

    def read(self, numbers: Sequence[int]) -> StateRead:
        """Return the batch of the chats with these numbers."""
        device = self.target.device
        embedded, last, taps, real = [], [], [], []
        for number in numbers:
            _, ids, start, held = self.chats[number]
            states = torch.from_numpy(np.array(held)).view(torch.bfloat16).float().to(device)
            with torch.no_grad():
                tokens = torch.tensor([ids], device=device)
                embedded.append(self.target.embed(tokens)[0].float())
            width = self.target.config.hidden_size
            last.append(states[:, :width])
            taps.append(states[:, width:])
            learned = torch.ones(len(ids), dtype=torch.bool, device=device)
            learned[: max(1, start - 1)] = False  # the first answer's token too is drafted
            real.append(learned)
        pad = torch.nn.utils.rnn.pad_sequence
        rows = (pad(each, batch_first=True) for each in (embedded, last, taps, real))
        return StateRead(*rows)
