"""Benchmarks of single parts: images, long documents, retrieval, stores, kNN language models.

`python benchmarks/bench.py COMMAND --help` lists the options of a benchmark.
"""

from __future__ import annotations

import typer
from harness.image_cli import image
from harness.knn import knn
from harness.long import long
from harness.retrieval import retrieval
from harness.store import store

from ragspec.pipelines.console.records import add_command

app = typer.Typer(no_args_is_help=True, help=__doc__)
for command in (image, knn, long, retrieval, store):
    add_command(app, command)

if __name__ == "__main__":
    app()
