"""The command `bench.py store`: the cost to build, keep, open and search a store.

The store has one segment. Building and disk are the segment's, opening is the whole store's.

The text is synthetic. Each token follows one of a few successors of the token before (chosen by
Zipf's law), some tokens are independent, and half of the documents quote earlier ones. Contexts to
look up come from further documents of the same kind. Building, opening and look-ups each run in a
fresh process, so that their memory can be separated. Build growth is the highest resident size less
that before building, mapped files included. Look-ups are timed one by one over several rounds
through all contexts. Each context counts with its best round, since other work disturbs single
timings.
"""

from __future__ import annotations

import json as json_text
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from ragspec.errors import InputError
from ragspec.pipelines.console.checks import check_output

UNITS = {"k": 10**3, "m": 10**6, "g": 10**9}
LENGTH = 1000
CONTEXT = 32
_SUCCESSORS = 24
_FRESH = 0.15
_WIDTH = 1000
_NAME = "seg-000001"


def parse_tokens(text: str) -> int:
    """Return the number of a text like "10M", "500k" or "2000"; raises InputError."""
    number, unit = text.strip().lower(), 1
    if number[-1:] in UNITS:
        number, unit = number[:-1], UNITS[number[-1]]
    try:
        count = round(float(number) * unit)
    except (ValueError, OverflowError):
        count = 0
    if not LENGTH <= count < 2**31 - 2**22:
        raise InputError(f"Expected --tokens from {LENGTH} to 2G, got {text!r}. Write 500k or 10M.")
    return count


def write_text(path: Path, documents: int, vocab_size: int, seed: int) -> None:
    """Write documents of `LENGTH` synthetic tokens each as u32 without separators."""
    import numpy as np

    rng = np.random.default_rng(seed)
    common = 1.0 / np.arange(1, vocab_size + 1)
    common /= common.sum()
    shares = 1.0 / np.arange(1, _SUCCESSORS + 1)
    shares /= shares.sum()
    after = rng.choice(vocab_size, (vocab_size, _SUCCESSORS), p=common).astype(np.uint32)
    quoted = rng.choice(vocab_size, (_WIDTH, LENGTH), p=common).astype(np.uint32)
    with path.open("wb") as stream:
        for start in range(0, documents, _WIDTH):
            rows = min(_WIDTH, documents - start)
            text = np.empty((rows, LENGTH), dtype=np.uint32)
            text[:, 0] = rng.choice(vocab_size, rows, p=common)
            fresh = rng.choice(vocab_size, (rows, LENGTH), p=common)
            ranks = rng.choice(_SUCCESSORS, (rows, LENGTH), p=shares)
            is_fresh = rng.random((rows, LENGTH)) < _FRESH
            for at in range(1, LENGTH):
                successor = after[text[:, at - 1], ranks[:, at]]
                text[:, at] = np.where(is_fresh[:, at], fresh[:, at], successor)
            if start:
                for row in range(0, rows, 2):
                    at, to, size = *rng.integers(0, LENGTH - 200, 2), rng.integers(20, 200)
                    text[row, to : to + size] = quoted[rng.integers(_WIDTH), at : at + size]
            quoted[:rows] = text
            stream.write(text.tobytes())


def read_text(path: Path, documents: int, first: int = 0) -> Iterator[Any]:
    """Yield `documents` documents of a text file from `first` on, in small reads."""
    import numpy as np

    with path.open("rb") as stream:
        stream.seek(4 * LENGTH * first)
        for _ in range(documents):
            yield np.frombuffer(stream.read(4 * LENGTH), dtype=np.uint32)


def resident_bytes(peak: bool = False) -> int:
    """Return the resident bytes of this process, or their peak; 0 on Windows."""
    if sys.platform == "win32":
        return 0
    import resource

    status = Path("/proc/self/status")
    if status.exists():  # getrusage's peak would count the parent before the fork
        key = "VmHWM:" if peak else "VmRSS:"
        line = next(line for line in status.read_text().splitlines() if line.startswith(key))
        return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def measure_build(folder: Path, text: Path, documents: int, vocab_size: int) -> dict[str, float]:
    """Build a segment of the text; return seconds, and bytes a token of memory and disk."""
    from ragspec.retrievers.indexes.segment import FILES, build_segment

    before = resident_bytes()
    start, busy = time.perf_counter(), time.process_time()
    segment = build_segment(folder, read_text(text, documents), vocab_size)
    seconds, busy = time.perf_counter() - start, time.process_time() - busy
    grown = resident_bytes(peak=True) - before
    disk = sum((folder / name).stat().st_size for name in FILES)
    return {
        "build_seconds": seconds,
        "build_cpu_seconds": busy,
        "build_bytes_per_token": grown / len(segment),
        "disk_bytes_per_token": disk / len(segment),
    }


def publish_segment(root: Path, folder: Path, vocab_size: int) -> Path:
    """Publish a segment as a corpus; return the new folder of the segment."""
    from ragspec.drafters.method import GLOBAL
    from ragspec.retrievers.corpus import catalogue
    from ragspec.retrievers.indexes.segment import Segment
    from ragspec.storage.manifest import Contents
    from ragspec.storage.store import publish

    segment = Segment.open(folder, vocab_size)
    counts = len(segment), segment.document_count
    record = catalogue.SegmentRecord(_NAME, GLOBAL, catalogue.SegmentSource.BUILT, *counts)
    contents = catalogue.Catalogue(segment.vocab_size, segment.depth, serial=2, segments=(record,))

    def write(build: Path) -> Contents:
        shutil.move(folder, build / _NAME)
        return Contents(contents.parameters, contents.fingerprints)

    return publish(root, catalogue.KIND, write).path / _NAME


