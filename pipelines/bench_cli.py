"""The options of `ragspec bench`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Measure side by side with peers in one run.")


@app.callback()
def bench() -> None:
    """Measure side by side with peers in one run."""


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
    modes: Annotated[str, typer.Option(help="Comma-separated; see --list-modes.")] = "",
    budget: Annotated[str, typer.Option(help="'auto' or a number of draft nodes.")] = "auto",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, ...")] = "auto",
    device: Annotated[str, typer.Option(help="cpu, an accelerator, or auto.")] = "auto",
    items: Annotated[int, typer.Option(help="At most so many prompts a category.")] = 64,
    repeats: Annotated[int, typer.Option(help="Runs of each prompt in each mode.")] = 1,
    json: Annotated[Path | None, typer.Option("--json", help="Write the rows here.")] = None,
    spec_bench: Annotated[
        Path | None, typer.Option(help="Write answers in Spec-Bench's format here.")
    ] = None,
    list_modes: Annotated[bool, typer.Option("--list-modes", help="Print the modes.")] = False,
) -> None:
    """Compare ways of decoding on the same prompts; the bundled ones without --data."""
    from rich.console import Console

    from ragspec.engine import Engine
    from ragspec.loading import load_model
    from ragspec.pipelines.bench import run_benchmark, write_json, write_spec_bench
    from ragspec.pipelines.bench_data import bundled_items, by_category, read_items
    from ragspec.pipelines.bench_modes import MODES, build_modes
    from ragspec.pipelines.bench_table import make_table

    names = [name.strip() for name in modes.split(",") if name.strip()] or list(MODES)
    console = Console(stderr=True)
    if list_modes:
        Console().print("\n".join(MODES))
        return
    engine = Engine.from_pretrained(model, "context", None, budget, device, dtype)
    draft = load_model(draft_model, device, dtype)[0] if draft_model else None
    if data is None:
        found = bundled_items(engine)
    else:
        found = read_items(data, engine.tokenizer, engine.target.max_length)
    chosen = [item for group in by_category(found).values() for item in group[:items]]
    built = build_modes(names, engine, draft, lambda: copy.deepcopy(engine.model))
    with console.status("measuring") as status:
        result = run_benchmark(chosen, built, repeats=repeats, progress=status.update)
    baseline = "hf-greedy" if "hf-greedy" in built else next(iter(built))
    rows = result.rows(baseline)
    Console().print(make_table(rows, baseline))
    facts = {
        "model": model,
        "draft_model": draft_model,
        "dtype": str(engine.target.dtype),
        "device": str(engine.target.device),
        "budget": budget,
        "baseline": baseline,
        "repeats": repeats,
    }
    if json is not None:
        write_json(json, rows, facts)
    if spec_bench is not None:
        write_spec_bench(spec_bench, result, names[-1], engine.tokenizer)
