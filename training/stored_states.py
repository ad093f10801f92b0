"""Hidden states of texts in one file, which are read once and learned from in many trainings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from ragspec.needs import LAST
from ragspec.training.batches import StateRead
from ragspec.verification.causal import CausalTarget

BATCH = 3000  # tokens of a forward
NEWS = 50  # forwards between two lines of progress


class Text(NamedTuple):
    """Token ids, of which those from `start` on are learned from."""

    ids: list[int]
    start: int


class StoredStates:
    """Reads batches of texts for a `HeadTrainer`.

    Args:
        folder: As `store_states` wrote it.
        taps: What the head reads; () for the last states.
    """

    def __init__(self, target: CausalTarget, folder: Path, taps: Sequence[int]) -> None:
        about = json.loads((folder / "texts.json").read_text(encoding="utf-8"))
        self.target, self.texts = target, [Text(*text) for text in about["texts"]]
        lengths = [len(text.ids) for text in self.texts]
        self._ends = np.cumsum([0, *lengths])
        width, order = about["width"], about["taps"]
        shape = int(self._ends[-1]), len(order), width
        self._states = np.memmap(folder / "states.bin", np.int16, "r", shape=shape)
        self._last, self._taps = order.index(LAST), [order.index(tap) for tap in taps]

    def read(self, numbers: Sequence[int]) -> StateRead:
        """Return the batch of the texts with these numbers."""
        device = self.target.device
        embedded, last, taps, real = [], [], [], []
        for number in numbers:
            ids, start = self.texts[number]
            held = np.array(self._states[self._ends[number] : self._ends[number + 1]])
            states = torch.from_numpy(held).view(torch.bfloat16).float().to(device)
            with torch.no_grad():
                tokens = torch.tensor([ids], device=device)
                embedded.append(self.target.embed(tokens)[0].float())
            last.append(states[:, self._last])
            taps.append(states[:, self._taps].flatten(1))
            learned = torch.ones(len(ids), dtype=torch.bool, device=device)
            learned[: max(1, start - 1)] = False  # the first answer's token too is drafted
            real.append(learned)
        pad = torch.nn.utils.rnn.pad_sequence
        rows = [pad(each, batch_first=True) for each in (embedded, last, real)]
        read = pad(taps, batch_first=True) if self._taps else None
        return StateRead(rows[0], rows[1], rows[2], taps=read)


def store_states(
    target: CausalTarget, texts: Sequence[Text], folder: Path, taps: Sequence[int]
) -> None:
    """Write the last states of texts and those of the taps, in bfloat16, unless they are there."""
    if (folder / "texts.json").is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    order = (LAST, *taps)
    texts = sorted(texts, key=lambda text: len(text.ids))
    total, width = sum(len(text.ids) for text in texts), target.config.hidden_size
    states = np.memmap(folder / "states.bin", np.int16, "w+", shape=(total, len(order), width))
    layers = target.config.num_hidden_layers
    places = [layers if tap == LAST else tap for tap in order]
    done, number, forwards = 0, 0, 0
    while number < len(texts):
        size = max(1, min(16, BATCH // len(texts[number].ids)))
        part = [torch.tensor(text.ids) for text in texts[number : number + size]]
        ids = torch.nn.utils.rnn.pad_sequence(part, batch_first=True).to(target.device)
        real = torch.nn.utils.rnn.pad_sequence([torch.ones_like(each) for each in part], True)
        with torch.no_grad():
            output = target.model.model(
                input_ids=ids,
                attention_mask=real.to(target.device),
                output_hidden_states=True,
                use_cache=False,
            )
        told = torch.stack([output.hidden_states[place] for place in places], 2)
        for row, each in zip(told.to("cpu", torch.bfloat16), part, strict=True):
            states[done : done + len(each)] = row[: len(each)].view(torch.int16).numpy()
            done += len(each)
        number, forwards = number + size, forwards + 1
        if forwards % NEWS == 0:
            print(f"states of {done:,} of {total:,} tokens", flush=True)
    states.flush()
    about = {"texts": texts, "taps": order, "width": width}
    (folder / "texts.json").write_text(json.dumps(about), encoding="utf-8")