def measure_open(root: Path) -> dict[str, float]:
    """Open a corpus with a check of file sizes; return seconds and growth of memory."""
    from ragspec.retrievers.corpus.index import CorpusIndex

    before, start = resident_bytes(), time.perf_counter()
    corpus = CorpusIndex.open(root, verify="size")
    seconds = time.perf_counter() - start
    grown = resident_bytes() - before
    tokens = corpus.info()["tokens"]
    corpus.close()
    return {"open_seconds": seconds, "open_resident_bytes": grown, "tokens": tokens}


def measure_lookups(
    folder: Path, vocab_size: int, contexts: list[list[int]], budget: int, rounds: int
) -> dict[str, float]:
    """Time one draft for each context; return percentiles, mean nodes and match length."""
    import numpy as np

    from ragspec.retrievers.indexes.segment import Segment

    segment = Segment.open(folder, vocab_size)
    start = time.perf_counter()
    segment.warm_up()
    warm_up = time.perf_counter() - start
    seconds = np.empty((rounds, len(contexts)))
    clock = time.perf_counter
    drafts = [segment.draft(context, budget) for context in contexts]
    for row in seconds:
        for at, context in enumerate(contexts):
            start = clock()
            segment.draft(context, budget)
            row[at] = clock() - start
    p50, p99 = np.percentile(seconds.min(axis=0), (50, 99)) * 1e6
    return {
        "lookup_p50_us": float(p50),
        "lookup_p99_us": float(p99),
        "lookup_any_round_p99_us": float(np.percentile(seconds, 99) * 1e6),
        "warm_up_seconds": warm_up,
        "nodes": float(np.mean([len(draft.tokens) for draft in drafts])),
        "match_length": float(np.mean([draft.length for draft in drafts])),
    }


def in_fresh_process(function: Callable[..., dict[str, float]], *inputs: Any) -> dict[str, float]:
    """Return the result of a function of this module, run in a fresh process."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(function, *inputs).result()


def run_store_benchmark(
    scratch: Path,
    tokens: int,
    *,
    vocab_size: int = 32_000,
    queries: int = 2000,
    rounds: int = 5,
    budget: int = 64,
    seed: int = 0,
    progress: Callable[[str], None] = lambda message: None,
) -> dict[str, Any]:
    """Build a corpus of `tokens` tokens in a scratch folder, measure it and return figures."""
    import numpy as np

    documents, further = tokens // LENGTH, max(8, queries // 50)
    text, folder = scratch / "text.bin", scratch / "segment"
    folder.mkdir()
    progress(f"writing {tokens:,} tokens of text")
    write_text(text, documents + further, vocab_size, seed)
    rng = np.random.default_rng(seed + 1)
    more_documents = list(read_text(text, further, documents))
    picks = zip(
        rng.integers(further, size=queries).tolist(),
        rng.integers(CONTEXT, LENGTH, size=queries).tolist(),
        strict=True,
    )
    contexts = [more_documents[n][end - CONTEXT : end].tolist() for n, end in picks]
    progress(f"building a segment of {documents * LENGTH:,} tokens")
    figures: dict[str, Any] = {"vocab_size": vocab_size, "budget": budget, "queries": queries}
    figures |= in_fresh_process(measure_build, folder, text, documents, vocab_size)
    text.unlink()
    progress("opening it")
    folder = publish_segment(scratch / "corpus", folder, vocab_size)
    figures |= in_fresh_process(measure_open, scratch / "corpus")
    progress("looking things up")
    lookups = in_fresh_process(measure_lookups, folder, vocab_size, contexts, budget, rounds)
    return figures | lookups | {"rounds": rounds, "seed": seed}


def store(
    tokens: Annotated[str, typer.Option(help="Tokens of the corpus: 500k, 10M, 100M.")] = "10M",
    vocab_size: Annotated[
        int, typer.Option(min=2, max=2**22, help="Token ids of the vocabulary.")
    ] = 32_000,
    queries: Annotated[int, typer.Option(min=1, help="Contexts to look up.")] = 2000,
    rounds: Annotated[int, typer.Option(min=1, help="Look-ups of each context.")] = 5,
    budget: Annotated[int, typer.Option(min=1, help="Nodes of a draft.")] = 64,
    seed: Annotated[int, typer.Option(help="Random seed of the synthetic text.")] = 0,
    scratch: Annotated[
        Path | None, typer.Option(help="Folder to build in; default: the system's temporary one.")
    ] = None,
    json: Annotated[
        Path | None, typer.Option("--json", help="Write the figures to this JSON file.")
    ] = None,
) -> None:
    """Measure the building, opening and look-ups of a store of --tokens tokens."""
    from ragspec.pipelines.console.terminal import Terminal

    count = parse_tokens(tokens)
    check_output(json)
    terminal = Terminal()
    with TemporaryDirectory(dir=scratch, prefix="ragspec-bench-") as name:
        figures = run_store_benchmark(
            Path(name),
            count,
            vocab_size=vocab_size,
            queries=queries,
            rounds=rounds,
            budget=budget,
            seed=seed,
            progress=terminal.note,
        )
    rows = [
        (key, f"{value:,.4g}" if isinstance(value, float) else str(value))
        for key, value in figures.items()
    ]
    terminal.table("store", ("figure", ">value"), rows)
    if json is not None:
        json.write_text(json_text.dumps(figures, indent=1) + "\n", encoding="utf-8")
