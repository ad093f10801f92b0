"""The options of `ragspec bench`."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ragspec.pipelines.bench.image import image
from ragspec.pipelines.bench.knn import knn
from ragspec.pipelines.bench.long import long
from ragspec.pipelines.bench.modes import MODES, PEERS, known
from ragspec.pipelines.bench.retrieval import retrieval
from ragspec.pipelines.bench.store import store
from ragspec.pipelines.console.options import HELP, ScopeOption, be_quiet, checked_output

TABLE_WIDTH = 120


app = typer.Typer(
    no_args_is_help=True,
    context_settings=HELP,
    help="Measure side by side with peers in one run.",
)


@app.callback()
def bench() -> None:
    """Measure side by side with peers in one run."""


app.command()(image)


app.command()(store)


app.command()(retrieval)


app.command()(knn)


app.command()(long)


@dataclass(frozen=True, slots=True)
class TextBench:
    """What one `ragspec bench text` was asked for; data None means the bundled prompts."""

    model: str
    draft_model: str
    data: Path | None
    modes: tuple[str, ...]
    budget: str
    dtype: str
    device: str
    items: int
    repeats: int
    store: Path | None = None
    history: Path | None = None
    scope: str = "global"

    def facts(self) -> dict[str, Any]:
        """Return what the JSON file says about the run."""
        names = ("model", "draft_model", "budget", "dtype", "device", "items", "repeats", "scope")
        stores = {name: path.name for name in ("store", "history") if (path := getattr(self, name))}
        return {name: getattr(self, name) for name in names} | stores


@app.command()
def text(
    model: Annotated[str, typer.Option(help="Path or name of the target.")] = "starter",
    draft_model: Annotated[
        str, typer.Option(help="Path or name of the draft model; '' for none.")
    ] = "starter-draft",
    data: Annotated[
        Path | None,
        typer.Option(help="Lines of {id, category, prompt}, or Spec-Bench rows."),
    ] = None,
    modes: Annotated[
        str,
        typer.Option(
            help=f"Comma-separated, of {', '.join(PEERS)}, plain, `ragspec drafters`' and folders "
            "of heads; a plus sign joins drafters."
        ),
    ] = ",".join(MODES),
    store: Annotated[
        Path | None, typer.Option(help="A store of text to draft from (`ragspec store build`).")
    ] = None,
    history: Annotated[
        Path | None,
        typer.Option(help="A store of the model's own answers (`ragspec store from-answers`)."),
    ] = None,
    scope: ScopeOption = "global",
    budget: Annotated[str, typer.Option(help="'auto' or a number of draft nodes.")] = "auto",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, ...")] = "auto",
    device: Annotated[str, typer.Option(help="cpu, an accelerator, or auto.")] = "auto",
    items: Annotated[int, typer.Option(min=1, help="At most so many prompts a category.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each prompt in each mode.")] = 1,
    json: Annotated[Path | None, typer.Option("--json", help="Write the rows here.")] = None,
    spec_bench: Annotated[
        Path | None, typer.Option(help="Write the last mode's answers in Spec-Bench's format.")
    ] = None,
) -> None:
    """Compare ways of decoding on the same prompts; the bundled ones without --data."""
    names = tuple(name.strip() for name in modes.split(",") if name.strip())
    for path in (json, spec_bench):
        checked_output(path)
    asked = TextBench(
        *(model, draft_model, data, names, budget, dtype, device, items, repeats),
        *(store, history, scope),
    )
    measure(asked, json, spec_bench)


def measure(asked: TextBench, json: Path | None, spec_bench: Path | None) -> None:
    """Run the benchmark, print its table, and write the files that were asked for."""
    from rich.console import Console

    from ragspec.drafters.build import check_draft_model
    from ragspec.engine.engine import Engine
    from ragspec.errors import InputError
    from ragspec.models.load import load_model
    from ragspec.pipelines.bench.modes import build_modes, check_modes
    from ragspec.pipelines.bench.prompts import bundled_items, by_category, read_items
    from ragspec.pipelines.bench.table import make_table
    from ragspec.pipelines.bench.text import run_benchmark, write_json, write_spec_bench
    from ragspec.pipelines.methods import open_sources

    check_modes(asked.modes)
    be_quiet()
    engine = Engine.from_pretrained(
        asked.model, "context", None, asked.budget, asked.device, asked.dtype
    )
    draft = None
    if asked.draft_model:
        draft, own = load_model(asked.draft_model, asked.device, asked.dtype)
        check_draft_model(draft, own, engine.tokenizer, engine.target.vocab_size)
    if asked.data is None:
        found = bundled_items(engine)
    else:
        found = read_items(asked.data, engine.tokenizer, engine.target.max_length)
    items = [item for group in by_category(found).values() for item in group[: asked.items]]
    sources = open_sources(
        *(asked.store, asked.history),
        tokenizer=engine.tokenizer,
        model=engine.model,
        scope=asked.scope,
    )
    modes = build_modes(asked.modes, engine, draft, lambda: copy.deepcopy(engine.model), sources)
    if not modes:
        raise InputError(
            f"no mode is left of {', '.join(asked.modes) or 'none'}; expected some of "
            f"{', '.join(known())}, those with a model only together with --draft-model"
        )
    with Console(stderr=True).status("measuring") as status:
        result = run_benchmark(items, modes, repeats=asked.repeats, progress=status.update)
    baseline = "hf-greedy" if "hf-greedy" in modes else next(iter(modes))
    rows = result.rows(baseline)
    console = Console()
    if not console.is_terminal:  # a pipe or a file: rich would cut the table to 80 columns
        console = Console(width=TABLE_WIDTH)
    console.print(make_table(rows, baseline))
    if json is not None:
        write_json(json, rows, asked.facts() | {"baseline": baseline})
    if spec_bench is not None:
        write_spec_bench(spec_bench, result, list(modes)[-1], engine.tokenizer)


def main(arguments: Sequence[str]) -> int:
    """Run the command line `ragspec bench ...`; returns the exit code."""

    result = app(list(arguments), standalone_mode=False, prog_name="ragspec bench")
    return result if isinstance(result, int) else 0
