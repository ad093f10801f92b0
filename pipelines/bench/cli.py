"""The commands `ragspec bench text` and `ragspec bench image`."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from ragspec.pipelines.bench.measure import DEFAULT_VARIANTS, PEERS
from ragspec.pipelines.console.options import HELP, checked_output, silence_transformers

HELP_TEXT = "Measure variants side by side in one run: paired, interleaved, medians of ratios."
app = typer.Typer(no_args_is_help=True, context_settings=HELP, help=HELP_TEXT)

JsonPath = Annotated[Path | None, typer.Option("--json", help="Write the rows to this JSON file.")]
PagePath = Annotated[Path | None, typer.Option("--html", help="Write the results to this page.")]
Dtype = Annotated[
    str, typer.Option(help="Precision of the weights: float32, bfloat16, float16 or auto.")
]
Device = Annotated[str, typer.Option(help="Device of the model: cpu, an accelerator or auto.")]


@app.callback()
def bench() -> None:
    """Measure variants in one batch in one run."""


@app.command()
def text(
    model: Annotated[str, typer.Option(help="Name or folder of the target model.")] = "starter",
    draft_model: Annotated[
        str, typer.Option(help="Name or folder of the draft model; '' for none.")
    ] = "starter-draft",
    data: Annotated[
        Path | None,
        typer.Option(
            help="JSON lines of {id, category, prompt} or Spec-Bench rows. Default: bundled ones."
        ),
    ] = None,
    variants: Annotated[
        str,
        typer.Option(
            help=f"Comma-separated: {', '.join(PEERS)} (@N: N draft tokens a step), plain, names "
            "of `ragspec drafters`, folders of heads. A plus sign fuses drafters."
        ),
    ] = ",".join(DEFAULT_VARIANTS),
    store: Annotated[
        Path | None, typer.Option(help="Store of text to draft from (`ragspec store build`).")
    ] = None,
    history: Annotated[
        Path | None,
        typer.Option(help="Store of the model's own answers (`ragspec store from-answers`)."),
    ] = None,
    budget: Annotated[str, typer.Option(help="Draft nodes a step: 'auto' or a number.")] = "auto",
    dtype: Dtype = "auto",
    device: Device = "auto",
    items: Annotated[int, typer.Option(min=1, help="Most prompts of each category.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each prompt in each variant.")] = 1,
    json: JsonPath = None,
    html: PagePath = None,
) -> None:
    """Compare variants of text decoding, transformers' modes among them, on the same prompts."""
    from rich.console import Console

    from ragspec.drafters.build import check_draft_model
    from ragspec.engine.engine import Engine
    from ragspec.errors import InputError
    from ragspec.models.load import load_model
    from ragspec.pipelines.bench.measure import by_category, choose_baseline, run_benchmark
    from ragspec.pipelines.bench.prompts import bundled_items, read_items
    from ragspec.pipelines.bench.results import show_results
    from ragspec.pipelines.bench.variants import build_variants, check_variants, known_variants
    from ragspec.pipelines.methods import open_sources

    names = _split(variants)
    check_variants(names)
    for path in (json, html):
        checked_output(path)
    silence_transformers()
    engine = Engine.from_pretrained(model, "context", None, budget, device, dtype)
    draft = None
    if draft_model:
        draft, draft_tokenizer = load_model(draft_model, device, dtype)
        check_draft_model(draft, draft_tokenizer, engine.tokenizer, engine.target.vocab_size)
    if data is None:
        prompts = bundled_items(engine)
    else:
        prompts = read_items(data, engine.tokenizer, engine.target.max_length)
    prompts = [prompt for group in by_category(prompts).values() for prompt in group[:items]]
    sources = open_sources(store, history, tokenizer=engine.tokenizer, model=engine.model)
    built = build_variants(names, engine, draft, lambda: copy.deepcopy(engine.model), sources)
    if not built:
        raise InputError(
            f"Expected --variants among {', '.join(known_variants())}, got {variants!r}. Those "
            "with a model need --draft-model."
        )
    with Console(stderr=True).status("measuring") as status:
        rows = run_benchmark(prompts, built, repeats=repeats, on_progress=status.update)
    facts = {
        **{"model": model, "draft_model": draft_model, "budget": budget, "repeats": repeats},
        **{"dtype": str(engine.model.dtype), "device": str(engine.model.device), "items": items},
    }
    facts |= {name: path.name for name, path in (("store", store), ("history", history)) if path}
    show_results(rows, choose_baseline(built), facts, json, html)


@app.command()
def image(
    model: Annotated[
        str, typer.Option("--model", "-m", help="Bundled image set or folder of a pipeline.")
    ] = "tiles",
    variants: Annotated[
        str,
        typer.Option(
            help="Comma-separated RULE[@VALUE][:DRAFTER], of latents also fewer@N; default: "
            "exact,lantern,lantern++ or, of latents, aligned,near@0.02."
        ),
    ] = "",
    images: Annotated[int, typer.Option(min=1, help="Pictures to draw in each variant.")] = 16,
    budget: Annotated[str, typer.Option(help="Draft nodes a step: 'auto' or a number.")] = "12",
    guidance: Annotated[float, typer.Option(min=0.0, help="Scale of classifier-free guidance.")] = (
        2.0
    ),
    temperature: Annotated[float, typer.Option(min=0.0, help="Temperature of sampling.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Random seed of the first picture.")] = 0,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Denoising steps of a latent; default: the model's.")
    ] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    json: JsonPath = None,
    html: PagePath = None,
) -> None:
    """Compare variants of drawing on the same seeds: seconds, forwards and relaxation."""
    from rich.console import Console

    from ragspec.pipelines.bench.images import ImageOptions, build_images
    from ragspec.pipelines.bench.measure import run_benchmark
    from ragspec.pipelines.bench.results import show_results
    from ragspec.pipelines.console.options import number_or_name

    for path in (json, html):
        checked_output(path)
    silence_transformers()
    options = ImageOptions(number_or_name(budget), guidance, temperature, steps, device, dtype)
    items, built = build_images(model, _split(variants), images, seed, options)
    with Console(stderr=True).status("drawing") as status:
        rows = run_benchmark(items, built, skip_loops=False, on_progress=status.update)
    facts = {"model": model, "budget": budget, "images": images, "seed": seed}
    facts |= {"guidance": guidance, "temperature": temperature, "steps": steps}
    show_results(rows, "plain", facts, json, html)


def main(arguments: Sequence[str]) -> int:
    """Run `ragspec bench ...` and return the exit code."""
    code = app(list(arguments), standalone_mode=False, prog_name="ragspec bench")
    return code if isinstance(code, int) else 0


def _split(names: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in names.split(",") if name.strip())
