"""Time to index many small files, and to refresh the index when nothing has changed.

    OMP_NUM_THREADS=1 python benchmarks/indexing.py [--files 10000]

Each file is Markdown of a heading and 120 words, drawn from 5,000 by a fixed seed. Processor time
stands beside wall time, because other work disturbs it less.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from ragspec.retrievers.search import upkeep
from ragspec.retrievers.search.documents import load_documents
from ragspec.retrievers.search.passage_index import PassageIndex


def write_files(folder: Path, count: int) -> None:
    """Write files into a hundred folders."""
    draw = random.Random(1)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(draw.choices(letters, k=3 + number % 7)) for number in range(5000)]
    for number in range(count):
        place = folder / str(number % 100)
        place.mkdir(parents=True, exist_ok=True)
        text = " ".join(draw.choices(words, k=120))
        (place / f"{number}.md").write_text(f"# Note {number}\n\n{text}.\n", encoding="utf-8")


def timed(name: str, act: Callable[[], object]) -> None:
    """Print the seconds that a step takes."""
    wall, processor = time.perf_counter(), time.process_time()
    act()
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    print(f"{name:8} {wall:6.2f} s wall, {processor:6.2f} s of processor time", flush=True)


def main() -> None:
    """Time a build and a refresh."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", type=int, default=10_000)
    count: int = parser.parse_args().files
    with tempfile.TemporaryDirectory() as folder:
        docs, index = Path(folder, "docs"), Path(folder, "docs.idx")
        write_files(docs, count)

        def build() -> None:
            PassageIndex.build(load_documents(docs)).save(index)

        timed("build", build)
        timed("refresh", lambda: upkeep.refresh(index))


if __name__ == "__main__":
    main()
