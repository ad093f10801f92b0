"""Make the table of next tokens that a model brings, of its distributions over stored texts.

    python training/next_tokens.py --chats answers.jsonl passages.jsonl --out smollm2.npy

The texts are those of `chat_answers.py`, whose last states stand beside them. For every key of
one to three tokens the model's distributions after it are averaged, and mixed with those of the
shorter key: n places weigh n / (n + 3). Keys of two and three tokens with less than `--least`
places are left out.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from stored_states import read_chats

from ragspec.drafters.heads.head import default_taps
from ragspec.models.load import load_model
from ragspec.retrievers.methods.next_tokens import BITS, LONGEST, MOST, UNIT
from ragspec.verification.causal import CausalTarget

BEST = 8  # tokens of a place
WIDTH = 6  # tokens of a row in the file
MIXED = 3.0  # places at which a key and the shorter one weigh the same
CHUNK = 512  # places whose logits are computed at once
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class Places(NamedTuple):
    """Keys [N, 3] of places, -1 where there is no token, and the best tokens there [N, 8]."""

    keys: Ints
    tokens: Ints
    chances: Floats


def read_places(target: CausalTarget, paths: Iterable[Path]) -> Places:
    """Return the model's best tokens after every place of the chats."""
    head = target.model.get_output_embeddings().weight.detach().to(torch.bfloat16).t().contiguous()
    size = target.config.hidden_size
    width = size * (1 + len(default_taps(target)))
    keys, tokens, chances = [], [], []
    for path in paths:
        for number, chat in enumerate(read_chats(path, width, 1 << 30)):
            ids = np.array([-1] * (LONGEST - 1) + chat.ids)
            keys.append(np.lib.stride_tricks.sliding_window_view(ids, LONGEST))
            for start in range(0, len(chat.ids), CHUNK):
                states = np.array(chat.states[start : start + CHUNK, :size])
                logits = torch.from_numpy(states).view(torch.bfloat16) @ head
                best = torch.softmax(logits.float(), -1).topk(BEST)
                tokens.append(best.indices.numpy())
                chances.append(best.values.double().numpy())
            if number % 200 == 0:
                print(f"{path.name}: {number} texts", flush=True)
    return Places(np.concatenate(keys), np.concatenate(tokens), np.concatenate(chances))


def best_of(rows: Ints, tokens: Ints, chances: Floats, count: int) -> tuple[Ints, Floats]:
    """Return the likeliest tokens of rows and their summed chances, [count, 8] each, 0 if fewer."""
    pairs, places = np.unique(rows << BITS | tokens, return_inverse=True)
    total = np.bincount(places, chances)
    order = np.lexsort((-total, pairs >> BITS))
    of, total = pairs[order] >> BITS, total[order]
    rank = np.arange(len(of)) - np.searchsorted(of, of)
    best = rank < BEST
    results = np.zeros((count, BEST), np.int64), np.zeros((count, BEST))
    results[0][of[best], rank[best]] = (pairs[order] & MOST)[best]
    results[1][of[best], rank[best]] = total[best]
    return results


def table_of(places: Places, least: int) -> npt.NDArray[np.void]:
    """Return the rows of the file; see `NextTokens`."""
    parts: list[tuple[Ints, Ints, Floats]] = []
    for order in range(1, LONGEST + 1):
        whole = places.keys[:, LONGEST - order] >= 0
        keys = places.keys[whole].copy()
        keys[:, : LONGEST - order] = -1
        names, which, counts = np.unique(packed(keys), return_inverse=True, return_counts=True)
        often = counts >= (least if order > 1 else 1)
        used, number = often[which], np.cumsum(often) - 1
        names, counts, count = names[often], counts[often], int(often.sum())
        rows = np.repeat(number[which[used]], BEST)
        tokens, chances = (each[whole][used].ravel() for each in places[1:])
        tokens, mean = best_of(rows, tokens, chances / counts[rows], count)
        weight = (counts / (counts + MIXED))[:, None]
        mean = mean * weight
        if parts:
            shorter, others, below = parts[-1]
            names_below = names | MOST << BITS * (order - 1)
            at = np.searchsorted(shorter, names_below)
            rows = np.repeat(np.arange(count), 2 * BEST)
            tokens = np.concatenate((tokens, others[at]), 1).ravel()
            mean = np.concatenate((mean, (1.0 - weight) * below[at]), 1).ravel()
            tokens, mean = best_of(rows, tokens, mean, count)
        parts.append((names, tokens, mean))
    names, tokens, mean = (np.concatenate(each) for each in zip(*parts, strict=True))
    size = "<u2" if tokens.max() < 1 << 16 else "<u4"
    fields = [("key", "<u8"), ("tokens", size, (WIDTH,)), ("chances", "u1", (WIDTH,))]
    table = np.zeros(len(names), fields)
    table["key"], table["tokens"] = names, tokens[:, :WIDTH]
    table["chances"] = np.rint(UNIT * mean[:, :WIDTH])
    return np.sort(table[table["chances"][:, 0] > 0], order="key")


def packed(keys: Ints) -> npt.NDArray[np.uint64]:
    """Return keys [N, 3] as numbers; see `key_of`."""
    low = keys & MOST
    return (low[:, 0] << 2 * BITS | low[:, 1] << BITS | low[:, 2]).astype(np.uint64)


def main() -> None:
    """Make the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--chats", type=Path, nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--least", type=int, default=6)
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    target = CausalTarget(load_model(args.model, "cpu", "float32")[0])
    places = read_places(target, args.chats)
    table = table_of(places, args.least)
    np.save(args.out, table)
    print(f"{len(table)} rows of {len(places.keys)} places, {table.nbytes / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
