"""Forwards and texts on ONNX Runtime, in float32 and int8, and through modules, taking turns.

    OMP_NUM_THREADS=1 python benchmarks/runtimes.py [--model smollm2] [--context 512]

Processor milliseconds, medians. A forward verifies a chain after `context` tokens; a text has 64
tokens, and its time is that of a token, the prompt cached. Texts that part from those of the same
weights without drafts, in torch for float32, are counted. At last 1 to 8 chats are written at once,
their prompts cached. `--folded` compares the two attention operators of one session alone.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from budget import CHAT, SUBJECTS, items_of

from ragspec.engine.engine import Engine
from ragspec.models.block_linear import weights_of
from ragspec.models.load import load_model
from ragspec.sampling.settings import Sampling
from ragspec.trees.draft_tree import DraftTree
from ragspec.verification.base import TargetSession
from ragspec.verification.causal import CausalTarget
from ragspec.verification.onnx import target as module
from ragspec.verification.open import open_target

POSITIONS = (1, 2, 4, 8, 16, 32)
ROUNDS = 9
GROUPS = ("documents", "chat", "free")
CLIENTS = (1, 2, 4, 8)


def spent(act: Callable[[], object]) -> float:
    """Return the processor milliseconds of a call."""
    start = time.process_time()
    act()
    return 1000.0 * (time.process_time() - start)


def forwards(targets: dict[str, CausalTarget], context: int) -> dict[str, dict[str, float]]:
    """Return the milliseconds of forwards by their positions, and of reading the context."""
    text = torch.randint(100, 2000, (context,), generator=torch.Generator().manual_seed(0)).tolist()
    sessions: dict[str, TargetSession] = {}
    table: dict[str, dict[str, float]] = {name: {} for name in targets}
    for name, target in targets.items():
        sessions[name] = session = target.open(1, context + max(POSITIONS)).__enter__()

        def read(session: TargetSession = session) -> None:
            for start in range(0, context, 512):
                session.verify([text[start : start + 512]], [DraftTree.empty()])
                session.commit([()])

        table[name]["reading"] = spent(read)
    for n in POSITIONS:
        tree = DraftTree.chain([7] * (n - 1), "bench")
        times: dict[str, list[float]] = {name: [] for name in targets}
        for _ in range(ROUNDS):
            for name, session in sessions.items():
                times[name].append(spent(lambda s=session, t=tree: s.verify([[5]], [t])))  # type: ignore[misc]
                session.discard_uncommitted()
        for name, each in times.items():
            table[name][f"{n}"] = median(each)
    return table


def operators(target: Any, context: int) -> dict[str, dict[str, float]]:
    """Return the milliseconds of forwards with the `FOLDED` operator and with the other one."""
    names = {"a head of keys for each head of queries": 0, "folded": module.FOLD_TO}
    table: dict[str, dict[str, float]] = {name: {} for name in names}
    text = torch.randint(100, 2000, (context,), generator=torch.Generator().manual_seed(0)).tolist()
    target._runner.fold_from = 1
    with target.open(1, context + 3 * max(POSITIONS)) as session:
        for start in range(0, context, 512):
            session.verify([text[start : start + 512]], [DraftTree.empty()])
            session.commit([()])
        for n in (n for n in POSITIONS if n <= names["folded"]):
            tree, times = DraftTree.chain([7] * (n - 1), "bench"), {name: [] for name in names}
            for _ in range(3 * ROUNDS):
                for name, module.FOLD_TO in names.items():
                    times[name].append(spent(lambda t=tree: session.verify([[5]], [t])))  # type: ignore[misc]
                    session.discard_uncommitted()
            for name, each in times.items():
                table[name][f"{n}"] = median(each)
    return table


def texts(engines: dict[str, Engine], prompts: int) -> tuple[dict[str, dict[str, float]], int]:
    """Return the milliseconds of a token by group, and the number of texts that part."""
    items = items_of(next(iter(engines.values())), GROUPS, prompts)
    times: dict[str, dict[str, list[float]]] = {name: {} for name in engines}
    parted = 0
    for number, item in enumerate(items):
        expected: dict[str, list[int]] = {}
        names = list(engines)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            engine = engines[name]
            engine.prefill(list(item.prompt))
            sampling = Sampling(temperature=item.temperature, seed=number)
            start = time.process_time()
            out = engine.generate(
                list(item.prompt),
                sampling,
                max_new_tokens=64,
                ignore_eos=True,
                spans=item.spans or None,
                texts=item.texts or None,
            )
            each = 1000.0 * (time.process_time() - start) / len(out.tokens)
            times[name].setdefault(item.category, []).append(each)
            parted += out.tokens != expected.setdefault(weights_of(engine.model), out.tokens)
    table = {name: {g: median(t) for g, t in groups.items()} for name, groups in times.items()}
    return table, parted


def clients(engines: dict[str, Engine], rounds: int) -> dict[str, dict[str, float]]:
    """Return the milliseconds of a token by the number of chats that are written at once."""
    table: dict[str, dict[str, float]] = {name: {} for name in engines}
    prompts = [CHAT.format(subject) for subject in SUBJECTS]
    for count in CLIENTS:
        times: dict[str, list[float]] = {name: [] for name in engines}
        for number in range(1 + rounds):  # the first opens sessions
            for name, engine in engines.items():

                def write(
                    engine: Engine = engine, count: int = count, tenant: str = f"{number}"
                ) -> None:
                    handles = [
                        engine.submit(each, max_new_tokens=64, ignore_eos=True, tenant=tenant)
                        for each in prompts[:count]  # no drafter knows the texts of another round
                    ]
                    for handle in handles:
                        handle.result()

                times[name].append(spent(write) / (64 * count))
        for name, each in times.items():
            table[name][f"{count}"] = median(each[1:])
    return table


def show(table: dict[str, dict[str, float]]) -> None:
    """Print a table in Markdown."""
    columns = list(next(iter(table.values())))
    print(f"| ms | {' | '.join(columns)} |\n| --- {'| --- ' * len(columns)}|")
    for name, row in table.items():
        print(f"| {name} | {' | '.join(f'{row[c]:.1f}' for c in columns)} |", flush=True)


def main() -> None:
    """Measure both runtimes and print their tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--prompts", type=int, default=6, help="prompts of a group; 0 for none")
    parser.add_argument("--folded", action="store_true", help="compare operators in 8 bits")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.folded:
        small, _ = load_model(options.model, "cpu", "int8")  # in memory both are in one graph
        show(operators(open_target(small, runtime="onnx"), options.context))
        return
    model, tokenizer = load_model(options.model, "cpu", "float32")
    targets = {runtime: open_target(model, runtime=runtime) for runtime in ("torch", "onnx")}
    small, _ = load_model(options.model, "cpu", "int8")
    targets["onnx, int8"] = open_target(small, runtime="onnx")
    tables = {"forwards": forwards(targets, options.context)}
    show(tables["forwards"])
    if options.prompts:
        engines = {
            f"{runtime}, {'plain' if drafter is None else drafter}": Engine(
                target, tokenizer, drafter
            )
            for runtime, target in targets.items()
            for drafter in (None, "auto")
        }
        tables["texts"], parted = texts(engines, options.prompts)
        show(tables["texts"])
        print(f"{parted} texts part from others of the same weights")
        tables["clients"] = clients(engines, 3)
        show(tables["clients"])
    if options.json:
        options.json.write_text(json.dumps(tables, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
