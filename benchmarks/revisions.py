"""Requests over one cached guide in two checkouts of this project, in turn.

    OMP_NUM_THREADS=1 python benchmarks/revisions.py BEFORE AFTER --model smollm2 --guide 2000

BEFORE and AFTER are the folders of two checkouts. One process of each answers the same rounds in
alternating order, and every round must give equal tokens. The clock is the processor time of each
process. The first column is the tokens per second of all clients together, the second the mean time
to a first token; ratios are medians over the rounds of after over before.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from statistics import mean, median

QUESTION = 40  # tokens after the guide


def note(first: dict[int, float], client: int, *_: object) -> None:
    """Note the time of a client's first step."""
    first.setdefault(client, time.process_time())


def serve(options: argparse.Namespace) -> None:
    """Answer each line of standard input, the number of a round, with its figures."""
    import torch

    from ragspec.engine.engine import Engine
    from ragspec.pipelines.bench.prompts import bundled_items

    torch.set_num_threads(1)
    engine = Engine.from_pretrained(options.model, drafter=None, dtype="float32")
    text = [token for item in bundled_items(engine) for token in item.prompt]
    text *= 1 + 12000 // len(text)
    if options.drafter != "plain":
        engine = engine.with_drafter(options.drafter, 8)
    guide, rest = text[: options.guide], text[options.guide :]
    with engine.with_limits(max(2, options.clients)) as limited:
        limited.submit([*guide, 5, 6, 7], max_new_tokens=2).result()
        print("ready", flush=True)
        for line in sys.stdin:
            began, first, handles = time.process_time(), dict[int, float](), []
            for client in range(options.clients):
                start = 97 * (options.clients * int(line) + client) % (len(rest) - QUESTION)
                prompt = [*guide, *rest[start:][:QUESTION]]
                handle = limited.submit(
                    prompt,
                    max_new_tokens=options.tokens,
                    ignore_eos=True,
                    on_step=partial(note, first, client),
                )
                handles.append(handle)
            tokens = [list(handle.result().tokens) for handle in handles]
            spent = time.process_time() - began
            digest = hashlib.md5(str(tokens).encode()).hexdigest()
            waits = mean(first.values()) - began
            print(sum(map(len, tokens)) / spent, 1000 * waits, digest, flush=True)


def start(folder: Path) -> subprocess.Popen[str]:
    """Start the process of a checkout and wait until it is ready."""
    process = subprocess.Popen(
        [sys.executable, __file__, *sys.argv[1:], "--serve"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(folder)},
    )
    assert process.stdout is not None
    while "ready" not in (line := process.stdout.readline()):
        if not line:
            raise SystemExit(f"the process of {folder} ended before it was ready.")
    return process


def main() -> None:
    """Compare two checkouts, and print one line of figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--model", default="starter")
    parser.add_argument("--guide", type=int, default=1000, help="tokens that all prompts share")
    parser.add_argument("--drafter", default="plain", help="plain, or a drafter of 8 nodes")
    parser.add_argument("--tokens", type=int, default=32, help="new tokens of a request")
    parser.add_argument("--clients", type=int, default=8, help="requests at once")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options)
        return
    processes = [start(options.before.resolve()), start(options.after.resolve())]
    figures: list[list[tuple[float, float]]] = [[], []]
    for number in range(options.rounds):
        digests = set()
        for side in (0, 1) if number % 2 else (1, 0):
            stdin, stdout = processes[side].stdin, processes[side].stdout
            assert stdin is not None and stdout is not None
            print(number, file=stdin, flush=True)
            rate, wait, digest = stdout.readline().split()
            figures[side].append((float(rate), float(wait)))
            digests.add(digest)
        if len(digests) > 1:
            raise SystemExit(f"the tokens of round {number} differ.")
    for process in processes:
        process.communicate()
    pairs = list(zip(*figures, strict=True))
    rates = median(after[0] / before[0] for before, after in pairs)
    waits = median(after[1] / before[1] for before, after in pairs)
    tokens = [median(each[0] for each in side) for side in figures]
    first = [median(each[1] for each in side) for side in figures]
    print(
        f"{tokens[0]:.1f} -> {tokens[1]:.1f} tokens/s, {rates:.2f}x; first token "
        f"{first[0]:.0f} -> {first[1]:.0f} ms, {waits:.2f}"
    )


if __name__ == "__main__":
    main()
